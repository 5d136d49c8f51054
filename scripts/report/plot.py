"""Plots of RESULTS.md: curves over a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 34, 40  # margins; names stand at the right
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563", "#65a30d")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Where a number is between two ends, as a share."""

    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        if not self.log:
            return [self.low + i * (self.high - self.low) / 5 for i in range(6)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**n for n in range(first, last + 1)]


def around(values: Sequence[float]) -> Axis:
    """Whole decades."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Axis(10.0**low, 10.0 ** max(high, low + 1))


def svg(
    title: str, x_name: str, curves: Mapping[str, Points], y: Axis | None = None, percent: bool = False
) -> str:
    """Curves by name; a dashed one where the name ends in "(fit)"."""
    shown = {name: [p for p in points if p[1] > 0 or y] for name, points in curves.items() if points}
    across = around([x for points in shown.values() for x, _ in points])
    up = y or around([value for points in shown.values() for _, value in points])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        inner, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + inner * across.at(point[0]), TOP + high * (1 - up.at(point[1]))

    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in up.ticks:
        _, at = place((across.low, tick))
        label = f"{tick:.0%}" if percent else short(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in across.ticks:
        at, _ = place((tick, up.low))
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    for number, (name, points) in enumerate(shown.items()):
        colour, dashes = COLOURS[number % len(COLOURS)], ' stroke-dasharray="5 4"' if "(fit)" in name else ""
        where = [place(point) for point in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in where)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        if not dashes:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in where]
        beside = TOP + 16 * number + 8
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{beside}" fill="{colour}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def short(value: float) -> str:
    """1,000,000 -> 1M"""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"
