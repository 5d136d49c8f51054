"""Fit magnitude levels to the values that top-k kept: Lloyd-Max with a price on entropy.

All of these values exceed some threshold, so a grid from 0 to max leaves its small levels empty and, on heavy
tails, puts nearly all of them into the next one. Here the 2**(q-1) levels minimize

    sum of scale**2 * ((y - level(y))**2 + price * bits(y)),    bits(y) = -log2 of the share of y's level,

over the magnitudes y = |v| / (scale of the bucket). Without the price: Lloyd 1982. With it:
entropy-constrained scalar quantization (Chou, Lookabaugh, Gray 1989). At 4 bits the price rises until a code
costs no more on the wire than one of the max-scaled grid did, 3.05 bits; the error stays far below that
grid's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np

SHIFT = 14  # of an FP32 pattern: 512 bins an octave
LOWEST = int(np.float32(2.0**-8).view(np.int32)) >> SHIFT
BINS = 16 * 512  # magnitudes from 2**-8 to 2**8 of the scale
ROUNDS = 12  # of Lloyd's iteration; then 5 at each price
BUDGET = {4: 2.05}  # bits that the number of a level may carry, sign apart
PRICES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4)  # of one bit, in units of the error at price 0
THIN = 1e-3  # share of the weight spread evenly at 8 bits: no range goes without levels
BEYOND = {2: 6.0, 3: 2.0, 4: 1.5}  # times the top level: an outlier that stretching may pay for


@dataclass(frozen=True)
class Levels:
    """The fitted levels, in units of the scale, and a table that finds the nearest."""

    at: np.ndarray  # (2**(bits-1),) float64, ascending, positive
    by_bin: np.ndarray  # (BINS,) uint8: number of the level for each bin of magnitude
    error: float  # share of the energy lost, on what it was fitted to

    @property
    def beyond(self) -> np.float32:
        """Magnitude above which a value is an outlier."""
        return np.float32(BEYOND.get(len(self.at).bit_length(), np.inf) * self.at[-1])

    def nearest(self, y: np.ndarray) -> np.ndarray:
        """Find the number of the nearest level, uint8, in the shape of y (float32, at least 0); values
        out of range go to the first or the last."""
        number = y.view(np.int32) >> SHIFT
        number -= LOWEST
        return self.by_bin.take(number, mode="clip")


def fit(y: np.ndarray, scale: np.ndarray, bits: int, loops: ModuleType | None = None) -> Levels:
    """Fit levels to magnitudes over their scales. y: (rows, bucket) float32, scale: (rows,); one bucket a
    row."""
    count = 1 << (bits - 1)
    part = np.square(scale.astype(np.float64) / max(float(scale.max()), 1e-300))
    weight: np.ndarray = np.zeros(BINS)
    if loops:
        loops.weigh(y.view(np.int32), part, SHIFT, LOWEST, weight)
    else:
        number = (y.view(np.int32).reshape(-1) >> SHIFT) - LOWEST
        weight = np.bincount(number.clip(0, BINS - 1), np.repeat(part, y.shape[1]), BINS)
    if count == 1 or not weight.any():
        return Levels(np.ones(count), np.zeros(BINS, np.uint8), 0.0)
    if bits == 8:
        weight += THIN * weight.sum() * _centres() * (_centres() < 1) / _centres().sum()
    fitting = _Fitting(weight, count, zero=bits == 8)
    fitting.improve(ROUNDS)
    fitting.employ()
    if bits in BUDGET:
        # what a grid of 2**bits steps up to each bucket's largest would lose: a twelfth of a squared step
        grid = float((part * np.square(y.max(1))).sum() / part.sum()) / (12 * count * count)
        fitting.cheapen(BUDGET[bits], 0.9 * grid)
    lost = fitting.error() * fitting.mass[-1] / fitting.square[-1]
    return Levels(fitting.level, fitting.by_bin(), lost)


def even(y: np.ndarray, scale: np.ndarray, step: float) -> Levels:
    """Space the 128 levels of 8 bits evenly, `step` root mean squares apart. y, scale: as in `fit`.

    With an entropy coder behind it a uniform quantizer has nearly the least error at its bits (Gish and
    Pierce 1968). The top level is at least 1, so that no value over the largest of its bucket is clipped;
    those beyond it are unused, and equal to it.
    """
    part = np.square(scale.astype(np.float64) / max(float(scale.max()), 1e-300))
    square = (part * np.square(y.astype(np.float64)).mean(1)).sum() / max(part.sum(), 1e-300)
    apart = max(step * float(np.sqrt(square)), 1 / 127)
    top = min(127, int(np.ceil(1 / apart)))
    number = np.minimum(np.rint(_centres() / apart), top).astype(np.uint8)
    return Levels(np.minimum(np.arange(128), top) * apart, number, apart**2 / 12 / max(square, 1e-300))


class _Fitting:
    """Lloyd's iteration on a histogram: cells from levels, levels from cells."""

    def __init__(self, weight: np.ndarray, count: int, zero: bool) -> None:
        self.weight, self.zero, self.price = weight, zero, 0.0
        self.mass = np.concatenate([[0.0], np.cumsum(weight)])
        self.moment = np.concatenate([[0.0], np.cumsum(weight * _centres())])
        self.square = np.concatenate([[0.0], np.cumsum(weight * np.square(_centres()))])
        self.level = _companded(weight, count)
        self.share = np.full(count, 1 / count)

    def improve(self, rounds: int) -> None:
        """Move each level to the mean of its cell, again and again; an empty cell keeps its level."""
        for _ in range(rounds):
            edge = self.edges()
            here = _between(self.mass, edge)
            self.share = here / self.mass[-1]
            mean = _between(self.moment, edge) / np.maximum(here, 1e-300)
            self.level = np.maximum.accumulate(np.where(here > 0, mean, self.level))
            if self.zero:
                self.level[0] = 0.0

    def employ(self) -> None:
        """Move each unused level into the cell that loses most: few distinct values are met exactly."""
        for _ in self.level:
            idle = np.flatnonzero(self.share == 0)
            if not len(idle):
                return
            lost = self.weight * np.square(_centres() - self.level[self.by_bin()])
            if lost.sum() < 1e-9 * (self.weight * np.square(_centres())).sum():
                return
            edge = self.edges()
            in_cell = np.add.reduceat(np.append(lost, 0.0), edge[:-1]) * (np.diff(edge) > 0)
            cell = int(in_cell.argmax())
            upper = slice(max(int(np.searchsorted(_centres(), self.level[cell])), edge[cell]), edge[cell + 1])
            if not self.weight[upper].any():
                return
            self.level[idle[0]] = np.average(_centres()[upper], weights=self.weight[upper])
            self.level.sort()
            self.improve(8)

    def cheapen(self, budget: float, most: float) -> None:
        """Raise the price until a level's number carries `budget` bits, while the error is below `most`."""
        unpriced = self.error()
        for price in PRICES:
            if self.entropy() <= budget:
                return
            before = self.level, self.share, self.price
            self.price = price * unpriced
            self.improve(5)
            if self.error() > most:
                self.level, self.share, self.price = before
                return

    def edges(self) -> np.ndarray:
        """Compute the bins where the cells begin and end, (count + 1,). Between neighbours a < b the
        border stands at (a + b) / 2 + price * log2(share_a / share_b) / (2 (b - a)): equal cost on
        both sides.
        """
        a, b = self.level[:-1], self.level[1:]
        middle = (a + b) / 2
        if self.price:
            dear = np.log2(np.maximum(self.share, 1e-12))
            middle = middle + self.price * (dear[:-1] - dear[1:]) / (2 * np.maximum(b - a, 1e-12))
            middle = np.maximum.accumulate(middle.clip(a[0], b[-1]))
        edge = np.empty(len(self.level) + 1, np.int64)
        edge[0], edge[1:-1], edge[-1] = 0, _centres().searchsorted(middle), BINS
        return edge

    def by_bin(self) -> np.ndarray:
        """Return the number of the level for each bin, (BINS,) uint8."""
        return np.repeat(np.arange(len(self.level), dtype=np.uint8), np.diff(self.edges()))

    def entropy(self) -> float:
        """Return the bits of a level's number."""
        share = self.share[self.share > 0]
        return float(-(share * np.log2(share)).sum())

    def error(self) -> float:
        """Return the mean square error of the binned magnitudes."""
        edge, level = self.edges(), self.level
        square, moment, mass = (_between(total, edge) for total in (self.square, self.moment, self.mass))
        return max(float((square - 2 * level * moment + level * level * mass).sum() / self.mass[-1]), 0.0)


