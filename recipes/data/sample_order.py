"""The order of samples: shuffled epochs, and weighted mixtures of data sets.

A position is all the state there is: the sample at position 1,000,000 is known without those before it, so a
resumed run needs no cursor.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

BLOCK = 1024  # positions assigned to data sets at once
BLOCK_SEED = (1 << 32) - 1  # separates the seeds of blocks from those of epochs


def shuffled_order(count: int, seed: int, epoch: int, shuffle: bool = True, part: int = 0) -> np.ndarray:
    """Permute 0 .. count - 1 by seed, epoch and part: (count,) int64. `part`: number, from 1 on, of a data
    set that has epochs of its own.

    The ranks of a raw PCG64 stream, which NumPy keeps stable over its versions (a Generator's permutation is
    not): a run must find its order again after an upgrade.
    """
    if not shuffle:
        return np.arange(count)
    key = [seed, epoch, 0, part] if part else [seed, epoch]
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Draw:
    """The draw of a position."""

    part: int  # number of the data set
    place: int  # how many draws of this data set came before


@dataclass(frozen=True)
class Mixture:
    """Data sets mixed in proportion to their weights.

    Each has its share of the first n positions to within a position or two, not by chance: positions are
    assigned in blocks of 1,024, and the seed draws the order within a block.
    """

    weights: tuple[float, ...]
    seed: int

    def draw(self, position: int) -> Draw:
        block, offset = divmod(position, BLOCK)
        parts = deal_block(self.weights, self.seed, block)
        part = int(parts[offset])
        return Draw(part, self.before(block * BLOCK)[part] + int((parts[:offset] == part).sum()))

    def before(self, position: int) -> list[int]:
        """Count the draws from each data set among the first `position` positions (whole blocks).

        The first gets its share, rounded down, the second its share of the remainder, and so on: a count
        never falls from one position to the next, and their sum is `position`.
        """
        counts, rest = list[int](), position
        for ratio in remaining_shares(self.weights):
            counts.append(rest * ratio.numerator // ratio.denominator)
            rest -= counts[-1]
        return counts


@lru_cache(maxsize=4)
def deal_block(weights: tuple[float, ...], seed: int, block: int) -> np.ndarray:
    """Assign a data set to each position of the block: (BLOCK,)."""
    mixture = Mixture(weights, seed)
    first, last = mixture.before(block * BLOCK), mixture.before((block + 1) * BLOCK)
    parts = np.repeat(np.arange(len(weights)), np.subtract(last, first))
    drawn = np.random.PCG64([seed, block, 0, BLOCK_SEED]).random_raw(BLOCK)
    return parts[np.argsort(drawn, kind="stable")]


@lru_cache(maxsize=4)
def remaining_shares(weights: tuple[float, ...]) -> tuple[Fraction, ...]:
    """Divide each weight by the sum of itself and all that follow; exact, so that rounding assigns no
    position twice. The last is 1."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact[i:]) for i, weight in enumerate(exact))
