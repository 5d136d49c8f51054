"""A long vector in shards: contiguous ranges that are sampled, compressed and aggregated each on its own.

The packets of all shards travel as one:

    "CS", version 1, 0 | S, u32 | S lengths, u64 each | the packets, one after the other

A length of 0: this shard has not moved. A vector of one shard is its packet as it stands, unless it has not
moved either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
    offset: int = 0  # of `within`: start + offset is its place in the whole vector

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """View the shard of x: (n,) -> (size,)."""
        return x[self.start : self.stop]


def cut(n: int, shards: int | Sequence[int], seed: int) -> tuple[Shard, ...]:
    """Cut n coordinates into so many shards, in sizes that differ by at most 1; or where each ends.

    The first has the seed itself, below 2^32, so that a vector of one shard is sampled with it.
    """
    count = shards if isinstance(shards, int) else len(shards)
    if not 1 <= count <= n:
        raise ValueError(f"{count:,} shards of {n:,} coordinates: from 1 to as many as those")
    places = [i * n // count for i in range(count + 1)] if isinstance(shards, int) else [0, *shards]
    if places[-1] != n:
        raise ValueError(f"the last shard ends at {places[-1]:,} of {n:,} coordinates")
    return tuple(Shard(i, places[i], places[i + 1], i << 32 | seed) for i in range(count))


def rises(ends: Sequence[int]) -> bool:
    """Tell whether these can be the ends of shards: none is empty."""
    return all(start < end for start, end in pairwise((0, *ends)))


def within(shards: Sequence[Shard], ranges: Sequence[range]) -> tuple[Shard, ...]:
    """Find the shards of ranges of a vector, in the vector that these ranges make one behind the other.

    Errors: ValueError where a range begins or ends inside a shard.
    """
    found, size = list[Shard](), 0
    for part in ranges:
        offset = part.start - size
        inside = [s for s in shards if part.start <= s.start and s.stop <= part.stop]
        if sum(shard.size for shard in inside) != len(part):
            raise ValueError(f"coordinates {part.start:,} to {part.stop:,} are not a union of shards")
        found += [replace(s, start=s.start - offset, stop=s.stop - offset, offset=offset) for s in inside]
        size += len(part)
    return tuple(found)


def join(packets: Sequence[bytes]) -> bytes:
    """Join the packets of all shards, in order; an empty one says that its shard has not moved."""
    if len(packets) == 1 and packets[0]:
        return packets[0]
    head = HEAD.pack(MAGIC, VERSION, 0, len(packets))
    return b"".join([head, struct.pack(f"<{len(packets)}Q", *map(len, packets)), *packets])


def joined_size(count: int) -> int:
    """Return the bytes that joining the packets of `count` shards adds, at most."""
    return HEAD.size + 8 * count


def split(packet: B, count: int) -> list[B]:
    """Split what was joined, of `count` shards, which the receiver knows. Errors: PacketError."""
    if count == 1 and bytes(packet[: len(MAGIC)]) != MAGIC:
        return [packet]
    start = joined_size(count)
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
