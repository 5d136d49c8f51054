"""A long vector in shards: contiguous ranges that are sampled, compressed and aggregated each on its own.

The packets of all shards travel as one:

    "CS", version 1, 0 | S, u32 | S lengths, u64 each | the packets, one after the other

A length of 0: this shard has not moved. A vector of one shard is its packet as it stands, unless it has not
moved either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from compress.coding import Bytes

from .errors import PacketError

MAGIC, VERSION = b"CS", 1
HEAD = struct.Struct("<2sBBI")  # magic, version, zero, shards
MOST_SHARDS = 1024  # shards of a vector

B = TypeVar("B", bound=Bytes)


@dataclass(frozen=True)
class Shard:
    """A range of the vector: the coordinates start .. stop - 1."""

    number: int
    start: int
    stop: int
    seed: int  # of its samples

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """View the shard of x: (n,) -> (size,)."""
        return x[self.start : self.stop]


def cut(n: int, count: int, seed: int) -> tuple[Shard, ...]:
    """Cut n coordinates into `count` shards, whose sizes differ by at most 1.

    The first has the seed itself, below 2^32, so that a vector of one shard is sampled with it.
    """
    if not 1 <= count <= n:
        raise ValueError(f"{count:,} shards of {n:,} coordinates: from 1 to as many as those")
    ends = [i * n // count for i in range(count + 1)]
    return tuple(Shard(i, ends[i], ends[i + 1], i << 32 | seed) for i in range(count))


def join(packets: Sequence[bytes]) -> bytes:
    """Join the packets of all shards, in order; an empty one says that its shard has not moved."""
    if len(packets) == 1 and packets[0]:
        return packets[0]
    head = HEAD.pack(MAGIC, VERSION, 0, len(packets))
    return b"".join([head, struct.pack(f"<{len(packets)}Q", *map(len, packets)), *packets])


def split(packet: B, count: int) -> list[B]:
    """Split what was joined, of `count` shards, which the receiver knows. Errors: PacketError."""
    if count == 1 and bytes(packet[: len(MAGIC)]) != MAGIC:
        return [packet]
    start = HEAD.size + 8 * count
    front = bytes(packet[:start])
    if len(front) < start:
        raise PacketError(f"{len(packet):,} bytes, the packets of {count:,} shards have at least {start:,}")
    magic, version, zero, shards = HEAD.unpack_from(front)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        said = f"begins with {magic!r} version {version}, reserved field {zero}"
        raise PacketError(f"{said}, expected {MAGIC!r} version {VERSION} of {count:,} shards")
    if shards != count:
        raise PacketError(f"the packets of {shards:,} shards, expected {count:,}")
    lengths = struct.unpack_from(f"<{count}Q", front, HEAD.size)
    if start + sum(lengths) != len(packet):
        whole = start + sum(lengths)
        raise PacketError(f"{len(packet):,} bytes, its table of shards adds up to {whole:,}")
    parts = []
    for length in lengths:
        parts.append(packet[start : start + length])
        start += length
    return parts
