"""The loops over elements on the host, compiled by numba: one pass where NumPy takes several.

Each function stands beside a slow one that defines it (`topk`, `quantization`, `coding`, `sampling`) and
gives the same bits: integers, or floating-point operations that round once, in the same order. Whatever
depends on the order of a sum (means, the fit of the levels) stays with NumPy.

Compiled once for each machine, which takes seconds, and cached in `__pycache__`, else in the user's cache
folder, else in the process. Import it with `backends.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir

from compress import topk

MAGNITUDE = np.int32(0x7FFFFFFF)
WORD = np.uint64(64)  # elements whose comparisons make one word
ONE = np.uint64(1)
AHEAD, EVERY = 16, 64  # blocks that memory is asked ahead for, and elements from one asking to the next
FAR = np.uint64(1024)  # elements, likewise
THREE, SEVEN, BYTE = np.uint64(3), np.uint64(7), np.uint64(255)  # a byte's bits, and a word's bytes
PIECE = 1 << 13  # elements at a time: stays in L1
intrinsic: Any = numba.extending.intrinsic  # untyped: the functions lose their first argument by it


def loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, to run without the interpreter's lock."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder to write to: compiling anew is slow, not wrong
        return numba.njit(nogil=True)(function)


@intrinsic
def first_bit(context: Any, word: Any) -> Any:
    """Return the number of the lowest set bit of a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.uint64(numba.types.uint64), generate


@dataclass(frozen=True)
class Vector:
    """Search a vector as `topk.Plain` does, compiled."""

    v: np.ndarray  # (m,) float32

    @property
    def size(self) -> int:
        return len(self.v)

    def magnitudes(self, line: int, step: int) -> np.ndarray:
        out = np.empty(topk.seen(self.size, line, step), np.int32)
        _magnitudes(self.v.view(np.int32), line, step, out)
        return out

    def reaching(self, low: int, expected: int) -> topk.Survivors:
        bits = self.v.view(np.int32)
        return _found(self.size, expected, lambda at, patterns: _reaching(bits, np.int32(low), at, patterns))


