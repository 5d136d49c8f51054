"""Where a round stands on the ring of units (see sample.py), without a table of its units.

`draw` lists the units of a round, which takes memory for each of them. Who goes through the vector window by
window asks here instead: the order is a bijection and can be walked backwards, so each unit says at which
place it stands, and with that in which rounds of its epoch it is visited. Fragments are units in their own
order: a round is a range of the vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .permutation import keys, place_of

UNITS_PER_ROUND = 16  # small vectors get smaller blocks, so that rounds stay even in size
CHUNK = 1 << 15  # units at a time: the arrays of one piece stay in L2


@dataclass(frozen=True)
class Walk:
    """One round: the places first .. last - 1 of the ring, modulo the number of units."""

    n: int  # length of the full vector
    block: int  # neighbours that are visited together
    first: int
    last: int
    key: tuple[int, ...]  # of the order; empty: as they lie in the vector

    @property
    def count(self) -> int:
        """Units of the full vector."""
        return -(-self.n // self.block)

    @property
    def m(self) -> int:
        """Length of the sampled vector."""
        size = (self.last - self.first) * self.block
        short = -self.n % self.block  # what the last unit lacks
        if short and self.visited(places(self, self.count - 1, self.count)).size:
            size -= short
        return size

    def visited(self, standing: np.ndarray) -> np.ndarray:
        """Which of the units at these places this round visits: indices, ascending."""
        if self.last - self.first == self.count:
            return np.arange(len(standing))
        first = self.first % self.count
        last = first + self.last - self.first  # beyond `count`: it goes round the end
        inside = (standing >= first) & (standing < last)
        return np.flatnonzero(inside | (standing < last - self.count))


def walk(n: int, p: float, block: int, seed: int, round: int, ordered: bool = False) -> Walk:
    """What one round visits: a share p of the n coordinates, in blocks of `block` (a power of two).

    ordered: one range of the vector after the other, instead of blocks from all over it.
    """
    share = Fraction(p).limit_denominator(10**9)
    while block > 1 and n * share < UNITS_PER_ROUND * block:
        block //= 2
    count = -(-n // block)
    cycle, phase = divmod(round, share.denominator)
    first, last = ((phase + i) * share.numerator * count // share.denominator for i in (0, 1))
    return Walk(n, block, first, last, () if share == 1 or ordered else tuple(keys(seed, cycle)))


def places(walk: Walk, start: int, stop: int) -> np.ndarray:
    """Where the units start .. stop - 1 stand: (stop - start,) int64, the same for all rounds of one key."""
    units = np.arange(start, stop, dtype=np.int64)
    if walk.key:
        for at in range(0, len(units), CHUNK):
            units[at : at + CHUNK] = place_of(units[at : at + CHUNK], walk.count, list(walk.key))
    return units
