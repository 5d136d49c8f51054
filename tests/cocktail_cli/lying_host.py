"""A host of the smallest base model whose hub lies where a test wants it to; see `lying_hub`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lying_hub import WELCOME, Lie, LyingHub, Serve
from msgspec.structs import replace

from recipes.config import load_recipe
from recipes.models import prepare_base
from transport.protocol import RunKeys, messages
from transport.transfer import HASH_BLOCK
from transport.wire import RouterWire

FIGURES = {"state": "running", "step": 1, "max_steps": 100, "parameters": 1_012_992, "needs": {}}


def honest_files(folder: Path) -> dict[str, bytes]:
    """The files of the smallest base model, made in a folder."""
    base = prepare_base(load_recipe("smoke"), folder)
    return {file.name: (base.folder / file.name).read_bytes() for file in base.files}


def lying_host(
    files: Mapping[str, bytes] | None = None,
    lies: Mapping[type, Lie] | None = None,
    status: Mapping[str, Any] | None = None,
    recipe: str = "",
) -> LyingHub:
    """A hub on the loopback that serves a base model.

    Args:
        files: of the base model, by name.
        lies: the answers in place of honest ones, by the kind of a message.
        status: fields that replace those of the status.
        recipe: the text that it calls the run's recipe.
    """
    text = recipe or load_recipe("smoke").to_json()
    base, serves = [], dict[str, Serve]()
    for name, data in (files or {}).items():
        base.append(offered(name, data))
        serves |= serving(name, data)
    keys = RunKeys.generate()
    welcome = replace(WELCOME, recipe=text, recipe_hash=sha256(text.encode()), base=base, term=1)
    wire = RouterWire("127.0.0.1", 0, keys.pair)
    return LyingHub(wire, welcome, serves, dict(lies or {}), FIGURES | dict(status or {}), keys=keys)


def offered(name: str, data: bytes) -> messages.File:
    return messages.File(name, len(data), sha256(data), sha256(hashes_of(data)))


def serving(name: str, data: bytes) -> dict[str, Serve]:
    return {f"base/{name}": lambda _: data, f"hashes/base/{name}": lambda _: hashes_of(data)}


def hashes_of(data: bytes) -> bytes:
    starts = range(0, max(1, len(data)), HASH_BLOCK)
    return b"".join(hashlib.sha256(data[at : at + HASH_BLOCK]).digest() for at in starts)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
