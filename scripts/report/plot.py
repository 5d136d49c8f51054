"""Plots of RESULTS.md: curves over a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from cocktail_cli.dashboard.charts import Axis

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 34, 40  # margins; names are at the right
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563", "#65a30d")
Points = Sequence[tuple[float, float]]


def decades(values: Sequence[float], start: float, stop: float) -> Axis:
    """Fit a logarithmic axis of whole decades between these pixels."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Axis(10.0**low, 10.0 ** max(high, low + 1), start, stop, log=True)


def svg(
    title: str,
    x_name: str,
    curves: Mapping[str, Points],
    ends: tuple[float, float] | None = None,
    percent: bool = False,
) -> str:
    """Draw curves by name; `ends` of a linear y axis, else it is logarithmic."""
    shown = {name: [p for p in points if p[1] > 0 or ends] for name, points in curves.items() if points}
    bottom = HEIGHT - BOTTOM
    across = decades([x for points in shown.values() for x, _ in points], LEFT, WIDTH - RIGHT)
    ys = [y for points in shown.values() for _, y in points]
    up = Axis(*ends, bottom, TOP) if ends else decades(ys, bottom, TOP)
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in up.ticks():
        at, label = up(tick), f"{tick:.0%}" if percent else short(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in across.ticks():
        where = f'x="{across(tick):.1f}" y="{HEIGHT - 22}"'
        parts.append(f'<text {where} text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    for number, (name, points) in enumerate(shown.items()):
        colour, pixels = COLOURS[number % len(COLOURS)], [(across(x), up(y)) for x, y in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in pixels]
        beside = f'x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * number + 8}"'
        parts.append(f'<text {beside} fill="{colour}">{escape(name)}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        f'<rect {size} fill="white"/>{"".join(parts)}</svg>\n'
    )


def short(value: float) -> str:
    """Format 1,000,000 as 1M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"
