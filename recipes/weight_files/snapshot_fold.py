"""Snapshots: x' of one round as a model folder, folded from an earlier one and the packets between.

    model.safetensors   header | x' in FP32, in the order of the layout | the base's buffers, as they were

Memory is bounded whatever the size of the model: each shard is swept window by window, and all packets of a
batch move on together, in the order of their rounds, so that each window is read and written once a batch.
The result is that of `cocktail_sgd.fold`, bit for bit: each element meets the same additions in the same
order.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from compress import Cocktail, PacketError, Shard, fingerprint, pieces, split
from compress.packet import Bytes, InFile, memory
from compress.sampling import Walk, places
from recipes.errors import ModelError

from .stored_weights import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    StoredVector,
    TensorSpec,
    read_header,
    safetensors_header,
)

CHUNK = 1 << 20  # bytes of such a chunk
WINDOW = 1 << 20  # elements; a multiple of every block of a sample, and of a row of the fingerprint
WINDOW_TAKES = 48 * WINDOW  # bytes of memory, about, while one is worked on
BUDGET = 384 << 20  # bytes of memory of a fold, in all
SPARE = 256 << 20  # bytes that stay free on the disk


class FoldCancelled(Exception):
    """The fold was asked to stop."""


class WrongFold(ModelError):
    """Base and packets do not give the model that the run's peers hold."""


@dataclass(frozen=True)
class KnownFingerprint:
    """What the run's peers agreed on."""

    round: int
    fingerprint: int  # of x' before it


