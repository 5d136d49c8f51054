"""In which order samples are seen: shuffled epochs, and which data set a position of the run draws from where
data sets have weights.

A position is all the state there is: what stands at position 1,000,000 is known without what stands before
it, so a run that goes on needs no cursor.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

BLOCK = 1024  # positions that are dealt at once
DEALT = (1 << 32) - 1  # keeps the seeds of blocks apart from those of epochs


def shuffled_order(count: int, seed: int, epoch: int, shuffle: bool = True, part: int = 0) -> np.ndarray:
    """(count,) int64, a permutation that depends on seed, epoch and part only. `part`: number of a data set
    that has epochs of its own, from 1 on.

    Ranks of a raw PCG64 stream, which NumPy keeps stable over its versions (the permutation of a Generator is
    not): a run must find its order again after an upgrade.
    """
    if not shuffle:
        return np.arange(count)
    key = [seed, epoch, 0, part] if part else [seed, epoch]
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Draw:
    """What a position draws."""

    part: int  # number of the data set
    place: int  # how many draws of this data set came before


@dataclass(frozen=True)
class Mixture:
    """Data sets drawn from in proportion to their weights.

    Of the first n positions each has its share to within a position or two, not by chance: positions are
    dealt in blocks of 1,024, and the seed draws the order within a block.
    """

    weights: tuple[float, ...]
    seed: int

    def draw(self, position: int) -> Draw:
        block, offset = divmod(position, BLOCK)
        parts = deal_block(self.weights, self.seed, block)
        part = int(parts[offset])
        return Draw(part, self.before(block * BLOCK)[part] + int((parts[:offset] == part).sum()))

    def before(self, position: int) -> list[int]:
        """How many of the first `position` positions draw from each data set (whole blocks).

        The first has its share, rounded down, the second its share of what is left, and so on: so a count
        never falls from one position to the next, and together they are `position`.
        """
        counts, rest = list[int](), position
        for ratio in remaining_shares(self.weights):
            counts.append(rest * ratio.numerator // ratio.denominator)
            rest -= counts[-1]
        return counts


@lru_cache(maxsize=4)
def deal_block(weights: tuple[float, ...], seed: int, block: int) -> np.ndarray:
    """(BLOCK,) the data set of each position of the block."""
    mixture = Mixture(weights, seed)
    first, last = mixture.before(block * BLOCK), mixture.before((block + 1) * BLOCK)
    parts = np.repeat(np.arange(len(weights)), np.subtract(last, first))
    drawn = np.random.PCG64([seed, block, 0, DEALT]).random_raw(BLOCK)
    return parts[np.argsort(drawn, kind="stable")]


@lru_cache(maxsize=4)
def remaining_shares(weights: tuple[float, ...]) -> tuple[Fraction, ...]:
    """Of each weight, its part of itself and all that follow; exact, so that no rounding deals a position
    twice. The last is 1."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact[i:]) for i, weight in enumerate(exact))
