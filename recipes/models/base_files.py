"""The files of a base model: which of a folder they are, their hashes, and the digests compared at a join."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from recipes.downloads import CODE_FILES, Licence
from recipes.errors import ModelError
from recipes.foreign_json import check_json_file

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
BINS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # converted to safetensors
TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER)
AS_SAFETENSORS = "the same model as safetensors, from somebody you trust"
HASH_BLOCK = 1 << 20  # bytes under one hash (transport.transfer has the same)


@dataclass(frozen=True)
class BaseFile:
    """One file of the base, as announced to peers."""

    name: str  # no directories
    size: int
    sha256: str
    blocks: bytes = b""  # SHA-256 of each MiB, one after the other: a peer repairs a damaged file by them


@dataclass(frozen=True)
class Base:
    """The model a run starts from, on this disk."""

    folder: Path
    files: tuple[BaseFile, ...]  # by name
    licence: Licence = field(default_factory=Licence)

    @property
    def digest(self) -> str:
        """sha256, hex, of the names and hashes of its files."""
        return manifest_digest(self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def companion_patterns(code: bool) -> tuple[str, ...]:
    """Patterns of the files fetched beside the weights; `code`: those with code as well."""
    return (*COMPANIONS, CODE_FILES) if code else COMPANIONS


def cached_commit(folder: Path) -> str | None:
    """The commit that a folder of the Hugging Face cache holds; None for any other folder."""
    inside = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if inside and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def base_manifest(folder: Path, code: bool = False) -> tuple[BaseFile, ...]:
    """List and hash the files that a peer needs to hold this base. Errors: ModelError where a peer would not
    take one of them."""
    names = {path.name for pattern in (*WEIGHTS, *companion_patterns(code)) for path in folder.glob(pattern)}
    for path in sorted(folder / name for name in names if name.endswith(".json")):
        try:
            check_json_file(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be used: {error}") from error
    return tuple(hash_file(folder / name) for name in sorted(names))


def hash_file(path: Path) -> BaseFile:
    """Hash a file and its blocks in one pass: a disk is slower than SHA-256."""
    digest, size, blocks = hashlib.sha256(), 0, list[bytes]()
    with path.open("rb") as file:
        while (block := file.read(HASH_BLOCK)) or not blocks:
            digest.update(block)
            blocks.append(hashlib.sha256(block).digest())
            size += len(block)
    return BaseFile(path.name, size, digest.hexdigest(), b"".join(blocks))


class HashedFile(Protocol):
    """A file of a base, as the host or a peer describes it."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def manifest_digest(files: Iterable[HashedFile]) -> str:
    """sha256, hex, of the names and hashes of files, in the given order."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()


def base_digests(files: Sequence[HashedFile]) -> dict[str, str]:
    """Digests compared at a join: "tokenizer", and "base" (config and weights) where `files` have weights."""
    tokenizer = [f for f in files if any(fnmatch(f.name, pattern) for pattern in TOKENIZER)]
    others = [f for f in files if f not in tokenizer]
    found = {"tokenizer": manifest_digest(tokenizer)}
    if any(fnmatch(f.name, pattern) for f in others for pattern in WEIGHTS):
        found["base"] = manifest_digest(others)
    return found
