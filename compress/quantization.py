"""Quantize values to codes of q bits, a scale for each bucket and a table of levels; dequantize to the bit.

value = (-1)**sign * level * scale      level: an integer below 2**16, scale: BF16 (8 significant bits)

so a decoded value has at most 24 significant bits: it is exact in FP32 on any device, whatever order or fused
instruction computes it. Scales are zero or normal numbers and levels zero or at least 1, so no product is
denormal. A code is the sign (top bit) and the number of the level. At 16 bits the level is its own number and
the table is left out; 32 bits are the FP32 patterns themselves.

The 2**(q-1) levels are fitted to the values that top-k kept. All of these exceed some threshold, so a grid
from 0 to max leaves its small levels empty and, on heavy tails, puts nearly all of them into the next one.
Levels minimize

    sum of scale**2 * ((y - level(y))**2 + price * bits(y)),    bits(y) = -log2 of the share of y's level,

over the magnitudes y = |v| / (scale of the bucket). Without the price: Lloyd 1982. With it:
entropy-constrained scalar quantization (Chou, Lookabaugh, Gray 1989). At 4 bits the price rises until a code
costs no more on the wire than one of the max-scaled grid did, 3.05 bits; the error stays far below that
grid's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from compress.coding import lookup, pack
from compress.errors import PacketError
from compress.pinned_copy import array_brought

# ---- levels ------------------------------------------------------------------------------------------------

SHIFT = 14  # of an FP32 pattern: 512 bins an octave
LOWEST = int(np.float32(2.0**-8).view(np.int32)) >> SHIFT
BINS = 16 * 512  # magnitudes from 2**-8 to 2**8 of the scale
ROUNDS = 12  # of Lloyd's iteration; then 5 at each price
BUDGET = {4: 2.05}  # bits that the number of a level may carry, sign apart
PRICES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4)  # of one bit, in units of the error at price 0
THIN = 1e-3  # share of the weight spread evenly at 8 bits: no range goes without levels
WHOLE = 2.0**40  # weights are counted in fractions of it
ONE, TINY = int(np.float32(1).view(np.int32)), 1e-38
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


def fit(y: np.ndarray, scale: np.ndarray, bits: int) -> Levels:
    """Fit levels to magnitudes over their scales. y: (rows, bucket) float32, scale: (rows,); one bucket a
    row."""
    count = 1 << (bits - 1)
    part = np.square(scale.astype(np.float64) / max(float(scale.max()), 1e-300))
    number = (y.view(np.int32).reshape(-1) >> SHIFT) - LOWEST
    weight = np.bincount(number.clip(0, BINS - 1), np.repeat(part, y.shape[1]), BINS)
    if count == 1 or not weight.any():
        return Levels(np.ones(count), np.zeros(BINS, np.uint8), 0.0)
    outer = float((part * np.square(y.max(1))).sum() / part.sum())
    fitting = fitted(weight[None], bits, np.full((1, 1), outer))
    return Levels(fitting.level[0], fitting.by_bin()[0].astype(np.uint8), float(fitting.lost()[0, 0]))


Array = Any  # of NumPy, or a tensor of torch: the same operations in the same order


def fitted(weight: Array, bits: int, outer: Array) -> Fitting:
    """Fit levels to n histograms, where they are; a device is not waited for.

    Args:
        weight: (n, BINS) float64; none of them is 0.
        outer: (n, 1) float64, mean square of the largest magnitude of each bucket.
    """
    count = 1 << (bits - 1)
    fitting = Fitting(weight, count, zero=bits == 8)
    fitting.improve(ROUNDS)
    if isinstance(weight, np.ndarray):
        fitting.employ()
    if bits in BUDGET:
        # what a grid of 2**bits steps up to each bucket's largest would lose: a twelfth of a squared step
        fitting.cheapen(BUDGET[bits], 0.9 * outer / (12 * count * count))
    return fitting


def even(y: np.ndarray, scale: np.ndarray, step: float) -> Levels:
    """Space the 128 levels of 8 bits evenly, `step` root mean squares apart. y, scale: as in `fit`.

    With an entropy coder behind it a uniform quantizer has nearly the least error at its bits (Gish and
    Pierce 1968). The top level is at least 1, so that no value over the largest of its bucket is clipped;
    those beyond it are unused, and equal to it.
    """
    part = np.square(scale.astype(np.float64) / max(float(scale.max()), 1e-300))
    (at,), (by_bin,) = evenly(y[None], part[None], step)
    return Levels(at, by_bin.astype(np.uint8), 0.0)


def evenly(y: Array, part: Array, step: float) -> tuple[Array, Array]:
    """Space the levels of n packets like `even`: levels (n, 128) and the number of that for each bin, (n,
    BINS). y: (n, rows, bucket), part: (n, rows) float64, weight of each row."""
    xp, device = _xp(y), y.device
    square = (part[:, :, None] * y * y).mean(2).sum(1) / part.sum(1).clip(1e-300)
    apart = (step * square[:, None] ** 0.5).clip(1 / 127)
    top = xp.ceil(1 / apart).clip(None, 127)
    return xp.minimum(xp.arange(128.0, device=device), top) * apart, xp.minimum(
        (_centres(y) / apart).round(), top
    )


class Fitting:
    """Lloyd's iteration on n histograms side by side: cells from levels, levels from cells."""

    def __init__(self, weight: Array, count: int, zero: bool) -> None:
        self.xp = _xp(weight)
        self.centre = centre = _centres(weight)
        if zero:
            weight = weight + THIN * weight.sum(1)[:, None] * centre * (centre < 1) / centre.sum()
        self.weight, self.zero, self.price = weight, zero, 0.0
        moments = self.xp.stack([weight, weight * centre, weight * (centre * centre)])
        # running totals of mass, moment and square, (3, n, BINS + 1)
        self.sums = self.xp.concatenate([0 * moments[:, :, :1], moments.cumsum(2)], 2)
        self.all, self.rows = self.sums[:, :, -1:], self.xp.arange(len(weight), device=weight.device)[:, None]
        # begin near the optimum: levels as dense as the cube root of the density (Panter and Dite 1951)
        width = centre.clip(centre[1])  # of a bin, but for a factor
        reach = ((weight / width) ** (1 / 3) * width).cumsum(1)
        wanted = (self.xp.arange(count, device=centre.device) + 0.5) / count * reach[:, -1:]
        above = _places(reach, wanted).clip(1, BINS - 1)
        low, high = reach[self.rows, above - 1], reach[self.rows, above]
        part = ((wanted - low) / (high - low)).clip(0, 1)
        self.level = centre[above - 1] + part * (centre[above] - centre[above - 1])  # (n, count)
        self.share = self.xp.zeros_like(self.level)  # of the mass

    def improve(self, rounds: int) -> None:
        """Move each level to the mean of its cell, again and again; an empty cell keeps its level."""
        for _ in range(rounds):
            mass, moment, _ = self.cells()
            self.share = mass / self.all[0]
            mean = moment / mass.clip(1e-300)
            self.level = _rising(self.xp.where(mass > 0, mean, self.level))
            if self.zero:
                self.level[:, 0] = 0.0

    def employ(self) -> None:
        """Move each unused level into the cell that loses most: few distinct values are met exactly. Of one
        histogram, on the host."""
        (weight,), centre = self.weight, self.centre
        for _ in range(self.level.shape[1]):
            if self.share.all() or self.lost() < 1e-9:
                return
            (level,), (number,) = self.level, self.by_bin()
            cell = np.bincount(number, weight * np.square(centre - level[number])).argmax()
            upper = (number == cell) & (centre >= level[cell])
            if not weight[upper].any():
                return
            level[np.flatnonzero(self.share == 0)[0]] = np.average(centre[upper], weights=weight[upper])
            level.sort()
            self.improve(8)

    def cheapen(self, budget: float, most: Array) -> None:
        """Raise the price until a level's number carries `budget` bits, while the error is below `most`,
        (n, 1)."""
        unpriced, dear, where = self.error(), most > 0, self.xp.where
        self.price = 0.0 * most
        for price in PRICES:
            dear = dear & (self.entropy() > budget)
            if isinstance(dear, np.ndarray) and not dear.any():
                return
            before = self.level, self.share, self.price
            self.price = price * unpriced
            self.improve(5)
            dear = dear & (self.error() <= most)
            after = zip((self.level, self.share, self.price), before, strict=True)
            self.level, self.share, self.price = (where(dear, new, old) for new, old in after)

    def edges(self) -> Array:
        """Compute the bins where cells begin, (n, count - 1), the first aside. Between neighbours a < b the
        border stands at (a + b) / 2 + price * log2(share_a / share_b) / (2 (b - a)): equal cost on
        both sides.
        """
        a, b = self.level[:, :-1], self.level[:, 1:]
        middle = (a + b) / 2
        if not isinstance(self.price, float):
            dear = self.xp.log2(self.share.clip(1e-12))
            middle = middle + self.price * (dear[:, :-1] - dear[:, 1:]) / (2 * (b - a).clip(1e-12))
            middle = _rising(self.xp.clip(middle, a[:, :1], b[:, -1:]))
        return self.xp.searchsorted(self.centre, middle)

    def by_bin(self) -> Array:
        """Return the number of the level for each bin, (n, BINS)."""
        return _places(self.edges(), self.rows * 0 + self.xp.arange(BINS, device=self.rows.device))

    def cells(self) -> Array:
        """Sum mass, moment and square of each cell, (3, n, count)."""
        inner = self.sums[:, self.rows, self.edges()]
        ends = self.xp.concatenate([self.sums[:, :, :1], inner, self.all], 2)
        return ends[:, :, 1:] - ends[:, :, :-1]

    def entropy(self) -> Array:
        """Return the bits of a level's number, (n, 1)."""
        return -(self.share * self.xp.log2(self.share.clip(1e-300))).sum(1)[:, None]

    def error(self) -> Array:
        """Return the mean square error of the binned magnitudes, (n, 1)."""
        (mass, moment, square), level = self.cells(), self.level
        lost = (square - 2 * level * moment + level * level * mass).sum(1)[:, None]
        return (lost / self.all[0]).clip(0.0)

    def lost(self) -> Array:
        """Return the share of the energy that is lost, (n, 1)."""
        return self.error() * self.all[0] / self.all[2]


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