def _between(total: np.ndarray, edge: np.ndarray) -> np.ndarray:
    """Difference a running total at the edges: the sum of each cell."""
    at = total[edge]
    return at[1:] - at[:-1]


def far(y: np.ndarray, levels: Levels) -> np.ndarray:
    """Find the buckets with an outlier: rows of y (rows, bucket) with a magnitude far above the top level."""
    return np.unique(np.flatnonzero(y > levels.beyond) // y.shape[1])


def stretch(y: np.ndarray, levels: Levels) -> np.ndarray:
    """Compute the factor by which each bucket's scale should grow, (rows,) float32, at least 1. y: (rows,
    bucket).

    A mean hardly sees one huge value among 128, which would then be clipped to the top level with all its
    energy. Four factors are tried, the largest of which puts the outlier on the top level.
    """
    worst = np.maximum(y.max(1) / np.float32(levels.at[-1]), np.float32(1))
    at = levels.at.astype(np.float32)
    least, factor = np.full(len(y), np.inf, np.float32), np.ones(len(y), np.float32)
    for power in (0, 1 / 3, 2 / 3, 1):
        wider = worst ** np.float32(power)
        there = at[levels.nearest(y / wider[:, None])] * wider[:, None]
        error = np.square((y - there) / worst[:, None]).sum(1)
        factor = np.where(error < least, wider, factor)
        least = np.minimum(error, least)
    return factor


@lru_cache(maxsize=1)
def _centres() -> np.ndarray:
    """Return the magnitude in the middle of each bin, (BINS,) float64; 0 for the first."""
    pattern = ((np.arange(BINS, dtype=np.int32) + LOWEST) << SHIFT) + (1 << (SHIFT - 1))
    pattern[0] = 0
    return pattern.view(np.float32).astype(np.float64)


def _companded(weight: np.ndarray, count: int) -> np.ndarray:
    """Start near the optimum: levels as dense as the cube root of the density (Panter and Dite 1951)."""
    centre = _centres()
    width = np.maximum(centre, centre[1])  # of a bin, but for a factor
    root = np.cbrt(weight / width) * width
    reach = np.cumsum(root)
    return np.interp((np.arange(count) + 0.5) / count * reach[-1], reach, centre)
