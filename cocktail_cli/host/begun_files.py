"""The files that a run began with and uses again: their hashes are in the ledger's origin, under every head.

file:recipe.yaml, file:tokenizer/<name>    in the run's folder
file:base/<name>                           in the folder of the base model, wherever that is
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from cocktail_cli.errors import damaged

COPY_AGAIN = "copy or download it again, from where it was right"
KEY, BASE = "file:", "base/"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashedFile(Protocol):
    """A file whose hash is known."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def hashes_of(folder: Path, names: Iterable[str], base: Iterable[HashedFile]) -> dict[str, str]:
    """Return the keys of an origin: for files and folders of the run's folder, and for the base's files."""
    found = {KEY + BASE + file.name: file.sha256 for file in base}
    for name in names:
        paths = sorted((folder / name).iterdir()) if (folder / name).is_dir() else [folder / name]
        found |= {
            KEY + path.relative_to(folder).as_posix(): sha256_of(path) for path in paths if path.is_file()
        }
    return found


def begun_files(origin: Mapping[str, str]) -> dict[str, str]:
    """Return name -> sha256 of the files in the run's folder."""
    names = {key.removeprefix(KEY): sha256 for key, sha256 in origin.items() if key.startswith(KEY)}
    return {name: sha256 for name, sha256 in names.items() if not name.startswith(BASE)}


def check_begun_files(folder: Path, origin: Mapping[str, str], below: str = "") -> None:
    """Raise Failure (altered) for the first file of the run's folder that is not what the run began with.

    Args:
        below: only files in this folder of it.
    """
    for name, expected in begun_files(origin).items():
        path = folder / name
        if not name.startswith(below):
            continue
        found = sha256_of(path) if path.is_file() else "that of no file"
        if found != expected:
            raise damaged(path, f"its sha256 is {found}, the run began with {expected}", COPY_AGAIN)


def altered_base_files(origin: Mapping[str, str], base: Iterable[HashedFile]) -> list[str]:
    """Name the files of the base model that are not those that the run began with, or are missing."""
    wanted = {key.removeprefix(KEY + BASE): s for key, s in origin.items() if key.startswith(KEY + BASE)}
    there = {file.name: file.sha256 for file in base}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
