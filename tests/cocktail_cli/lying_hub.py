"""A hub in the test's own process that keeps to the protocol, and lies where a test wants it to.

with LyingHub(base, {messages.Ready: lambda m: [messages.Over("...", True)]}) as hub:
    cocktail("join", hub.url, "-y")
assert messages.Ready in hub.heard  # it got as far as it must
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from recipes.config import load_recipe
from recipes.models.base_model import prepare_base
from transport.protocol import CurveKeys, RunKeys, decode_to_hub, encode, messages
from transport.transfer import HASH_BLOCK
from transport.wire import RouterWire

RUN = "toy-run"
Lie = Callable[[Any], list[messages.Message]]


def honest_files(folder: Path) -> dict[str, bytes]:
    """The files of the smallest base model, made in a folder."""
    base = prepare_base(load_recipe("smoke"), folder)
    return {file.name: (base.folder / file.name).read_bytes() for file in base.files}


def hashes_of(data: bytes) -> bytes:
    starts = range(0, max(1, len(data)), HASH_BLOCK)
    return b"".join(hashlib.sha256(data[at : at + HASH_BLOCK]).digest() for at in starts)


class LyingHub:
    """Answers on the loopback, from a thread.

    Args:
        files: of the base model, by name.
        lies: what is answered in place of the truth, by the kind of a message.
        status: fields that replace those of the status.
        recipe: the text that it calls the run's recipe.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        lies: Mapping[type, Lie] | None = None,
        status: Mapping[str, Any] | None = None,
        recipe: str = "",
    ) -> None:
        self.files, self.lies, self.told = files or {}, lies or {}, status or {}
        self.recipe = recipe or load_recipe("smoke").to_json()
        self.heard: list[type] = []
        keys = RunKeys.generate()
        self.wire = RouterWire("127.0.0.1", 0, CurveKeys(keys.public, keys.secret))
        self.url = str(keys.url("127.0.0.1", self.wire.port, RUN))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve, name="lying hub", daemon=True)

    def __enter__(self) -> LyingHub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.wire.wake()
        self.thread.join(10)
        self.wire.close()

    def serve(self) -> None:
        while not self.over.is_set():
            for conn, frames in self.wire.poll(1.0):
                message = decode_to_hub(frames[0])
                self.heard.append(type(message))
                lie = self.lies.get(type(message), self.truth)
                for answer in lie(message):
                    data = (
                        [self.object(answer.name)[self.place(message)]]
                        if isinstance(answer, messages.Data)
                        else []
                    )
                    self.wire.send(conn, [encode(answer), *data])

    def place(self, asked: messages.Get) -> slice:
        return slice(asked.index * asked.chunk, (asked.index + 1) * asked.chunk)

    def object(self, name: str) -> bytes:
        if name.startswith("hashes/"):
            return hashes_of(self.files[name.removeprefix("hashes/base/")])
        return self.files[name.removeprefix("base/")]

    @property
    def base(self) -> list[messages.File]:
        return [
            messages.File(
                name,
                len(data),
                hashlib.sha256(data).hexdigest(),
                hashlib.sha256(hashes_of(data)).hexdigest() if len(data) > HASH_BLOCK else "",
            )
            for name, data in self.files.items()
        ]

    @property
    def welcome(self) -> messages.Welcome:
        digest = hashlib.sha256(self.recipe.encode()).hexdigest()
        return messages.Welcome(
            messages.PROTOCOL, RUN, "ann", "s" * 22, self.recipe, digest, self.base, 0, 1.0, term=1
        )

    @property
    def status(self) -> dict[str, Any]:
        known = msgspec.to_builtins(self.welcome)
        shared = ("run", "recipe", "recipe_hash", "base", "round", "log_bytes", "snapshots")
        figures = {"state": "running", "step": 1, "max_steps": 100, "parameters": 1_012_992, "needs": {}}
        return {name: known[name] for name in shared} | figures | self.told

    def truth(self, message: messages.Message) -> list[messages.Message]:
        match message:
            case messages.AskStatus():
                return [messages.Status(json.dumps(self.status))]
            case messages.Hello() | messages.Resume():
                return [self.welcome]
            case messages.Attach():
                return [messages.Attached(32)]
            case messages.Get():
                return [messages.Data(message.name, message.index, len(self.object(message.name)))]
            case messages.Leave():
                return [messages.Over("left", False)]
            case _:
                return []
