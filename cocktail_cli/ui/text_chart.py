"""Curves in characters: braille dots, and ASCII for terminals that lack them.

A chart has labelled axes: round values on the left, round steps below. The line of the loss is joined dots,
and each evaluation is a mark over it, so no meaning rests on colour alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

Point = tuple[float, float]

MARK = "◆"
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of a dot, by row and column of its cell
LEAST_ROWS, LEAST_COLUMNS = 5, 24  # of a chart, with its axes
STAND_INS = str.maketrans(f"{MARK}└─│┤┬━·…", "o+-|++=-~") | dict.fromkeys(range(BRAILLE, BRAILLE + 256), "*")


def showable(text: str, encoding: str, term: str = "") -> str:
    """Replace characters that a terminal cannot show; the font of the Linux console has no braille."""
    if encoding.lower().startswith("utf") and term != "linux":
        return text
    return text.translate(STAND_INS).encode(encoding, "replace").decode(encoding)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Choose multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def text_chart(curve: Sequence[Point], marks: Sequence[Point], width: int, height: int) -> list[str]:
    """Draw a curve and marks over steps as `height` lines of at most `width` characters.

    Points are ordered by x; those that are not finite are left out. Returns no line where there is too
    little to draw or too little room.
    """
    curve, marks = ([point for point in some if math.isfinite(point[1])] for some in (curve, marks))
    steps, values = [at for at, _ in (*curve, *marks)], [value for _, value in (*curve, *marks)]
    if len(steps) < 2 or height < LEAST_ROWS or width < LEAST_COLUMNS:
        return []
    low, high, rows = min(values), max(values), height - 2
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        room = max(0.1, abs(high) * 0.1)
        low, high = low - room, high + room
    ticks = round_ticks(low, high, max(2, rows // 2))
    ticks = ticks if len(ticks) > 1 else [low, high]
    y = places(high, low, 4 * rows)
    labels = {y(tick) // 4: label_of(tick, ticks[1] - ticks[0]) for tick in ticks}
    edge = max(map(len, labels.values()))
    columns = width - edge - 2
    first, last = min(steps), max(max(steps), min(steps) + 1)
    x = places(first, last, 2 * columns)
    averaged = defaultdict(list)
    for at, value in curve:
        averaged[x(at)].append(value)
    cells = joined([(column, y(fmean(group))) for column, group in averaged.items()])
    cells |= {(x(at) // 2, y(value) // 4): MARK for at, value in marks}
    lines = []
    for row in range(rows):
        drawn = "".join(cells.get((column, row), " ") for column in range(columns))
        lines.append(f"{labels.get(row, ''):>{edge}} {'┤' if row in labels else '│'}{drawn}".rstrip())
    axis, below, free = ["─"] * columns, [" "] * columns, 0  # free: the first column that no label takes
    for tick in (tick for tick in round_ticks(first, last, max(2, columns // 12)) if tick == round(tick)):
        column, text = x(tick) // 2, f"{tick:,.0f}" if free else f"step {tick:,.0f}"
        start = min(max(0, column - len(text) // 2), columns - len(text))
        if start >= free:
            below[start : start + len(text)] = text
            axis[column], free = "┬", start + len(text) + 2
    return [*lines, f"{'':>{edge}} └{''.join(axis)}", f"{'':>{edge}}  {''.join(below)}".rstrip()]


def places(first: float, last: float, dots: int) -> Callable[[float], int]:
    """Map values linearly to dots: `first` is dot 0, `last` is dot `dots - 1`."""
    return lambda value: round((value - first) / (last - first) * (dots - 1))


def label_of(tick: float, apart: float) -> str:
    """Format a tick with the digits in which it differs from its neighbours, which are `apart`."""
    digits = max(0, 1 - math.floor(math.log10(apart)))
    return f"{tick:.{digits}f}" if digits <= 4 and abs(tick) < 1e6 else f"{tick:.1e}"


def joined(path: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Draw the line through dots (x, y): cell (column, row) -> character."""
    bits: dict[tuple[int, int], int] = defaultdict(int)
    for (x0, y0), (x1, y1) in pairwise([*path[:1], *path]):
        many = max(abs(x1 - x0), abs(y1 - y0), 1)
        for n in range(many + 1):
            column, left = divmod(x0 + round((x1 - x0) * n / many), 2)
            row, top = divmod(y0 + round((y1 - y0) * n / many), 4)
            bits[column, row] |= DOTS[top][left]
    return {cell: chr(BRAILLE + dots) for cell, dots in bits.items()}
