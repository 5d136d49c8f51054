"""Snapshot folders: DIR/<round> with the weights of x', their chunk hashes and the model's config files.

SHA256SUMS has the hashes of the files beside the weights, as `sha256sum -c` reads it; the header of the
weights has its hash, and the weights have one for each chunk. A snapshot is not used unless all of them are
right.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import ModelError
from recipes.weight_files import read_header, weights_file_in

CHUNK = 1 << 20  # bytes under one hash
SUMS = "SHA256SUMS"
OF_SUMS = "cocktail_sums"  # the word of the weights' header with its hash


class SnapshotCancelled(Exception):
    """The caller asked to stop."""


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot on disk."""

    folder: Path
    round: int
    fingerprint: int
    run: str
    sums: str = ""  # sha256, hex, of SHA256SUMS; "": of an older version

    @property
    def weights(self) -> Path:
        return weights_file_in(self.folder)

    @property
    def hashes(self) -> Path:
        """SHA-256 of each chunk of the weights, one after the other."""
        return hashes_file_of(self.weights)


def hashes_file_of(weights: Path) -> Path:
    return weights.with_name(weights.name + ".sha256")


def altered_file(snapshot: Snapshot, stop: Callable[[], bool] = lambda: False) -> str:
    """Name the file of a snapshot that is not as it was written, or is gone; "" where all are. Reads every
    byte. One of an older version has hashes of its weights alone. Errors: SnapshotCancelled, OSError."""
    if snapshot.sums:
        path = snapshot.folder / SUMS
        text = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(text).hexdigest() != snapshot.sums:
            return SUMS
        for line in text.decode().splitlines():
            path = snapshot.folder / line[66:]
            if not path.is_file() or line != sum_line(path):
                return path.name
    hashes = snapshot.hashes.read_bytes()
    with open(snapshot.weights, "rb", buffering=0) as file:
        for at in range(0, len(hashes), 32):
            if stop():
                raise SnapshotCancelled
            if hashlib.sha256(file.read(CHUNK)).digest() != hashes[at : at + 32]:
                return f"{snapshot.weights.name} (or its hashes, {snapshot.hashes.name})"
        return snapshot.hashes.name if file.read(1) else ""


def sum_line(path: Path) -> str:
    """Format a file's line of SHA256SUMS."""
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def write_sums(folder: Path) -> dict[str, str]:
    """Write SHA256SUMS of the files in a snapshot's folder; return the words for the header of its
    weights."""
    text = "".join(f"{sum_line(path)}\n" for path in sorted(folder.iterdir()) if path.is_file())
    with open(folder / SUMS, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return {OF_SUMS: hashlib.sha256(text.encode()).hexdigest()}


def list_snapshots(folder: Path, run: str) -> list[Snapshot]:
    """List the complete snapshots of a run, by round; leftovers of a killed hub are ignored."""
    found = [snapshot_in(path) for path in numbered(folder)]
    return sorted((one for one in found if one and one.run == run), key=lambda one: one.round)


def broken_files(folder: Path) -> list[Path]:
    """List the weights of snapshots that cannot be read, and their hashes that are gone. A hub that is killed
    leaves none: weights come last."""
    found = list[Path]()
    for path in numbered(folder):
        weights = weights_file_in(path)
        if weights.is_file() and not hashes_file_of(weights).is_file():
            found.append(hashes_file_of(weights))
        elif weights.is_file() and snapshot_in(path) is None:
            found.append(weights)
    return found


def numbered(folder: Path) -> list[Path]:
    """List the folders that have the name of a round."""
    return [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def snapshot_in(path: Path) -> Snapshot | None:
    """Read what a snapshot says of itself; None where it is not complete."""
    weights = weights_file_in(path)
    if not weights.is_file() or not hashes_file_of(weights).is_file():
        return None
    with open(weights, "rb", buffering=0) as file:
        try:
            header = read_header(file, str(path))
            words = header.metadata
            number, run = int(words["cocktail_fingerprint"], 16), words["cocktail_run"]
        except (ModelError, KeyError, ValueError, TypeError):
            return None
    if words.get("cocktail_round") != path.name or weights.stat().st_size != header.size:
        return None
    return Snapshot(path, int(path.name), number, run, words.get(OF_SUMS, ""))


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot: at any instant it is whole or gone to those who read it."""
    part = folder.with_name(f"{folder.name}.part")
    with suppress(OSError):  # in use, on Windows: with the next one
        folder.rename(part)
        shutil.rmtree(part)


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
