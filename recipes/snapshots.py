"""Snapshots: x' of one round as a model folder, DIR/<round>, folded from an earlier one and the packets
between.

    model.safetensors   header | x' in FP32, in the order of the layout | the base's buffers, unchanged

The weights have a hash for each chunk. SHA256SUMS has the hashes of the files beside them, as `sha256sum -c`
reads it, and the header of the weights has its hash. A snapshot is not used unless all of them are right.

Memory of a fold is bounded whatever the size of the model: each shard is swept window by window, and all
packets of a batch move on together, in the order of their rounds, so each window is read and written once a
batch. The result equals `recipes.algorithm.replay` bit for bit: each element meets the same additions in the
same order.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from compress import Cocktail, PacketError, Shard, decode_windows, fingerprint, sampled, split
from compress.coding import Bytes, FileSlice
from compress.packet import window_memory
from compress.sampling import Schedule
from recipes.errors import ModelError
from recipes.weight_files import (
    StoredVector,
    TensorSpec,
    check_disk_space,
    read_header,
    safetensors_header,
    weights_file_in,
)

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


# ---- the fold ----------------------------------------------------------------------------------------------

WINDOW = 1 << 20  # elements; a multiple of every block of a sample, and of a row of the fingerprint
WINDOW_MEMORY = 48 * WINDOW  # bytes, about, while a window is worked on
NOTHING: Mapping[str, str] = {}
BUDGET = 384 << 20  # bytes of memory of a fold, in all


class WrongFold(ModelError):
    """The result of a fold differs from the model that the run's peers hold."""


@dataclass(frozen=True)
class KnownFingerprint:
    """The fingerprint that the run's peers agreed on before a round."""

    round: int
    fingerprint: int  # of x' before the round


