"""Snapshot folders: DIR/<round> with the weights of x', their chunk hashes and the model's config files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import ModelError
from recipes.weight_files import read_header, weights_file_in

CHUNK = 1 << 20  # bytes under one hash


class SnapshotCancelled(Exception):
    """The caller asked to stop."""


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot on disk."""

    folder: Path
    round: int
    fingerprint: int
    run: str

    @property
    def weights(self) -> Path:
        return weights_file_in(self.folder)

    @property
    def hashes(self) -> Path:
        """SHA-256 of each chunk of the weights, one after the other."""
        return hashes_file_of(self.weights)


def hashes_file_of(weights: Path) -> Path:
    return weights.with_name(weights.name + ".sha256")


def list_snapshots(folder: Path, run: str) -> list[Snapshot]:
    """List the complete snapshots of a run, by round; leftovers of a killed hub are ignored."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        weights = weights_file_in(path)
        if not path.name.isdecimal() or not weights.is_file() or not hashes_file_of(weights).is_file():
            continue
        with open(weights, "rb", buffering=0) as file:
            try:
                header = read_header(file, str(path))
                metadata = header.metadata
                number = int(metadata["cocktail_fingerprint"], 16)
                one = Snapshot(path, int(path.name), number, metadata["cocktail_run"])
            except (ModelError, KeyError, ValueError):
                continue
        right = metadata.get("cocktail_round") == path.name and one.run == run
        if right and weights.stat().st_size == header.size:
            found.append(one)
    return sorted(found, key=lambda one: one.round)


def remove_unfinished_snapshots(folder: Path) -> None:
    """Remove snapshots that a killed hub had begun to write."""
    for path in folder.iterdir() if folder.is_dir() else ():
        begun = path.name.isdecimal() and not weights_file_in(path).exists()
        if path.is_dir() and (begun or path.name.endswith(".part")):
            shutil.rmtree(path, ignore_errors=True)  # in use, on Windows: at the next start


def write_chunk_hashes(folder: Path, stop: Callable[[], bool]) -> None:
    """Hash the chunks of the weights in `folder` into a file beside them. Errors: SnapshotCancelled."""
    digests, weights = [], weights_file_in(folder)
    with open(weights, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            if stop():
                raise SnapshotCancelled
            digests.append(hashlib.sha256(chunk).digest())
    with open(hashes_file_of(weights), "wb") as file:
        file.write(b"".join(digests))
        file.flush()
        os.fsync(file.fileno())
