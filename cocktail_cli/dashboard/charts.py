"""SVG charts for the dashboard and the report: numbers in, an element tree out. Colours are in style.css.

Every chart has a title and a description for screen readers, and tooltips in <title>. Series differ by dashes
and marks as well as colour, and the table beside a chart has the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Literal, get_args
from xml.etree.ElementTree import Element

from cocktail_cli.ui import round_ticks

from .markup import el

WIDTH, HEIGHT = 480.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 14.0, 30.0, 40.0  # margins around the plot
MOST = 120  # points per line; more are averaged
MARKS = 24  # marks on a line, at most
ROW, NAME = 26.0, 112.0  # row charts: height of a row, width of its name
ROWS = 24  # peers with a row; the others are counted
LEFT_OUT = "late or refused"

Point = tuple[float, float]
# CSS class: "a" solid, "b" dashed with marks, "c" dotted, "d" dash and dot
Look = Literal["a", "b", "c", "d"]
LOOKS: tuple[Look, ...] = get_args(Look)
IN_A_ROW = 2  # names of a legend
CHARACTER = 9.0  # pixels of a label's character, on a phone


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]  # ordered by x
    look: Look


@dataclass(frozen=True)
class Plot:
    """A frame with one or more curves."""

    name: str  # id of the element
    title: str
    said: str  # description for screen readers
    series: Sequence[Series]
    x_name: str
    text: Callable[[float], str]  # formats a value of y
    log: bool = False
    zero: bool = False  # y begins at 0


@dataclass(frozen=True)
class Bar:
    """A bar in a row, from `start` to `stop`."""

    start: float
    stop: float
    title: str
    pale: bool = False


@dataclass(frozen=True)
class Row:
    name: str
    bars: Sequence[Bar]
    marks: Sequence[Bar] = ()  # crosses over the bars
    text: str = ""  # at the end of the row


def downsample(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Reduce to `most` points: neighbours are averaged at the x of their last, and the last point is kept."""
    if len(points) <= most:
        return list(points)
    many, last = len(points) - 1, most - 1
    groups = [points[many * i // last : many * (i + 1) // last] for i in range(last)]
    return [(group[-1][0], fmean(y for _, y in group)) for group in groups] + [points[-1]]


# ---- axes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic map from values to pixels."""

    low: float
    high: float
    start: float  # pixel at `low`
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self, most: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else round_ticks(self.low, self.high, most)


def time_ticks(stop: float) -> list[float]:
    """Choose round numbers of seconds, minutes, hours or days up to `stop`."""
    hour, day = 3600, 86400
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, hour, 2 * hour, 4 * hour, 12 * hour, day, 2 * day)
    step = next((step for step in steps if stop <= 4 * step), 2 * day * math.ceil(stop / (8 * day)))
    return [n * step for n in range(math.floor(stop / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Choose powers of ten, with 2 and 5 times these where few fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [10.0**p * f for p in powers for f in factors if low * 0.999 <= 10.0**p * f <= high * 1.001]


def axis_of(values: Sequence[float], start: float, stop: float, log: bool, zero: bool = False) -> Axis:
    """Fit an axis around the values, with a margin."""
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.3, high * 1.3, start, stop, True)
    low = min(low, 0.0) if zero else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low if zero and low == 0.0 else low - room, high + room, start, stop)


# ---- lines -------------------------------------------------------------------------------------------------


def line_chart(plot: Plot) -> Element:
    """Draw curves over rounds or steps."""
    drawn = [replace(s, points=downsample(s.points)) for s in plot.series if s.points]
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    x = Axis(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDTH - RIGHT)
    y = axis_of(ys, HEIGHT - BOTTOM, TOP, plot.log, plot.zero)
    above = 20.0 * ((len(drawn) - 1) // IN_A_ROW)  # pixels for more rows of the legend
    made = canvas(plot.name, plot.title, plot.said, HEIGHT, above)
    for tick in y.ticks():
        at = y(tick)
        made.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        made.append(el("text", plot.text(tick), x=LEFT - 6, y=at + 5, class_="end"))
    for tick in (tick for tick in x.ticks() if tick == round(tick)):
        made.append(x_label(f"{tick:,.0f}", x(tick), HEIGHT - BOTTOM + 17))
    made.append(el("text", plot.x_name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="middle"))
    for one in drawn:
        made.append(curve(one, x, y))
    made.append(legend(drawn, above))
    made.append(tooltips(drawn, x, plot))
    return made


def x_label(text: str, x: float, y: float) -> Element:
    """Place a label under its tick, and further left where its end would be cut off."""
    return el("text", text, x=min(x, WIDTH - len(text) * CHARACTER / 2), y=y, class_="middle")


def curve(one: Series, x: Axis, y: Axis) -> Element:
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in one.points)
    group = el("g", el("polyline", points=path), class_=f"series {one.look}")
    if one.look == "b" or len(one.points) == 1:
        group.extend(mark(x(a), y(b)) for a, b in one.points[:: -(-len(one.points) // MARKS)])
    return group


def mark(x: float, y: float) -> Element:
    return el("path", d=f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4-4z")  # a diamond


def legend(drawn: Sequence[Series], above: float) -> Element:
    """Draw the name of each series above the plot, beside a piece of its line."""
    made, at = el("g", class_="legend"), 6.0
    most = int(((WIDTH - 6) / min(IN_A_ROW, max(len(drawn), 1)) - 54) / 8)  # characters of a name
    for number, one in enumerate(drawn):
        y = 14 - above + 20 * (number // IN_A_ROW)
        at = at if number % IN_A_ROW else 6.0
        line = el(
            "g", el("polyline", points=f"{at:.0f},{y:.0f} {at + 26:.0f},{y:.0f}"), class_=f"series {one.look}"
        )
        if one.look == "b":
            line.append(mark(at + 13, y))
        made.append(line)
        name = shorten(one.name, most)
        made.append(el("text", el("title", one.name), name, x=at + 32, y=y + 5.0))
        at += 32 + 8.0 * len(name) + 22
    return made


def tooltips(drawn: Sequence[Series], x: Axis, plot: Plot) -> Element:
    """Cover the plot with invisible strips whose titles show the values under the mouse."""
    said: dict[float, list[str]] = {}
    for one in drawn:
        for at, value in one.points:
            said.setdefault(at, []).append(f"{one.name} {plot.text(value)}")
    places = sorted(said)
    edges = [x.start, *((x(a) + x(b)) / 2 for a, b in pairwise(places)), x.stop]
    made = el("g", class_="hints")
    for place, (left, right) in zip(places, pairwise(edges), strict=True):
        words = f"{plot.x_name} {place:,.0f}: {', '.join(said[place])}"
        size = {"width": max(right - left, 0.5), "height": HEIGHT - TOP - BOTTOM}
        made.append(el("rect", el("title", words), x=left, y=TOP, **size))
    return made


# ---- rows --------------------------------------------------------------------------------------------------


def row_chart(name: str, title: str, said: str, drawn: Sequence[Row], timed: bool = False) -> Element:
    """Draw a row for each peer: its presence over time (`timed`, in seconds), or its share of the work."""
    shown = drawn[:ROWS]
    stop = max((bar.stop for row in drawn for bar in row.bars), default=1.0)
    x = Axis(0.0, stop or 1.0, NAME, WIDTH - RIGHT - (0 if timed else 50))
    key = row_legend(shown)
    top = 24.0 if key is not None else 6.0
    bottom = top + ROW * (len(shown) + (len(drawn) > ROWS))
    made = canvas(name, title, said, bottom + (44 if timed else 6))
    if key is not None:
        made.append(key)
    for tick in time_ticks(x.high) if timed else []:
        made.append(el("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom, class_="grid"))
        made.append(x_label(clock(tick), x(tick), bottom + 17))
    if timed:
        made.append(el("text", "since the start", x=(NAME + WIDTH) / 2, y=bottom + 37, class_="middle"))
    for number, row in enumerate(shown):
        made.append(one_row(row, x, top + ROW * number))
    if len(drawn) > ROWS:
        made.append(el("text", f"and {len(drawn) - ROWS:,} more", x=6.0, y=bottom - 8))
    return made


def row_legend(drawn: Sequence[Row]) -> Element | None:
    """Explain crosses and pale bars, where a chart has any."""
    made, at = el("g", class_="legend"), NAME
    if any(bar.pale for row in drawn for bar in row.bars):
        made.append(el("rect", x=at, y=5.0, width=16, height=12, class_="bar pale"))
        made.append(el("text", "fetching the model", x=at + 22, y=16.0))
        at += 200
    if any(row.marks for row in drawn):
        made.append(cross(at + 6, 11, LEFT_OUT))
        made.append(el("text", LEFT_OUT, x=at + 16, y=16.0))
    return made if len(made) else None


def one_row(row: Row, x: Axis, top: float) -> Element:
    group = el("g", el("text", el("title", row.name), shorten(row.name), x=6.0, y=top + 17))
    for bar in row.bars:
        wide = max(x(bar.stop) - x(bar.start), 2.0)
        look = "bar pale" if bar.pale else "bar"
        place = {"x": x(bar.start), "y": top + 5, "width": wide, "height": ROW - 10}
        group.append(el("rect", el("title", bar.title), class_=look, **place))
    group.extend(cross(x(bar.start), top + ROW / 2, bar.title) for bar in row.marks)
    if row.text:
        group.append(el("text", row.text, x=x(row.bars[-1].stop) + 6, y=top + 17))
    return group


def cross(x: float, y: float, title: str) -> Element:
    return el("path", el("title", title), d=f"M{x - 4:.1f} {y - 5:.1f}l8 10m0-10l-8 10", class_="cross")


def shorten(name: str, most: int = 14) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def canvas(name: str, title: str, said: str, height: float, above: float = 0.0) -> Element:
    """Create an empty SVG element with title and description, with room `above` y = 0."""
    return el(
        "svg",
        el("title", title, id=f"{name}-title"),
        el("desc", said, id=f"{name}-desc"),
        viewBox=f"0 {0 - above:.0f} {WIDTH:.0f} {height + above:.0f}",
        role="img",
        class_="chart",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def clock(seconds: float) -> str:
    """Format a place on a time axis: `1:30` (minutes), `2:05 h`, `3 d 4 h`."""
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{left:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24} h"
