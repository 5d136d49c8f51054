"""Sets of sample ids as runs of neighbours: a batch of 4,096 fresh samples is one pair of numbers.

`Pool` is where exactly-once begins: an id is in the pool, or in one lease, or counted, and never in two of
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

SampleRanges = tuple[tuple[int, int], ...]  # ((start, stop), ...), sorted, disjoint, not touching, none empty


def count_samples(runs: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in runs)


def sample_ids(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [i for start, stop in runs for i in range(start, stop)]


def compact(ids: Iterable[int]) -> SampleRanges:
    """Runs of `ids`. Raises ValueError where an id comes twice."""
    pool = SamplePool()
    for i in sorted(ids):
        pool.put(((i, i + 1),))
    return pool.runs


def pack_ranges(runs: SampleRanges) -> bytes:
    return msgspec.msgpack.encode(runs)


def unpack_ranges(data: bytes) -> SampleRanges:
    """Inverse of pack_runs; raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.decode(data, type=SampleRanges)


class SamplePool:
    """Ids that nobody holds, lowest first out."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs: list[tuple[int, int]] = []
        self._size = 0
        self.put(runs)

    def __len__(self) -> int:
        return self._size

    @property
    def runs(self) -> SampleRanges:
        return tuple(self._runs)

    def take(self, n: int) -> SampleRanges:
        """The lowest `n` ids (all that are left where there are fewer)."""
        taken: list[tuple[int, int]] = []
        while n > 0 and self._runs:
            start, stop = self._runs[0]
            cut = min(stop, start + n)
            taken.append((start, cut))
            if cut == stop:
                self._runs.pop(0)
            else:
                self._runs[0] = (cut, stop)
            n -= cut - start
            self._size -= cut - start
        return tuple(taken)

    def put(self, runs: Iterable[tuple[int, int]]) -> None:
        """Give ids (back). Raises ValueError where one is there already: it would be counted twice."""
        for start, stop in runs:
            if start >= stop:
                raise ValueError(f"empty run of ids {start}..{stop}")
            at = bisect_left(self._runs, (start, stop))
            before = self._runs[at - 1] if at > 0 else None
            after = self._runs[at] if at < len(self._runs) else None
            if (before and before[1] > start) or (after and after[0] < stop):
                raise ValueError(f"ids {start}..{stop} overlap {before} or {after}")
            low, high = at, at
            new = (start, stop)
            if before and before[1] == start:
                new, low = (before[0], new[1]), at - 1
            if after and after[0] == stop:
                new, high = (new[0], after[1]), at + 1
            self._runs[low:high] = [new]
            self._size += stop - start