@dataclass(frozen=True)
class Fold:
    """One fold: a stored vector and the packets of the rounds after it."""

    run: str
    mix: Cocktail
    seed: int
    source: StoredVector
    start: int  # the round that the source is x' of
    packets: Sequence[Bytes]  # of the rounds from there on
    known: KnownFingerprint | None = None  # of a round from `start` to the last: checked in passing
    stop: Callable[[], bool] = lambda: False  # polled between two windows
    progress: Callable[[int, int], None] = lambda done, total: None  # bytes written, bytes in all
    budget: int = BUDGET

    @property
    def round(self) -> int:
        return self.start + len(self.packets)

    def write(self, folder: Path, words: Mapping[str, str] = NOTHING) -> int:
        """Write the weights of x' into `folder`, synced to disk, with more `words` in their header; returns
        the fingerprint of x'.

        Errors: WrongFold, SnapshotCancelled; OSError with ENOSPC, before anything is written where that can
        be seen. The caller removes the folder after an error.
        """
        metadata = {"format": "pt", "cocktail_round": str(self.round), "cocktail_run": self.run, **words}
        layout = self.source.layout
        specs = {
            name: TensorSpec("F32", shape, 4 * prod(shape))
            for name, shape in zip(self.source.names, layout.shapes, strict=True)
        } | {name: tensor.spec for name, tensor in self.source.buffers.items()}

        def header(number: int) -> bytes:
            return safetensors_header(metadata | {"cocktail_fingerprint": f"{number:016x}"}, specs)

        start = len(header(0))
        check_disk_space(folder, start + sum(spec.size for spec in specs.values()))
        with open(folder / self.source.file_name, "w+b", buffering=0) as file:
            number = self._sweep(file, start)
            file.seek(start + 4 * layout.size)
            for tensor in self.source.buffers.values():
                for at in range(0, len(tensor.data), CHUNK):
                    _write(file, bytes(tensor.data[at : at + CHUNK]))
            file.seek(0)
            _write(file, header(number))
            os.fsync(file.fileno())
        return number

    def _sweep(self, file: BinaryIO, start: int) -> int:
        """Write the vector from byte `start` on, a batch of packets at a time; its fingerprint."""
        shards, number = self.mix.cut(self.source.layout.size, self.seed), 0
        batches, done = list(self._batches()), 0
        for first, last in batches:
            checked, number = 0, 0
            mark = self.known.round - self.start - first if self.known else -1  # checked before this packet
            parts = [self._shard_packets(i) for i in range(first, last)]
            for shard in shards:
                batch = [self._cursor(first + i, shard, of[shard.number]) for i, of in enumerate(parts)]
                for begin in range(shard.start, shard.stop, WINDOW):
                    end = min(begin + WINDOW, shard.stop)
                    if first == 0:
                        window = self.source.read(begin, end)
                    else:
                        place = FileSlice(file, start + 4 * begin, 4 * (end - begin))
                        window = np.frombuffer(bytearray(bytes(place)), np.float32)
                    checked += self._apply(batch, window, shard, begin, mark)
                    number += fingerprint(torch.from_numpy(window), begin)
                    file.seek(start + 4 * begin)
                    _write(file, window.data)
                    done += window.nbytes
                    self.progress(done, 4 * self.source.layout.size * len(batches))
            if 0 <= mark <= last - first:
                self._check(number if mark == last - first else checked)
        return number & 0xFFFFFFFFFFFFFFFF

    def _apply(
        self, batch: list[PacketCursor], window: np.ndarray, shard: Shard, begin: int, mark: int
    ) -> int:
        """Add all packets to one window of a shard; returns its fingerprint before packet `mark`."""
        checked, within = 0, begin - shard.start
        order: tuple[tuple[int, ...], int] | None = None
        standing = np.empty(0, np.int64)
        for i, cursor in enumerate(batch):
            self._poll()
            if i == mark:
                checked = fingerprint(torch.from_numpy(window), begin)
            schedule, block = cursor.schedule, cursor.schedule.block_size
            if (schedule.key, block) != order:  # most rounds share an epoch of the schedule
                order = schedule.key, block
                standing = schedule.places(within // block, -(-(within + len(window)) // block))
            with _names_round(cursor.round):
                cursor.add(window, standing)
        return checked

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Ranges of packets, not empty, that fit the memory budget; of no packets one empty range."""
        first, room = 0, self.budget - WINDOW_MEMORY
        for i in range(len(self.packets)):
            takes = 0  # one shard is open at a time
            with _names_round(self.start + i):
                for part in self._shard_packets(i):
                    takes = max(takes, window_memory(part, sampled(part)) if len(part) else 0)
            if i > first and takes > room:
                yield first, i
                first, room = i, self.budget - WINDOW_MEMORY
            room -= takes
        yield first, len(self.packets)

    def _shard_packets(self, i: int) -> list[Bytes]:
        with _names_round(self.start + i):
            return split(self.packets[i], self.mix.shard_count)

    def _cursor(self, i: int, shard: Shard, part: Bytes) -> PacketCursor:
        self._poll()
        with _names_round(self.start + i):
            return PacketCursor(self.start + i, self._schedule(i, shard, part), part)

    def _schedule(self, i: int, shard: Shard, part: Bytes) -> Schedule:
        """Schedule a round's sample of a shard, of the p that its packet says by its m."""
        round = self.start + i
        mix = self.mix.of_length(shard.size, shard.seed, round, sampled(part))
        return mix.schedule(shard.size, shard.seed, round)

    def _poll(self) -> None:
        if self.stop():
            raise SnapshotCancelled

    def _check(self, number: int) -> None:
        assert self.known is not None
        number &= 0xFFFFFFFFFFFFFFFF
        if number != self.known.fingerprint:
            raise WrongFold(
                f"folding gives x' of round {self.known.round} the fingerprint {number:016x}, "
                f"the run's peers had {self.known.fingerprint:016x}: base model or ledger is damaged"
            )


@contextmanager
def _names_round(round: int) -> Iterator[None]:
    """Turn a PacketError into a WrongFold that names the round: the ledger is damaged."""
    try:
        yield
    except PacketError as error:
        raise WrongFold(f"the packet of round {round}: {error}") from error


class PacketCursor:
    """Position in one packet while a shard is swept."""

    def __init__(self, round: int, schedule: Schedule, packet: Bytes) -> None:
        self.round, self.schedule = round, schedule
        self.base = 0  # sampled elements before the window
        # an empty packet: the shard has not moved
        self.pieces = decode_windows(packet, schedule.m) if len(packet) else iter(())
        self.where, self.values = np.empty(0, np.int64), np.empty(0, np.float32)

    def add(self, window: np.ndarray, standing: np.ndarray) -> None:
        """Add the packet to the next window; `standing`: the schedule's places of the window's units."""
        block = self.schedule.block_size
        shift = block.bit_length() - 1
        units = self.schedule.visited(standing)
        end = self.base + (len(units) << shift)
        while True:
            count = int(np.searchsorted(self.where, end))
            at = self.where[:count] - self.base
            at = (units[at >> shift] << shift) + (at & (block - 1))
            window[at] += self.values[:count]
            self.where, self.values = self.where[count:], self.values[count:]
            if len(self.where) or (piece := next(self.pieces, None)) is None:
                break
            self.where, self.values = piece.positions.numpy(), piece.values.numpy()
        self.base = end


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`: an unbuffered file may take less at a time."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]
