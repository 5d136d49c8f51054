"""Sets of sample ids as sorted ranges: a batch of 4,096 fresh samples is one pair of numbers.

`SamplePool` is the root of exactly-once: an id is in the pool, or in one lease, or counted, never in two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

import msgspec

SampleRanges = tuple[tuple[int, int], ...]  # ((start, stop), ...), sorted, disjoint, not touching, none empty


def count_samples(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def sample_ids(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def ranges_of(ids: Iterable[int]) -> SampleRanges:
    """Join ids, which ascend, into ranges."""
    found: list[tuple[int, int]] = []
    for i in ids:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return tuple(found)


def minus(run: tuple[int, int], runs: SampleRanges) -> SampleRanges:
    """Subtract `runs` from one run."""
    left, at = [], run[0]
    for start, stop in runs:
        if stop <= at or start >= run[1]:
            continue
        if start > at:
            left.append((at, start))
        at = max(at, stop)
    if at < run[1]:
        left.append((at, run[1]))
    return tuple(left)


def pack_ranges(ranges: SampleRanges) -> bytes:
    return msgspec.msgpack.encode(ranges)


def unpack_ranges(data: bytes) -> SampleRanges:
    """Invert pack_ranges. Raises msgspec.ValidationError for other bytes."""
    return msgspec.msgpack.decode(data, type=SampleRanges)


class SamplePool:
    """Ids in no lease and not counted; the lowest are leased first."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.size = 0  # of ids
        self.put(ranges)

    @property
    def ranges(self) -> SampleRanges:
        return tuple(self._ranges)

    def lowest(self, n: int) -> list[int]:
        """Return the lowest `n` ids, or all if there are fewer."""
        return list(islice((i for start, stop in self._ranges for i in range(start, stop)), n))

    def remove(self, ranges: SampleRanges) -> None:
        """Remove ids. Raises ValueError if one is not there."""
        left = [rest for run in self._ranges for rest in minus(run, ranges)]
        if count_samples(left) + count_samples(ranges) != self.size:
            raise ValueError(f"ids {ranges} are not all among {self.ranges}")
        self._ranges, self.size = left, count_samples(left)

    def put(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add ids. Raises ValueError if one is there already: it would be counted twice."""
        for start, stop in ranges:
            if start >= stop:
                raise ValueError(f"empty range of ids {start}..{stop}")
            at = bisect_left(self._ranges, (start, stop))
            before = self._ranges[at - 1] if at > 0 else None
            after = self._ranges[at] if at < len(self._ranges) else None
            if (before and before[1] > start) or (after and after[0] < stop):
                raise ValueError(f"ids {start}..{stop} overlap {before} or {after}")
            low, high = at, at
            new = (start, stop)
            if before and before[1] == start:
                new, low = (before[0], new[1]), at - 1
            if after and after[0] == stop:
                new, high = (new[0], after[1]), at + 1
            self._ranges[low:high] = [new]
            self.size += stop - start