@dataclass(frozen=True)
class Fold:
    """x' of one round: what it is made of, and what is known of it."""

    run: str
    mix: Cocktail
    seed: int
    source: StoredVector
    start: int  # the round that the source is x' of
    packets: Sequence[Bytes]  # of the rounds from there on
    known: KnownFingerprint | None = None  # of a round from `start` to the last: looked at in passing
    stop: Callable[[], bool] = lambda: False  # asked between two windows
    told: Callable[[int, int], None] = lambda done, total: None  # bytes written, of those to be written
    budget: int = BUDGET

    @property
    def round(self) -> int:
        return self.start + len(self.packets)

    def write(self, folder: Path) -> int:
        """The weights of x' into `folder`, on the disk when this returns; the fingerprint of x'.

        Errors: WrongFold, Abandoned; OSError with ENOSPC, before anything is written where that can be seen.
        A file begun stays behind: the folder is the caller's to remove.
        """
        told = {"format": "pt", "cocktail_round": str(self.round), "cocktail_run": self.run}
        layout = self.source.layout
        tensors = {
            name: TensorSpec("F32", shape, 4 * (end - begin))
            for name, shape, begin, end in zip(
                self.source.names, layout.shapes, layout.offsets, layout.offsets[1:], strict=False
            )
        } | {name: tensor.kind for name, tensor in self.source.others.items()}

        def header(number: int) -> bytes:
            return safetensors_header(told | {"cocktail_fingerprint": f"{number:016x}"}, tensors)

        start = len(header(0))
        check_disk_space(folder, start + sum(tensor.size for tensor in tensors.values()))
        with open(folder / self.source.file, "w+b", buffering=0) as file:
            number = self._sweep(file, start)
            file.seek(start + 4 * layout.size)
            for tensor in self.source.others.values():
                for at in range(0, len(tensor.data), CHUNK):
                    _write(file, bytes(tensor.data[at : at + CHUNK]))
            file.seek(0)
            _write(file, header(number))
            os.fsync(file.fileno())
        return number

    def _sweep(self, file: BinaryIO, start: int) -> int:
        """The vector into the file from byte `start` on, a batch of packets at a time, shard after shard."""
        shards, number = self.mix.cut(self.source.layout.size, self.seed), 0
        batches, done = list(self._batches(shards)), 0
        for first, last in batches:
            looked, number = 0, 0
            mark = self.known.round - self.start - first if self.known else -1  # looked at before this packet
            parts = [self._parts(i) for i in range(first, last)]
            for shard in shards:
                batch = [self._way(first + i, shard, of[shard.number]) for i, of in enumerate(parts)]
                for begin in range(shard.start, shard.stop, WINDOW):
                    end = min(begin + WINDOW, shard.stop)
                    if first == 0:
                        window = self.source.read(begin, end)
                    else:
                        place = InFile(file, start + 4 * begin, 4 * (end - begin))
                        window = np.frombuffer(bytearray(bytes(place)), np.float32)
                    looked += self._through(batch, window, shard, begin, mark)
                    number += fingerprint(torch.from_numpy(window), begin)
                    file.seek(start + 4 * begin)
                    _write(file, window.data)
                    done += window.nbytes
                    self.told(done, 4 * self.source.layout.size * len(batches))
            if 0 <= mark <= last - first:
                self._check(number if mark == last - first else looked)
        return number & 0xFFFFFFFFFFFFFFFF

    def _through(
        self, batch: list[PacketCursor], window: np.ndarray, shard: Shard, begin: int, mark: int
    ) -> int:
        """One window of a shard through all packets; its fingerprint before packet `mark`."""
        looked, within = 0, begin - shard.start
        order: tuple[tuple[int, ...], int] | None = None
        standing = np.empty(0, np.int64)
        for i, way in enumerate(batch):
            self._poll()
            if i == mark:
                looked = fingerprint(torch.from_numpy(window), begin)
            if (way.walk.key, way.walk.block) != order:  # one epoch after the other: most rounds share it
                order, block = (way.walk.key, way.walk.block), way.walk.block
                standing = places(way.walk, within // block, -(-(within + len(window)) // block))
            with _packet_of(way.round):
                way.add(window, standing)
        return looked

    def _batches(self, shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
        """Ranges of packets that fit into the budget together, at least one each; one even of none."""
        first, room = 0, self.budget - WINDOW_TAKES
        for i in range(len(self.packets)):
            takes = 0  # one shard is open at a time
            with _packet_of(self.start + i):
                for shard, part in zip(shards, self._parts(i), strict=True):
                    takes = max(takes, memory(part, self._walk(i, shard).m) if len(part) else 0)
            if i > first and takes > room:
                yield first, i
                first, room = i, self.budget - WINDOW_TAKES
            room -= takes
        yield first, len(self.packets)

    def _parts(self, i: int) -> list[Bytes]:
        """Packet i, shard by shard."""
        with _packet_of(self.start + i):
            return split(self.packets[i], self.mix.shards)

    def _way(self, i: int, shard: Shard, part: Bytes) -> PacketCursor:
        self._poll()
        with _packet_of(self.start + i):
            return PacketCursor(self.start + i, self._walk(i, shard), part)

    def _walk(self, i: int, shard: Shard) -> Walk:
        """What packet i visits."""
        return self.mix.walk(shard.size, shard.seed, self.start + i)

    def _poll(self) -> None:
        if self.stop():
            raise FoldCancelled

    def _check(self, number: int) -> None:
        assert self.known is not None
        number &= 0xFFFFFFFFFFFFFFFF
        if number != self.known.fingerprint:
            raise WrongFold(
                f"folding gives x' of round {self.known.round} the fingerprint {number:016x}, "
                f"the run's peers had {self.known.fingerprint:016x}: base model or ledger is damaged"
            )


@contextmanager
def _packet_of(round: int) -> Iterator[None]:
    """What is wrong with a packet that was committed is wrong with the ledger: say which it is."""
    try:
        yield
    except PacketError as error:
        raise WrongFold(f"the packet of round {round}: {error}") from error


class PacketCursor:
    """One packet on its way through a shard."""

    def __init__(self, round: int, walk: Walk, packet: Bytes) -> None:
        self.round, self.walk = round, walk
        self.base = 0  # sampled elements that lie before the window
        self.pieces = pieces(packet, walk.m) if len(packet) else iter(())  # the shard has not moved
        self.where, self.values = np.empty(0, np.int64), np.empty(0, np.float32)

    def add(self, window: np.ndarray, standing: np.ndarray) -> None:
        """The packet's part in the next window; `standing`: at which places the window's units stand."""
        block = self.walk.block
        shift = block.bit_length() - 1
        units = self.walk.visited(standing)
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


# ---- folders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """One that is whole."""

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


def weights_file_in(folder: Path) -> Path:
    """The file of the vector: of a model, or of an adapter."""
    return folder / (ADAPTER_FILE if (folder / ADAPTER_FILE).is_file() else WEIGHTS_FILE)


def hashes_file_of(weights: Path) -> Path:
    """Of its chunks, beside it."""
    return weights.with_name(weights.name + ".sha256")


def list_snapshots(folder: Path, run: str) -> list[Snapshot]:
    """The whole snapshots of a run, by round; what a killed hub left behind does not count."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        weights = weights_file_in(path)
        if not path.name.isdecimal() or not weights.is_file() or not hashes_file_of(weights).is_file():
            continue
        with open(weights, "rb", buffering=0) as file:
            try:
                header = read_header(file, str(path))
                told = header.metadata
                number = int(told["cocktail_fingerprint"], 16)
                one = Snapshot(path, int(path.name), number, told["cocktail_run"])
            except (ModelError, KeyError, ValueError):
                continue
        right = told.get("cocktail_round") == path.name and one.run == run
        if right and weights.stat().st_size == header.size:
            found.append(one)
    return sorted(found, key=lambda one: one.round)


def remove_unfinished_snapshots(folder: Path) -> None:
    """Remove what a killed hub had begun to write."""
    for path in folder.iterdir() if folder.is_dir() else ():
        begun = path.name.isdecimal() and not weights_file_in(path).exists()
        if path.is_dir() and (begun or path.name.endswith(".part")):
            shutil.rmtree(path, ignore_errors=True)  # in use, on Windows: at the next start


def write_chunk_hashes(folder: Path, stop: Callable[[], bool]) -> None:
    """The hashes of the chunks of the weights in `folder`, beside them. Errors: Abandoned."""
    digests, weights = [], weights_file_in(folder)
    with open(weights, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            if stop():
                raise FoldCancelled
            digests.append(hashlib.sha256(chunk).digest())
    with open(hashes_file_of(weights), "wb") as file:
        file.write(b"".join(digests))
        file.flush()
        os.fsync(file.fileno())


def write_model_files(folder: Path, texts: Mapping[str, str], tokenizer: Path) -> None:
    """What makes a folder of weights a model: its config, and the files of a tokenizer."""
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        shutil.copyfile(file, folder / file.name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def check_disk_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        said = f"a model of {needed / 1e9:.2f} GB does not fit, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, said, str(folder))


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """All of it: an unbuffered file may take less at a time."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]
