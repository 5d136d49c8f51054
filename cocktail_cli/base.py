"""The base model of a run on a peer's disk: fetched by hash, kept in the cache, checked before every use."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from cocktail_cli.errors import Failure
from cocktail_cli.runs import cache

# What a base may consist of: data only. No Python, no pickle but `.bin`, which is read with
# weights_only=True.
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
KINDS = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
SPARE = 256 << 20  # bytes that stay free on the disk

Told = Callable[[str, int, int], None]  # what, bytes done, bytes in all


class File(Protocol):
    """One file as the hub announces it (transport.File)."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...


class Fetch(Protocol):
    """How an object of the run gets into a file."""

    def __call__(self, name: str, to: Path, progress: Callable[[int, int], None]) -> None: ...


def check_names(files: Sequence[File]) -> None:
    """The hub names the files: none may leave the folder, be code, or come twice. Raises Failure
    (rejected).
    """
    names = [file.name for file in files]
    for name in names:
        if not PLAIN.fullmatch(name) or not name.endswith(KINDS) or names.count(name) > 1:
            raise Failure("rejected", f"the run offers a file {name[:80]!r} as part of its model")


def folder_of(files: Sequence[File]) -> Path:
    """Where this very set of files lives in the cache."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in sorted(files, key=lambda f: f.name))
    return cache() / "base" / hashlib.sha256(listed.encode()).hexdigest()[:32]


def missing(files: Sequence[File], folder: Path) -> list[File]:
    """The files that are not there with the right content. Reads what is there once, whole."""
    return [file for file in files if not is_whole(folder / file.name, file)]


def is_whole(path: Path, file: File) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == file.sha256


def fetch_base(files: Sequence[File], fetch: Fetch, told: Told) -> Path:
    """The folder with all of `files`; only what is not there yet is fetched.

    Raises:
        Failure: rejected (a name that cannot be), out_of_disk, or lost (what came has another checksum).
    """
    check_names(files)
    folder = folder_of(files)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = missing(files, folder)
    room, needed = shutil.disk_usage(folder).free, sum(file.size for file in wanted)
    if wanted and needed + SPARE > room:
        raise Failure(
            "out_of_disk", f"the model needs {needed / 1e9:.1f} GB at {folder}, {room / 1e9:.1f} GB are free"
        )
    for file in wanted:
        # Several peers of one machine may fetch at once: each into a file of its own, the last one stays.
        part = folder / f".{file.name}.{os.getpid()}.part"
        fetch(f"base/{file.name}", part, partial(told, file.name))
        if not is_whole(part, file):
            part.unlink(missing_ok=True)
            raise Failure("lost", f"{file.name} came with another checksum than the run announces")
        os.replace(part, folder / file.name)
    return folder