def _found(m: int, expected: int, search: Callable[[np.ndarray, np.ndarray], int]) -> topk.Survivors:
    """Run `search` with arrays that have enough room for what it writes."""
    for room in (min(expected + expected // 8, m) + PIECE, m + PIECE):  # the latter always suffices
        positions, values = np.empty(room, topk.index_type(m)), np.empty(room, np.float32)
        count = search(positions, values.view(np.int32))
        if count >= 0:
            break
    return topk.Survivors(positions[:count], values[:count])


@intrinsic
def fetch(context: Any, array: Any, at: Any) -> Any:
    """Prefetch the cache line of an element; any index will do, nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(prefetch, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return numba.types.void(array, at), generate


@loop
def subtract(
    x: np.ndarray, y: np.ndarray, units: np.ndarray, shift: int, start: int, out: np.ndarray
) -> None:
    """Compute x - y on the sample, from element `start` on, as many as `out` holds."""
    done = 0
    while done < len(out):
        unit = (start + done) >> shift
        inside = (start + done) - (unit << shift)
        length = min((1 << shift) - inside, len(out) - done)
        at = (units[unit] << shift) + inside
        if 6 <= shift <= 12 and unit + AHEAD < len(units):
            for j in range(units[unit + AHEAD] << shift, (units[unit + AHEAD] + 1) << shift, EVERY):
                fetch(x, j)
                fetch(y, j)
        a, b, to = x[at : at + length], y[at : at + length], out[done : done + length]
        for j in range(length):
            to[j] = a[j] - b[j]
        done += length


@loop
def _magnitudes(bits: np.ndarray, line: int, step: int, out: np.ndarray) -> None:
    """Gather the magnitudes of every `step`-th line of `line` elements. bits: (m,), out: int32 both."""
    width = np.uint64(line)
    for i in range(np.uint64(len(out)) // width):
        here, there = i * width, i * width * np.uint64(step)
        for j in range(width):
            out[here + j] = bits[there + j] & MAGNITUDE


@loop
def _collect(
    bits: np.ndarray,  # (n,) int32
    low: np.int32,
    base: np.uint64,  # position of the first
    positions: np.ndarray,  # room for n more
    patterns: np.ndarray,
    count: np.uint64,  # how many there are already
) -> np.uint64:
    """Append the elements with a magnitude of at least `low`.

    The comparisons of 64 elements are vectorized, and only those that pass are visited: no branch for
    each.
    """
    last = np.uint64(len(bits))
    for start in range(np.uint64(0), last, WORD):
        for j in range(np.uint64(0), WORD, np.uint64(16)):
            fetch(bits, start + FAR + j)
        word = np.uint64(0)
        if start + WORD <= last:
            for j in range(WORD):
                word |= np.uint64((bits[start + j] & MAGNITUDE) >= low) << j
        else:
            for j in range(last - start):
                word |= np.uint64((bits[start + j] & MAGNITUDE) >= low) << j
        while word:
            i = start + first_bit(word)
            positions[count] = base + i
            patterns[count] = bits[i]
            count += ONE
            word &= word - ONE
    return count


@loop
def _reaching(bits: np.ndarray, low: np.int32, positions: np.ndarray, patterns: np.ndarray) -> int:
    """Return how many were found; -1 where there may be no room, and the output is then meaningless."""
    count = np.uint64(0)
    for start in range(0, len(bits), PIECE):
        if count + np.uint64(PIECE) > np.uint64(len(positions)):
            return -1
        count = _collect(bits[start : start + PIECE], low, np.uint64(start), positions, patterns, count)
    return int(np.int64(count))


@loop
def nearest(
    values: np.ndarray,  # (k,) float32
    inverse: np.ndarray,  # (rows,) float32: one over the scale of each bucket
    bucket: int,
    by_bin: np.ndarray,  # (bins,) uint8, as in `quantization.Levels`
    shift: int,  # `quantization.SHIFT`
    lowest: int,  # `quantization.LOWEST`
    beyond: int,  # pattern of `Levels.beyond`; those of positive numbers are ordered like the numbers
    codes: np.ndarray,  # (k,) uint8: gets the number of the nearest level
    far: np.ndarray,  # (rows,) bool: gets whether the bucket holds an outlier
) -> None:
    """Compute `Levels.nearest` and `far` in one pass over the values."""
    highest = np.int32(len(by_bin) - 1)
    numbers = np.empty(bucket, np.int32)
    for row in range(len(inverse)):
        first, size = row * bucket, min(bucket, len(values) - row * bucket)
        here, there = values[first : first + size], codes[first : first + size]
        most, over = np.int32(0), inverse[row]
        for i in range(size):  # vectorized, what the next loop cannot be
            pattern = np.float32(abs(here[i]) * over).view(np.int32)
            most = max(most, pattern)
            numbers[i] = min(max((pattern >> np.int32(shift)) - np.int32(lowest), np.int32(0)), highest)
        for i in range(size):
            there[i] = by_bin[np.uint32(numbers[i])]
        far[row] = most > beyond


@loop
def join(codes: np.ndarray, values: np.ndarray, width: int, out: np.ndarray) -> None:
    """Pack signs and level numbers of 2 or 4 bits as `quantization._join`. out: zeros."""
    each = 8 // width
    whole = len(codes) // 2 * 2 if width == 4 else 0
    for i in range(whole // 2):
        a = codes[2 * i] | (np.uint8(values[2 * i] < 0) << np.uint8(3))
        b = codes[2 * i + 1] | (np.uint8(values[2 * i + 1] < 0) << np.uint8(3))
        out[i] = a | (b << np.uint8(4))
    for i in range(whole, len(codes)):
        code = codes[i] | (np.uint8(values[i] < 0) << np.uint8(width - 1))
        out[i // each] |= code << np.uint8(i % each * width)


@loop
def gaps(positions: np.ndarray, out: np.ndarray) -> int:
    """Write the gap before each position (k,), modulo 256, and return the longest. k from 1."""
    most = positions[0]
    out[0] = np.uint8(most)
    for i in range(1, len(positions)):
        gap = positions[i] - positions[i - 1] - positions.dtype.type(1)
        most = max(most, gap)
        out[i] = np.uint8(gap)
    return most


@loop
def positions(gaps: np.ndarray, before: int, out: np.ndarray) -> bool:
    """Add up gap bytes (k,) to positions (k,) behind the position `before`. False where one of them is an
    escape, and `out` is then meaningless."""
    at, escapes = np.int64(before), False
    for i in range(len(gaps)):
        escapes |= gaps[i] == 255
        at += np.int64(gaps[i]) + 1
        out[i] = at
    return not escapes


@loop
def strides(gaps: np.ndarray, stride: int, far: np.ndarray, longer: np.ndarray, before: np.ndarray) -> None:
    """Write the position before every `stride`-th value, and the last one, of gap bytes (k,) to `before`,
    (ceil(k / stride) + 1,). The gap before value far[i] is longer[i] more than its byte says."""
    at, nth = np.int64(-1), 0
    for row in range(len(before) - 1):
        here, passed = gaps[row * stride : (row + 1) * stride], np.uint32(0)
        for gap in here:  # vectorized
            passed += np.uint32(gap)
        before[row] = at
        at += np.int64(passed) + len(here)
        while nth < len(far) and far[nth] < (row + 1) * stride:
            at += longer[nth]
            nth += 1
    before[-1] = at


@loop
def squares(
    packed: np.ndarray,  # codes, as in `Codes`: `count` of `width` bits, a bucket begins with a byte
    count: int,
    width: int,
    bucket: int,
    squared: np.ndarray,  # (2**width,) int64: of the level of each code
    by_byte: np.ndarray,  # (256,) int64: of all codes in a byte
    scales: np.ndarray,  # (rows,) float32
) -> float:
    """Sum the squares of all values. Buckets of whole words, the rule, take half the time."""
    total, each = 0.0, 8 // width
    words = packed[: len(packed) // 8 * 8].view(np.uint64)
    for row in range(len(scales)):
        first, last = row * bucket, min((row + 1) * bucket, count)
        begin, end = np.uint64(first // each), np.uint64(last // each)
        whole = odd = np.int64(0)  # two sums: one would wait for itself
        if (begin | end) & SEVEN == 0:
            for word in words[begin >> THREE : end >> THREE]:
                for i in range(0, 64, 16):
                    whole += by_byte[(word >> np.uint64(i)) & BYTE]
                    odd += by_byte[(word >> np.uint64(i + 8)) & BYTE]
        else:
            for byte in packed[begin:end]:
                whole += by_byte[np.uint64(byte)]
        for i in range(last // each * each, last):
            whole += squared[(packed[i // each] >> (i % each * width)) & ((1 << width) - 1)]
        total += np.float64(whole + odd) * np.float64(scales[row]) * np.float64(scales[row])
    return total


@loop
def add_codes(
    out: np.ndarray,  # (m,) float32
    start: int,
    stop: int,
    gaps: np.ndarray,  # (k,) uint8
    far: np.ndarray,  # the gap before value far[i] is
    longer: np.ndarray,  # longer[i] more than its byte says
    first: int,  # the walk begins with this value
    before: int,  # the position before it
    inside: int,  # values from this one on stand at `start` or behind it,
    until: int,  # and before this one at `stop - 1` or before it
    packed: np.ndarray,  # codes, as above
    width: int,
    bucket: int,
    levels: np.ndarray,  # (2**width,) float32
    scales: np.ndarray,  # (rows,) float32
    factor: np.float32,
) -> None:
    """Add factor * the values of a packed update to out[start:stop]. No product but the last is rounded, nor
    is it fused with the sum: the bits of torch's `index_add_`.

    Up to 4 bits a bucket that is known to lie inside is added without comparisons, eight values at once, its
    products computed once for each code: half of the time.
    """
    begin, end, at = np.uint64(start), np.uint64(stop), np.uint64(before + 1)  # at: the next free position
    bits, mask = np.uint64(width), np.uint64((1 << width) - 1)
    size, count = np.uint64(bucket), np.uint64(len(gaps))
    steps, words = gaps[: len(gaps) // 8 * 8].view(np.uint64), packed[: len(packed) // 8 * 8].view(np.uint64)
    products = np.empty(16, np.float32)
    nth = 0
    while nth < len(far) and far[nth] < first:
        nth += 1
    jump = np.uint64(far[nth]) if nth < len(far) else count  # the next value with a longer gap
    for row in range(np.uint64(first) // size, np.uint64(len(scales))):
        scale = scales[row]
        one, last = max(np.uint64(first), row * size), min((row + ONE) * size, count)
        known = np.uint64(inside) <= one and last <= np.uint64(until)
        read = last * bits <= np.uint64(len(words)) << np.uint64(6)
        if width <= 4 and known and read and (one | last) & SEVEN == 0 and jump >= last:
            for number in range(1 << width):
                products[number] = levels[number] * scale * factor
            for eight in range(one >> THREE, last >> THREE):
                byte = np.uint64(eight) * bits  # where eight codes begin, which lie in one word
                step, code = steps[eight], words[byte >> THREE] >> ((byte & SEVEN) << THREE)
                for _ in range(8):  # unrolled
                    at += step & BYTE
                    out[at] += products[code & mask]
                    at += ONE
                    step >>= np.uint64(8)
                    code >>= bits
            continue
        for i in range(one, last):
            at += np.uint64(gaps[i])
            if i == jump:
                at += np.uint64(longer[nth])
                nth += 1
                jump = np.uint64(far[nth]) if nth < len(far) else count
            if at >= end:
                return
            if at >= begin:
                bit = i * bits
                code = (np.uint64(packed[bit >> THREE]) >> (bit & SEVEN)) & mask
                out[at] += levels[code] * scale * factor
            at += ONE


@loop
def add_all(
    out: np.ndarray,  # (m,) float32
    start: int,
    stop: int,
    packed: np.ndarray,  # codes of every position, as above
    width: int,
    bucket: int,
    levels: np.ndarray,
    scales: np.ndarray,
    factor: np.float32,
) -> None:
    """Add to out[start:stop] the values there, times `factor`, to the bits of `add_codes`."""
    bits, mask, products = np.uint64(width), np.uint64((1 << width) - 1), np.empty(1 << width, np.float32)
    for row in range(start // bucket, -(-stop // bucket)):
        for number in range(1 << width):
            products[number] = levels[number] * scales[row] * factor
        for i in range(np.uint64(max(start, row * bucket)), np.uint64(min(stop, (row + 1) * bucket))):
            bit = i * bits
            out[i] += products[(np.uint64(packed[bit >> THREE]) >> (bit & SEVEN)) & mask]


@loop
def add_packed(
    x: np.ndarray, blocks: Any, tables: Any, places: Any, codes: Any, part: Any, factor: np.float32
) -> np.int64:
    """Add factor (1 or -1) times values of a packed update to their coordinates of x, (n,) float32, and
    return the change of the fingerprint, modulo 2**64. Decoding them first takes twice the time.

    blocks: the blocks of the sample, (u,) uint64, and log2 of their length. tables: of the fingerprint:
    where x begins in its vector, (65536,) and (rows,) int64; empty: 0 is returned.
    places: gaps (none: all positions), far, longer; codes: packed, width, bucket, levels, scales, as above.
    part: the first value, the end, the position before.
    """
    units, shift = blocks
    start, across, down = tables
    gaps, far, longer = places
    packed, width, bucket, levels, scales = codes
    first, last, before = part
    bits, mask, by = np.uint64(width), np.uint64((1 << width) - 1), np.uint64(shift)
    products, total = np.empty(1 << width, np.float32), np.int64(0)
    at, nth = np.uint64(before + 1), np.searchsorted(far, first)  # at: the next free position
    asked, end = at >> by, np.uint64(len(units) if 6 <= shift <= 12 else 0)
    for row in range(first // bucket, -(-last // bucket)):
        for number in range(1 << width):
            products[number] = levels[number] * scales[row] * factor
        ahead = min((at >> by) + np.uint64(AHEAD), end)
        while asked < ahead:  # the blocks that this bucket reaches, and some more
            for j in range(units[asked] << by, (units[asked] + ONE) << by, np.uint64(topk.LINE)):
                fetch(x, j)
            asked += ONE
        for i in range(np.uint64(max(first, row * bucket)), np.uint64(min(last, (row + 1) * bucket))):
            if len(gaps):
                at += np.uint64(gaps[i])
            if nth < len(far) and i == np.uint64(far[nth]):
                at += np.uint64(longer[nth])
                nth += 1
            bit, unit = i * bits, at >> by
            place = at + ((units[unit] - unit) << by)
            old = x[place]
            new = old + products[(np.uint64(packed[bit >> THREE]) >> (bit & SEVEN)) & mask]
            x[place] = new
            if len(down):
                change = np.int64(np.float32(new).view(np.uint32)) - np.int64(np.float32(old).view(np.uint32))
                place += np.uint64(start)
                total += across[place & np.uint64(65535)] * down[place >> np.uint64(16)] * change
            at += ONE
    return total
