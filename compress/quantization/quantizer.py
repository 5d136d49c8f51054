"""Quantize values to codes of q bits, a scale for each bucket and a table of levels; dequantize to the bit.

value = (-1)**sign * level * scale      level: an integer below 2**16, scale: BF16 (8 significant bits)

so a decoded value has at most 24 significant bits: it is exact in FP32 on any device, whatever order or fused
instruction computes it. Scales are zero or normal numbers and levels zero or at least 1, so no product is
denormal. A code is the sign (top bit) and the number of the level. At 16 bits the level is its own number and
the table is left out; 32 bits are the FP32 patterns themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from compress.bit_packing import lookup, pack

from . import levels as fitted

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
    loops: ModuleType | None = None,  # `compress.backends.numba_loops`: the same codes
    step: float = 0.0,  # with 8 bits: levels so many root mean squares apart; 0: fitted ones
) -> Codes:
    """Quantize values to codes, scales and levels."""
    k = len(values)
    if bits == 32 or k == 0:
        return Codes(bits, bucket, k, planes(values.view(np.uint8), 4), _words(table_size(bits)), _words(0))
    if bits == 16:
        return _evenly(values, bucket)
    return _to_levels(values, plan(seen(values, bucket), bits, loops, step), bits, bucket, loops)


def dequantize(codes: Codes, inside: int = 0) -> np.ndarray:
    """Compute the values, (k,) float32, exactly: the only arithmetic is an integer times a scale.

    inside: how many values of the first bucket precede these codes, where they are a window of a packet.
    """
    bits, bucket, count = codes.quant_bits, codes.quant_bucket_size, codes.count
    if bits == 32:
        return planes(codes.packed, -4).view(np.float32)
    if count == 0:
        return np.empty(0, np.float32)
    values, scales = signed_levels(codes.packed, codes.levels, bits, count), widen(codes.scales)
    first = min(-inside % bucket, count)  # the rest of a bucket, whole buckets, the beginning of one
    whole = (count - first) // bucket
    last = first + whole * bucket
    values[:first] *= scales[0]
    begin = 1 if inside else 0
    values[first:last].reshape(-1, bucket)[:] *= scales[begin : begin + whole, None]
    values[last:] *= scales[-1]
    return values


def signed_levels(packed: np.ndarray, levels: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Compute (-1)**sign * level of `count` packed codes of 1 to 16 bits, (count,) float32."""
    if bits == 16:
        words = planes(packed, -2).view("<u2")
        signed = (words & np.uint16(0x7FFF)).astype(np.float32)
        return np.negative(signed, out=signed, where=words >= 0x8000)
    if bits == 3:
        signs = -(-count // 8)
        signed = lookup(np.array([1, -1], np.float32), packed[:signs], 1)[:count]
        return signed * lookup(levels.astype(np.float32), packed[signs:], 2)[:count]
    return lookup(signed_table(levels), packed, bits)[:count]


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


def bf16(x: np.ndarray, up: bool) -> np.ndarray:
    """Round non-negative (n,) float32 to the nearest finite BF16, or the next one up, as float32."""
    pattern = x.view(np.uint32) + np.uint32(0xFFFF if up else 0x8000)
    return np.minimum(pattern & np.uint32(0xFFFF0000), np.uint32(0x7F7F0000)).view(np.float32)


def widen(scales: np.ndarray) -> np.ndarray:
    """Widen BF16 patterns, (n,) uint16, to (n,) float32."""
    return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Plan:
    """The quantization of a packet, decided on some of its values."""

    levels: fitted.Levels
    by_largest: bool  # the scale of a bucket is its largest magnitude; otherwise their mean

    @property
    def unit(self) -> int:
        """The table counts in scale / 2**unit, so that its top level fills 16 bits."""
        return 15 - math.ceil(math.log2(self.levels.at[-1]))

    @property
    def table(self) -> np.ndarray:
        """The levels as the packet holds them, (2**(bits-1),) uint16."""
        return np.rint(self.levels.at * 2.0**self.unit).astype(np.uint16)

    def patterns(self, scale: np.ndarray) -> np.ndarray:
        """Convert scales, (n,) float32, to BF16 patterns, (n,) uint16, as the packet holds them."""
        return _patterns(scale * np.float32(2.0**-self.unit), self.table)


Rows = TypeVar("Rows", np.ndarray, torch.Tensor)


def seen(values: Rows, bucket: int) -> Rows:
    """Select some whole buckets of values (k,), one a row, for `plan`."""
    whole = len(values) // bucket
    every = max(len(values) // SEEN, 1) | 1
    return values[: whole * bucket].reshape(-1, bucket)[::every] if whole else values[None]


def plan(rows: np.ndarray, bits: int, loops: ModuleType | None = None, step: float = 0.0) -> Plan:
    """Fit levels to rows of values, one bucket a row, or space them evenly.

    The mean as scale costs fewer bits at the same error, because outliers move it little. The largest is
    right at 8 bits, where nothing may be clipped, and where outliers hold so much of the energy that the
    mean serves them badly.
    """
    if step and bits == 8:
        return Plan(fitted.even(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=True), step), True)
    level = None
    if bits < 8:
        level = fitted.fit(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=False), bits, loops)
        if level.error <= HEAVY.get(bits, 1.0):
            return Plan(level, False)
    largest = fitted.fit(*_normalized(rows.reshape(-1), rows.shape[1], by_largest=True), bits, loops)
    if level and largest.error > 0.75 * level.error:
        return Plan(level, False)
    largest.at[-1] = 1.0  # exact for the largest of each bucket
    return Plan(largest, True)