def _xp(like: Array) -> Any:
    """Return NumPy or torch, whichever has made this."""
    return np if isinstance(like, np.ndarray) else torch


def _centres(like: Array) -> Array:
    """Return the magnitude in the middle of each bin, (BINS,) float64, where `like` is; 0 for the first."""
    xp = _xp(like)
    number = xp.arange(BINS, dtype=xp.int32, device=like.device)
    pattern = (((number + LOWEST) << SHIFT) + (1 << (SHIFT - 1))) * (number > 0)
    return xp.asarray(pattern.view(xp.float32), dtype=xp.float64)


def _places(rows: Array, values: Array) -> Array:
    """Find where the values (n, j) stand behind those of ascending rows that are no larger."""
    if isinstance(rows, np.ndarray):
        return np.stack([row.searchsorted(own, "right") for row, own in zip(rows, values, strict=True)])
    return torch.searchsorted(rows, values, right=True)


def _rising(level: Array) -> Array:
    """Raise each to the largest before it."""
    if isinstance(level, np.ndarray):
        return np.maximum.accumulate(level, 1)
    return level.cummax(1).values


# ---- codes -------------------------------------------------------------------------------------------------

BITS = (1, 2, 3, 4, 8, 16, 32)
CHUNK = 1 << 16  # values at a time: the arrays of one chunk stay in L2
SEEN = 1 << 17  # values that the levels are fitted to, about
HEAVY = {2: 0.18, 3: 0.05, 4: 0.015}  # error of levels over the mean that Laplace tails don't reach


