"""Curves in characters: braille dots, or ASCII for terminals that lack them.

A chart has labelled axes: round values on the left, round steps below. The line of the loss is joined dots,
and each evaluation is a mark over it, so no meaning rests on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from .styled_line import Line

Point = tuple[float, float]

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of a dot, by row and column of its cell
LEAST_ROWS, LEAST_COLUMNS = 5, 24  # of a chart, with its axes


@dataclass(frozen=True)
class Glyphs:
    """The characters of a chart, and how many dots one of them has."""

    dots_across: int
    dots_down: int
    mark: str
    corner: str
    across: str
    down: str
    tick_down: str
    tick_across: str


UNICODE = Glyphs(2, 4, "◆", "└", "─", "│", "┤", "┬")
ASCII = Glyphs(1, 1, "o", "+", "-", "|", "+", "+")


def glyphs_for(encoding: str, term: str = "") -> Glyphs:
    """Choose the characters that a terminal can show; the font of the Linux console has no braille."""
    try:
        f"{chr(BRAILLE)}{UNICODE.mark}{UNICODE.corner}".encode(encoding)
    except UnicodeEncodeError:
        return ASCII
    return ASCII if term == "linux" else UNICODE


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Choose multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def text_chart(
    curve: Sequence[Point], marks: Sequence[Point], width: int, height: int, glyphs: Glyphs = UNICODE
) -> list[Line]:
    """Draw a curve and marks over steps as `height` lines of at most `width` characters.

    Points are ordered by x; those that are not finite are left out. Returns no line where there is too
    little to draw or too little room.
    """
    curve = [point for point in curve if math.isfinite(point[1])]
    marks = [point for point in marks if math.isfinite(point[1])]
    points = [*curve, *marks]
    if len(points) < 2 or height < LEAST_ROWS or width < LEAST_COLUMNS:
        return []
    rows = height - 2
    y = Scale.around([value for _, value in points], rows * glyphs.dots_down)
    ticks = y.ticks(max(2, rows // 2))
    labels = {y.dot(tick) // glyphs.dots_down: label_of(tick, ticks) for tick in ticks}
    edge = max(map(len, labels.values())) + 1
    columns = width - edge - 1
    x = Scale(min(at for at, _ in points), max(at for at, _ in points), columns * glyphs.dots_across)
    cells = Cells(columns, rows, glyphs)
    cells.line([(x.dot(at), y.dot(value)) for at, value in averaged(curve, x)])
    drawn = cells.rows(
        {(x.dot(at) // glyphs.dots_across, y.dot(value) // glyphs.dots_down) for at, value in marks}
    )
    lines = []
    for number, row in enumerate(drawn):
        axis = glyphs.tick_down if number in labels else glyphs.down
        lines.append(Line.styled(f"{labels.get(number, ''):>{edge - 1}} {axis}", "dim") + row)
    return [*lines, *x_axis(x, edge, columns, glyphs)]


def x_axis(x: Scale, edge: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Draw the axis of steps, and their labels under it."""
    axis, labels = [glyphs.across] * columns, [" "] * columns
    free = 0  # the first column that no label takes
    for tick in (tick for tick in x.ticks(max(2, columns // 12)) if tick == round(tick)):
        column, text = x.dot(tick) // glyphs.dots_across, f"{tick:,.0f}" if free else f"step {tick:,.0f}"
        start = min(max(0, column - len(text) // 2), columns - len(text))
        if start >= free:
            labels[start : start + len(text)] = text
            axis[column], free = glyphs.tick_across, start + len(text) + 2
    left = " " * edge
    return [
        Line.styled(f"{left}{glyphs.corner}{''.join(axis)}"[: edge + 1 + columns], "dim"),
        Line.styled(f"{left} {''.join(labels)}".rstrip(), "dim"),
    ]


@dataclass(frozen=True)
class Scale:
    """A linear map from values to dots: `low` is dot 0, `high` the last one."""

    low: float
    high: float
    dots: int
    falling: bool = False  # dot 0 is `high`, as rows are counted from the top

    @classmethod
    def around(cls, values: Sequence[float], dots: int) -> Scale:
        """Fit a scale of rows around values, with room where all are equal."""
        low, high = min(values), max(values)
        room = 0.0 if high > low else abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, dots, falling=True)

    def dot(self, value: float) -> int:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        share = 1 - share if self.falling else share
        return min(self.dots - 1, max(0, round(share * (self.dots - 1))))

    def ticks(self, most: int) -> list[float]:
        """Choose round values; both ends where fewer than two of these lie between."""
        if self.high <= self.low:
            return [self.low]
        ticks = round_ticks(self.low, self.high, most)
        return ticks if len(ticks) > 1 else [self.low, self.high]


def label_of(tick: float, ticks: Sequence[float]) -> str:
    """Format a tick with the digits in which it differs from its neighbours."""
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick) or 1.0
    digits = max(0, 1 - math.floor(math.log10(apart)))
    return f"{tick:.{digits}f}" if digits <= 4 and abs(tick) < 1e6 else f"{tick:.1e}"


def averaged(points: Sequence[Point], x: Scale) -> list[Point]:
    """Average the points that fall on the same column of dots."""
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(x.dot(point[0]), []).append(point)
    return [
        (sum(at for at, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for group in columns.values()
    ]


class Cells:
    """The area of a chart: characters, each made of dots."""

    def __init__(self, columns: int, rows: int, glyphs: Glyphs) -> None:
        self.columns, self.count, self.glyphs = columns, rows, glyphs
        self.dots: dict[tuple[int, int], int] = {}  # (column, row) -> bits of the dots that are set

    def line(self, dots: Sequence[tuple[int, int]]) -> None:
        """Set the dots of a line through these."""
        for dot in dots[:1]:
            self.light(*dot)
        for (x0, y0), (x1, y1) in pairwise(dots):
            many = max(abs(x1 - x0), abs(y1 - y0), 1)
            for n in range(many + 1):
                self.light(x0 + round((x1 - x0) * n / many), y0 + round((y1 - y0) * n / many))

    def light(self, x: int, y: int) -> None:
        column, left = divmod(x, self.glyphs.dots_across)
        row, top = divmod(y, self.glyphs.dots_down)
        self.dots[column, row] = self.dots.get((column, row), 0) | DOTS[top][left]

    def rows(self, marks: set[tuple[int, int]]) -> list[Line]:
        """Return the characters row by row, with marks over the line."""
        lines = []
        for row in range(self.count):
            cells = [self.cell(column, row, marks) for column in range(self.columns)]
            line = Line()
            for style, group in groupby(cells, lambda cell: cell[1]):
                line += Line.styled("".join(character for character, _ in group), style)
            lines.append(line.rstrip())
        return lines

    def cell(self, column: int, row: int, marks: set[tuple[int, int]]) -> tuple[str, str]:
        """Return a character and its style."""
        if (column, row) in marks:
            return self.glyphs.mark, "eval"
        bits = self.dots.get((column, row), 0)
        if not bits:
            return " ", ""
        return (chr(BRAILLE + bits) if self.glyphs.dots_down > 1 else "*"), "loss"