def _to_levels(values: np.ndarray, how: Plan, bits: int, bucket: int, loops: ModuleType | None) -> Codes:
    """Quantize to the nearest of the plan's levels, each magnitude over the scale of its bucket."""
    k = len(values)
    codes, scales = np.empty(k, np.uint8), np.empty(-(-k // bucket), np.float32)
    outside = np.zeros(len(scales), bool)  # buckets with an outlier
    step = max(CHUNK // bucket, 1)
    for first in range(0, len(scales), step):
        part, here = slice(first, first + step), slice(first * bucket, (first + step) * bucket)
        if loops:
            scales[part] = _scale(_magnitudes(values[here], bucket), len(values[here]), how.by_largest)
            inverse, by_bin = _inverse(scales[part]), how.levels.by_bin
            ranges = fitted.SHIFT, fitted.LOWEST, int(how.levels.beyond.view(np.int32))
            loops.nearest(values[here], inverse, bucket, by_bin, *ranges, codes[here], outside[part])
        else:
            y, scales[part] = _normalized(values[here], bucket, how.by_largest)
            codes[here] = how.levels.nearest(y.reshape(-1)[: len(values[here])])
            outside[first + fitted.far(y, how.levels)] = True
    outlying = np.flatnonzero(outside) if bits > 1 and not how.by_largest else np.empty(0, np.int64)
    for first in range(0, len(outlying), step):  # once more, with a scale that serves them better
        rows = outlying[first : first + step]
        index = rows[:, None] * bucket + np.arange(bucket)
        inside = index < k
        y = np.where(inside, np.abs(values.take(index, mode="clip")), np.float32(0))
        y *= _inverse(scales[rows])[:, None]
        wider = bf16(scales[rows] * fitted.stretch(y, how.levels), up=False)
        y *= (scales[rows] / wider)[:, None]
        scales[rows] = wider
        codes[index[inside]] = how.levels.nearest(y)[inside]
    return Codes(bits, bucket, k, _join(codes, values, bits, loops), how.table, how.patterns(scales))


def _normalized(values: np.ndarray, bucket: int, by_largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute magnitudes over the scale of their bucket, (rows, bucket), and the BF16 scales, (rows,)."""
    y = _magnitudes(values, bucket)
    scale = _scale(y, len(values), by_largest)
    y *= _inverse(scale)[:, None]
    return y, scale


def _scale(magnitudes: np.ndarray, k: int, by_largest: bool) -> np.ndarray:
    """Compute the scale of each bucket, (rows,) float32; magnitudes: (rows, bucket), k of them real."""
    return bf16(magnitudes.max(1) if by_largest else _means(magnitudes, k), up=by_largest)


def _magnitudes(values: np.ndarray, bucket: int) -> np.ndarray:
    y = _rows(values, bucket)
    return np.abs(y, out=y)


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


def _means(rows: np.ndarray, k: int) -> np.ndarray:
    """Average the real elements of each row, (rows,) float32; `bf16` takes care of overflow."""
    real = rows.shape[1] - (rows.size - k)  # in the last row
    with np.errstate(over="ignore"):
        means = rows.mean(1)
        if not np.isfinite(means).all():  # values near 1e38
            means = rows.mean(1, dtype=np.float64).astype(np.float32)
        means[-1] *= np.float32(rows.shape[1] / real)
    return means


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def _patterns(scale: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Convert scales to BF16 patterns, (n,) uint16, lowered where the top level would overflow."""
    limit = np.finfo(np.float32).max / np.float32(table.max())
    return (np.minimum(scale.view(np.uint32), limit.view(np.uint32)) >> np.uint32(16)).astype(np.uint16)


def _words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint16)
