"""Plots of RESULTS.md: curves over a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from cocktail_cli.ui import round_ticks

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 34, 40  # margins; names are at the right
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563", "#65a30d")
Curves = Mapping[str, Sequence[tuple[float, float]]]
Ends = tuple[float, float] | None
Axis = tuple[Callable[[float], float], list[float]]  # values to pixels, and where it has ticks


def axis(start: float, stop: float, values: Sequence[float], ends: Ends = None) -> Axis:
    """Fit a logarithmic axis of whole decades between two pixels, or a linear one between `ends`."""
    of = float if ends else math.log10
    low, high = ends or (math.floor(of(min(values))), math.ceil(of(max(values))))
    ticks = round_ticks(low, high, 5) if ends else []
    if not ends:
        high = max(high, low + 1)
        factors = (1, 2, 5) if high - low < 4 else (1,)
        ticks = [*(10.0**p * f for p in range(low, high) for f in factors), 10.0**high]
    return lambda value: start + (stop - start) * (of(value) - low) / (high - low), ticks


def svg(title: str, x_name: str, curves: Curves, ends: Ends = None, percent: bool = False) -> str:
    """Draw curves by name; `ends` of a linear y axis, else it is logarithmic."""
    shown = {name: [p for p in points if p[1] > 0 or ends] for name, points in curves.items() if points}
    bottom = HEIGHT - BOTTOM
    points = [point for found in shown.values() for point in found]
    across, x_ticks = axis(LEFT, WIDTH - RIGHT, [x for x, _ in points])
    up, y_ticks = axis(bottom, TOP, [y for _, y in points], ends)
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in y_ticks:
        at, label = up(tick), f"{tick:.0%}" if percent else short(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x_ticks:
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
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return next((f"{value / size:g}{unit}" for size, unit in units if value >= size), f"{value:.4g}")
