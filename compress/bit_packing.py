"""Small integers packed into bytes, the first in the lowest bits: widths from 1 to 63."""

from __future__ import annotations

import numpy as np


def pack(numbers: np.ndarray, width: int) -> np.ndarray:
    """Pack (k,) unsigned integers below 2**width to (ceil(k * width / 8),) uint8. Widths 1, 2, 4 and 8 are
    fast, and take uint8."""
    if width == 0:
        return np.empty(0, np.uint8)
    if width == 8:
        return numbers.astype(np.uint8, copy=False)
    if width == 1:
        return np.packbits(numbers, bitorder="little")
    if width in (2, 4):
        each = 8 // width
        padded = np.zeros(-(-len(numbers) // each) * each, np.uint8)
        padded[: len(numbers)] = numbers
        words = padded.view(f"<u{each}")  # the numbers of one output byte side by side
        gathered = words.copy()
        for i in range(1, each):
            gathered |= words >> words.dtype.type(i * (8 - width))
        return gathered.astype(np.uint8)  # the low byte: what lies above is dropped
    wide = numbers.astype(np.uint64)
    bits = (wide[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def unpack(data: np.ndarray, width: int, count: int) -> np.ndarray:
    """Unpack (ceil(count * width / 8),) uint8 to (count,) int64."""
    if width == 0:
        return np.zeros(count, np.int64)
    if width in (1, 2, 4, 8):
        return lookup(np.arange(1 << width), data, width)[:count]
    bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
    total = np.zeros(count, np.int64)
    for i in range(width):
        total |= bits[:, i].astype(np.int64) << i
    return total


def lookup(table: np.ndarray, data: np.ndarray, width: int) -> np.ndarray:
    """Look up table[number] for each packed number, one look-up a byte. table: (2**width,), width 1, 2, 4 or
    8.

    Returns (len(data) * 8 / width,): the last ones come from padding.
    """
    shifts = np.arange(0, 8, width)
    each = (np.arange(256)[:, None] >> shifts) & ((1 << width) - 1)  # (256, 8 / width)
    return table[each].take(data, axis=0).reshape(-1)
