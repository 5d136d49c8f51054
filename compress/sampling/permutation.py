"""A seeded permutation of 0 .. n-1, evaluated at any index: no table of n numbers is ever made.

A Feistel network over the domain a x b, a = ceil(sqrt(n)), b = ceil(n / a), with additions modulo a and b in
turn (Black and Rogaway 2002, "generalized Feistel"), repeated where it lands outside 0 .. n-1. Only 64-bit
integer arithmetic, written with operators alone: NumPy on the host and torch on a device give the same order,
on any platform and in any version, because no library's random numbers are involved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

WORD = 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF
STEPS = 6  # three per half: beyond that the pair statistics in the tests no longer change


def mix64(x: int) -> int:
    """Apply splitmix64's finalizer (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    x = (x + 0x9E3779B97F4A7C15) & LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & LONG
    return x ^ (x >> 31)


def keys(*numbers: int) -> list[int]:
    """Derive `STEPS` 32-bit keys from numbers (a seed, a round), each taken modulo 2**64."""
    state = 0
    for number in numbers:
        state = mix64(state ^ (number & LONG))
    return [mix64(state + step) & WORD for step in range(STEPS)]


def mix32(x: Any, key: int) -> Any:
    """Apply Chris Wellons' lowbias32 to x XOR key. x: int64 array or tensor with values in [0, 2**32)."""
    x = x ^ key
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD  # the product may wrap at 2**63: its low 32 bits are right all the same
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def permute(places: Any, n: int, key: list[int]) -> Any:
    """Return the unit at each place: a bijection for a fixed n and key.

    places: int64 array or tensor with values in [0, n); n < 2**60.
    """
    return _within(n, _walk, places, key)


def place_of(units: Any, n: int, key: list[int]) -> Any:
    """Invert `permute`: return the place of each unit. units: int64 array or tensor, in [0, n)."""
    return _within(n, _walk_back, units, key)


def _within(n: int, walk: Callable[[Any, int, int, list[int]], Any], start: Any, key: list[int]) -> Any:
    """Walk from each number of `start` until it lands inside 0 .. n - 1."""
    rows = math.isqrt(n - 1) + 1 if n > 1 else 1
    columns = -(-n // rows)
    there = walk(start, rows, columns, key)
    out = there >= n
    while out.any():  # a x b exceeds n by less than 2 sqrt(n): few walk twice
        there[out] = walk(there[out], rows, columns, key)
        out = there >= n
    return there


def _walk(places: Any, rows: int, columns: int, key: list[int]) -> Any:
    left, right = places // columns, places % columns
    for step, k in enumerate(key):
        if step % 2 == 0:
            left = left + ((mix32(right, k) * rows) >> 32)  # in [0, 2 rows)
            left = left - rows * (left >= rows)
        else:
            right = right + ((mix32(left, k) * columns) >> 32)
            right = right - columns * (right >= columns)
    return left * columns + right


def _walk_back(units: Any, rows: int, columns: int, key: list[int]) -> Any:
    left, right = units // columns, units % columns
    for step, k in reversed(list(enumerate(key))):
        if step % 2 == 0:
            left = left - ((mix32(right, k) * rows) >> 32)  # in (-rows, rows)
            left = left + rows * (left < 0)
        else:
            right = right - ((mix32(left, k) * columns) >> 32)
            right = right + columns * (right < 0)
    return left * columns + right