@dataclass(frozen=True)
class Codes:
    """k quantized values."""

    quant_bits: int
    quant_bucket_size: int  # values that share a scale
    count: int  # k
    packed: np.ndarray  # (bytes,) uint8, see FORMAT.md
    levels: np.ndarray  # (2**(bits-1),) uint16; empty at 16 and 32 bits
    scales: np.ndarray  # (ceil(k / bucket),) uint16: BF16 patterns; empty at 32 bits


def quantize(
    values: np.ndarray,  # (k,) float32, finite
    bits: int,
    bucket: int,
    loops: ModuleType | None = None,  # `compress.numba_loops`: the same codes
    step: float = 0.0,  # with 8 bits: levels so many root mean squares apart; 0: fitted ones
) -> Codes:
    """Quantize values to codes, scales and levels: below 16 bits each magnitude, over its bucket's scale, to
    the nearest level."""
    k = len(values)
    if bits == 32 or k == 0:
        return Codes(bits, bucket, k, planes(values.view(np.uint8), 4), _words(table_size(bits)), _words(0))
    if bits == 16:
        return _evenly(values, bucket)
    how = plan(seen(values, bucket), bits, step)
    codes, scales = np.empty(k, np.uint8), np.empty(-(-k // bucket), np.float32)
    outside = np.zeros(len(scales), bool)  # buckets with an outlier
    rows = max(CHUNK // bucket, 1)  # at a time
    for first in range(0, len(scales), rows):
        part, here = slice(first, first + rows), slice(first * bucket, (first + rows) * bucket)
        if loops:
            _, scales[part] = _magnitudes(values[here], bucket, how.by_largest)
            inverse, by_bin = _inverse(scales[part]), how.levels.by_bin
            ranges = SHIFT, LOWEST, int(how.levels.beyond.view(np.int32))
            loops.nearest(values[here], inverse, bucket, by_bin, *ranges, codes[here], outside[part])
        else:
            y, scales[part] = _normalized(values[here], bucket, how.by_largest)
            codes[here] = how.levels.nearest(y.reshape(-1)[: len(values[here])])
            outside[first + far(y, how.levels)] = True
    outlying = np.flatnonzero(outside) if bits > 1 and not how.by_largest else np.empty(0, np.int64)
    for first in range(0, len(outlying), rows):  # once more, with a scale that serves them better
        some = outlying[first : first + rows]
        index = some[:, None] * bucket + np.arange(bucket)
        inside = index < k
        y = np.where(inside, np.abs(values.take(index, mode="clip")), np.float32(0))
        y *= _inverse(scales[some])[:, None]
        wider = bf16(scales[some] * stretch(y, how.levels), up=False)
        y *= (scales[some] / wider)[:, None]
        scales[some] = wider
        codes[index[inside]] = how.levels.nearest(y)[inside]
    return Codes(bits, bucket, k, _join(codes, values, bits, loops), *how.packed(scales))


def dequantize(codes: Codes, inside: int = 0) -> np.ndarray:
    """Compute the values, (k,) float32, exactly: the only arithmetic is an integer, (-1)**sign * level, times
    a scale.

    inside: how many values of the first bucket precede these codes, where they are a window of a packet.

    Errors: PacketError: a value of 32 bits is not finite.
    """
    bits, bucket, count = codes.quant_bits, codes.quant_bucket_size, codes.count
    if bits == 32:
        values = planes(codes.packed, -4).view(np.float32)
        if not np.isfinite(values).all():
            raise PacketError("a value that is not finite")
        return values
    if count == 0:
        return np.empty(0, np.float32)
    if bits == 16:
        words = planes(codes.packed, -2).view("<u2")
        values = (words & np.uint16(0x7FFF)).astype(np.float32)
        np.negative(values, out=values, where=words >= 0x8000)
    elif bits == 3:
        signs = -(-count // 8)
        values = lookup(np.array([1, -1], np.float32), codes.packed[:signs], 1)[:count]
        values = values * lookup(codes.levels.astype(np.float32), codes.packed[signs:], 2)[:count]
    else:
        values = lookup(signed_table(codes.levels), codes.packed, bits)[:count]
    scales = widen(codes.scales)
    first = min(-inside % bucket, count)  # the rest of a bucket, whole buckets, the beginning of one
    whole = (count - first) // bucket
    last = first + whole * bucket
    values[:first] *= scales[0]
    begin = 1 if inside else 0
    values[first:last].reshape(-1, bucket)[:] *= scales[begin : begin + whole, None]
    values[last:] *= scales[-1]
    return values


def signed_table(levels: np.ndarray) -> np.ndarray:
    """Map codes, whose top bit is the sign, to levels: (2**(bits-1),) uint16 -> (2**bits,) float32."""
    positive = levels.astype(np.float32)
    return np.concatenate([positive, -positive])


def packed_size(bits: int, count: int) -> int:
    """Return the bytes of `Codes.packed`."""
    if bits == 3:  # sign bits, then the 2-bit levels: neither straddles a byte, so both can be entropy-coded
        return -(-count // 8) + -(-count // 4)
    return -(-count * bits // 8)


def table_size(bits: int) -> int:
    """Return the entries of `Codes.levels`."""
    return 1 << (bits - 1) if bits <= 8 else 0


def planes(data: np.ndarray, width: int) -> np.ndarray:
    """Reorder `width`-byte words to all first bytes, all second, ...; (n,) uint8. Negative: undo it."""
    turned = data.reshape(-1, width) if width > 0 else data.reshape(-width, -1)
    return turned.T.copy().reshape(-1)


def bf16(x: Array, up: bool) -> Array:
    """Round non-negative (n,) float32 to the nearest finite BF16, or the next one up, as float32."""
    pattern = (x.view(_xp(x).int32) + (0xFFFF if up else 0x8000)) & -0x10000
    return pattern.clip(None, 0x7F7F0000).view(_xp(x).float32)


def widen(scales: np.ndarray) -> np.ndarray:
    """Widen BF16 patterns, (n,) uint16, to (n,) float32."""
    return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Plan:
    """The quantization of a packet, decided on some of its values."""

    levels: Levels
    by_largest: bool  # the scale of a bucket is its largest magnitude; otherwise their mean

    def packed(self, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the levels, (2**(bits-1),) uint16, and the BF16 patterns of scales, (n,) float32 -> uint16.

        The levels count in scale / 2**unit, so that the top one fills 16 bits.
        """
        unit = 15 - math.ceil(math.log2(self.levels.at[-1]))
        table = np.rint(self.levels.at * 2.0**unit).astype(np.uint16)
        return table, _patterns(scale * np.float32(2.0**-unit), table)


Rows = TypeVar("Rows", np.ndarray, torch.Tensor)


def seen(values: Rows, bucket: int) -> Rows:
    """Select some whole buckets of values (k,), one a row, for `plan`."""
    whole = len(values) // bucket
    every = max(len(values) // SEEN, 1) | 1
    return values[: whole * bucket].reshape(-1, bucket)[::every] if whole else values[None]


def plan(rows: np.ndarray, bits: int, step: float = 0.0) -> Plan:
    """Fit levels to rows of values, one bucket a row, or space them evenly.

    The mean as scale costs fewer bits at the same error, because outliers move it little. The largest is
    right at 8 bits, where nothing may be clipped, and where outliers hold so much of the energy that the
    mean serves them badly.
    """
    if step and bits == 8:
        return Plan(even(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=True), step), True)
    level = None
    if bits < 8:
        level = fit(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=False), bits)
        if level.error <= HEAVY.get(bits, 1.0):
            return Plan(level, False)
    largest = fit(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=True), bits)
    if level and largest.error > 0.75 * level.error:
        return Plan(level, False)
    largest.at[-1] = 1.0  # exact for the largest of each bucket
    return Plan(largest, True)


@dataclass(frozen=True)
class Plans:
    """The plans of n packets, on their device."""

    at: torch.Tensor  # (n, 2**(bits-1)) float64, as in `Levels`
    by_bin: torch.Tensor  # (n, BINS) uint8
    by_largest: torch.Tensor  # (n,) bool
    settled: torch.Tensor  # (n,) bool; False: `plan` looks further

    @classmethod
    def of(cls, how: Plan, device: torch.device) -> Plans:
        """Bring the plan of one packet to a device."""
        levels = how.levels.at[None], how.levels.by_bin[None]
        flags = np.array([[how.by_largest], [True]])
        return cls(*(array_brought(one, device) for one in (*levels, *flags)))


def plans(rows: torch.Tensor, bits: int, step: float = 0.0) -> Plans:
    """Decide as `plan` on rows (n, rows, bucket) of n packets, side by side. Their device is not waited for.

    It adds up integers, so that the order is of no account.
    """
    n, count, device = len(rows), 1 << (bits - 1), rows.device
    if bits == 1:
        by_bin = torch.zeros(n, BINS, dtype=torch.uint8, device=device)
        return Plans(rows.new_ones(n, 1, dtype=torch.float64), by_bin, by_bin[:, 0] > 0, by_bin[:, 0] == 0)
    magnitudes = rows.abs()
    scales = [bf16(magnitudes.amax(2), up=True)]
    if bits < 8:
        scales.insert(0, bf16((magnitudes / rows.shape[2]).sum(2), up=False))
    scale = torch.stack(scales)  # (ways, n, rows)
    y = magnitudes * torch.where(scale > 0, 1 / scale, 0.0)[..., None]
    part = (scale.double() / scale.amax(2, keepdim=True).clamp(min=TINY)).square()
    if step and bits == 8:
        every = torch.ones(n, dtype=torch.bool, device=device)
        at, by_bin = evenly(y[0], part[0], step)
        return Plans(at, by_bin.to(torch.uint8), every, every)
    number = ((y.view(torch.int32) >> SHIFT) - LOWEST).clamp(0, BINS - 1)
    whole = (part * WHOLE).round().long()[..., None].expand_as(y)
    weight = number.new_zeros(*y.shape[:2], BINS, dtype=torch.int64)
    weight.scatter_add_(2, number.flatten(2).long(), whole.flatten(2))
    weight[..., (ONE >> SHIFT) - LOWEST] += weight.sum(2) == 0  # of zeros any level will do
    outer = (part * y.amax(3).square()).sum(2) / part.sum(2).clamp(min=TINY)
    fitting = fitted(weight.flatten(0, 1).double(), bits, outer.view(-1, 1))
    settled = (fitting.share > 0).all(1)[:, None] | (fitting.lost() < 1e-9)  # `employ` has nothing to do
    by_bin, settled = fitting.by_bin().to(torch.uint8).view(-1, n, BINS), settled.view(-1, n)
    at, lost = fitting.level.view(-1, n, count), fitting.lost().view(-1, n)
    by_largest = (lost[0] > HEAVY.get(bits, -1.0)) & (lost[-1] <= (0.75 if bits < 8 else 1.0) * lost[0])
    at[-1, :, -1] = 1.0
    chosen = by_largest * (len(at) - 1), torch.arange(n, device=device)
    return Plans(at[chosen], by_bin[chosen], by_largest, settled[chosen])


def _normalized(values: np.ndarray, bucket: int, by_largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute magnitudes over the scale of their bucket, (rows, bucket), and the BF16 scales, (rows,)."""
    y, scale = _magnitudes(values, bucket, by_largest)
    y *= _inverse(scale)[:, None]
    return y, scale


def _magnitudes(values: np.ndarray, bucket: int, by_largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute magnitudes, one bucket a row, (rows, bucket), and the BF16 scale of each, (rows,) float32."""
    y = _rows(values, bucket)
    np.abs(y, out=y)
    if by_largest:
        return y, bf16(y.max(1), up=True)
    real = bucket - (y.size - len(values))  # in the last row
    with np.errstate(over="ignore"):  # `bf16` takes care of it
        means = y.mean(1)
        if not np.isfinite(means).all():  # values near 1e38
            means = y.mean(1, dtype=np.float64).astype(np.float32)
        means[-1] *= np.float32(bucket / real)
    return y, bf16(means, up=False)


def _evenly(values: np.ndarray, bucket: int) -> Codes:
    """Quantize to 16 bits: the levels 0, 1, 2 ... 32767, up to the largest magnitude of each bucket."""
    k, top, negative = len(values), 32767, 1 << 15
    codes, scales = np.empty(k, "<u2"), np.empty(-(-k // bucket), np.float32)
    step = max(CHUNK // bucket, 1)
    for first in range(0, len(scales), step):
        here = slice(first * bucket, (first + step) * bucket)
        z = _rows(values[here], bucket)
        scale = bf16(np.abs(z).max(1) / np.float32(top), up=True)
        z *= _inverse(scale)[:, None]
        z = z.reshape(-1)[: len(values[here])]  # in [-top, top]
        place = np.floor(z + np.float32(0.5)).clip(-top, top).astype(np.int32)
        codes[here] = np.where(place < 0, -place + negative, place)
        scales[first : first + step] = scale
    patterns = _patterns(scales, np.array([top], np.uint16))
    return Codes(16, bucket, k, planes(codes.view(np.uint8), 2), _words(0), patterns)


def _join(codes: np.ndarray, values: np.ndarray, bits: int, loops: ModuleType | None = None) -> np.ndarray:
    """Pack level numbers, (k,) uint8, with the signs of the values."""
    if loops and bits in (2, 4):
        packed = np.zeros(packed_size(bits, len(codes)), np.uint8)
        loops.join(codes, values, bits, packed)
        return packed
    negative = np.less(values, 0).view(np.uint8)
    if bits == 3:
        return np.concatenate([pack(negative, 1), pack(codes, 2)])
    return pack(codes | (negative << np.uint8(bits - 1)), bits)


def _rows(values: np.ndarray, bucket: int) -> np.ndarray:
    """Copy the values, one bucket a row, padded with zeros: (ceil(k / bucket), bucket)."""
    rows = np.empty((-(-len(values) // bucket), bucket), np.float32)
    flat = rows.reshape(-1)
    flat[: len(values)] = values
    flat[len(values) :] = 0
    return rows


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def _patterns(scale: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Convert scales to BF16 patterns, (n,) uint16, lowered where the top level would overflow."""
    limit = np.finfo(np.float32).max / np.float32(table.max())
    return (np.minimum(scale.view(np.uint32), limit.view(np.uint32)) >> np.uint32(16)).astype(np.uint16)


def _words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint16)
