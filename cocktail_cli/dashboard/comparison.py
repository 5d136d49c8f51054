"""Several runs on one page: curves in one chart, figures side by side, and the recipe keys that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from cocktail_cli.errors import Failure
from cocktail_cli.ui import duration_text, megabytes, short

from .charts import LOOKS, Plot, Point, Series
from .markup import el
from .report_page import (
    Page,
    curves,
    duration,
    participants,
    ratio_of,
    scrollable,
    section,
    short_count,
    table,
)
from .run_history import RunHistory

MOST = len(LOOKS)  # runs on one page
UNITS = (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3))  # decimal, as links are sold, with the power of ten
UNSET = "-"


def check_comparable(names: Sequence[str]) -> None:
    """Raises Failure (usage): too many runs, or one of them twice."""
    if len(names) > MOST:
        raise Failure("usage", f"{len(names)} runs, where at most {MOST} can be compared")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Failure("usage", f"{twice} cannot be compared with itself", hints=("cocktail runs lists all",))


def compared(runs: Sequence[RunHistory]) -> Page:
    """Render two to MOST runs beside each other."""
    names, loss = " and ".join(c.about.run for c in runs), "{:.4g}".format
    unit, size = unit_of(max(sum(r.up + r.down for r in c.rounds) for c in runs))
    bytes_name = f"{unit} exchanged by all peers"
    plots = [
        ("loss", "Loss", "step", [c.losses for c in runs], loss),
        ("held", "Held-out loss", "step", [evaluations(c) for c in runs], loss),
        ("bytes", "Loss by bytes", bytes_name, [losses_by_bytes(c, size) for c in runs], loss),
        ("speed", "Tokens a second", "step", [c.speeds for c in runs], short_count),
    ]
    made = []
    for name, title, x_name, points, text in plots:
        if any(points):
            looks = zip(runs, points, LOOKS, strict=False)
            series = [Series(c.about.run, found, look) for c, found, look in looks]
            said = "; ".join(f"{one.name}: {text(one.points[-1][1])}" for one in series if one.points)
            plot = Plot(f"{name}-curve", f"{title}, by {x_name}", f"At last {said}.", series, x_name, text)
            made.append(section(name, title, curves(plot)))
    figures = table("How they ended, or are now", *figure_table(runs))
    made.append(section("figures", "Figures", scrollable(figures, "figures")))
    made.append(section("recipe", "Recipes", *differences(runs)))
    return Page(names, f"{names}, compared", "cocktail · compared", made)


def evaluations(c: RunHistory) -> list[Point]:
    return [(float(e.step), e.loss) for e in c.evaluations]


def losses_by_bytes(c: RunHistory, size: int) -> list[Point]:
    """Return the loss in training over the bytes exchanged until then, in units of `size`."""
    made, exchanged = list[Point](), 0
    for r in c.rounds:
        exchanged += r.up + r.down
        if r.loss is not None and exchanged:
            made.append((exchanged / size, r.loss))
    return made


def unit_of(most: int) -> tuple[str, int]:
    """Choose the unit in which `most` bytes have three digits or more, and its bytes."""
    return next(((unit, 10**power) for unit, power in UNITS if most >= 10 ** (power + 2)), ("bytes", 1))


def figure_table(runs: Sequence[RunHistory]) -> tuple[list[str], list[list[str]]]:
    """Build head and rows of the table of figures: a row a figure, a column a run."""
    rows = {
        "state": [c.state for c in runs],
        "step": [f"{c.step:,} of {c.steps:,}" for c in runs],
        "loss": [f"{c.losses[-1][1]:.4f}" if c.losses else UNSET for c in runs],
        "held-out loss": [f"{c.evaluations[-1].loss:.4f}" if c.evaluations else UNSET for c in runs],
        "best": [f"{c.best.loss:.4f} at step {c.best.step:,}" if c.best else UNSET for c in runs],
        "tokens": [short(sum(r.tokens for r in c.rounds)) for c in runs],
        "tokens a second, of late": [short(c.recent_speed) if c.speeds else UNSET for c in runs],
        "peers": [f"{len(participants(c)):,}" for c in runs],
        "sent by peers": [megabytes(sum(r.up for r in c.rounds)) for c in runs],
        "below FP16": [f"{ratio:,.0f}x" if (ratio := ratio_of(c)) else UNSET for c in runs],
        "took": [duration_text(duration(c)) for c in runs],
    }
    return ["", *(c.about.run for c in runs)], [[name, *cells] for name, cells in rows.items()]


def recipe_differences(runs: Sequence[RunHistory]) -> list[list[str]]:
    """List the recipe keys that differ, each with its value in every run; base and data by their hashes."""
    found = [keys_of(c) for c in runs]
    names = dict.fromkeys(name for keys in found for name in keys)
    rows = [[name, *(keys.get(name, UNSET) for keys in found)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def keys_of(c: RunHistory) -> dict[str, str]:
    """Flatten a recipe to dotted keys."""
    import yaml

    keys = dict(flattened("", yaml.safe_load(c.about.recipe_text) or {}))
    hashes = {
        "sha256 of the base model": c.about.base_sha256,
        "sha256 of the data, and how much is trained": c.about.data_sha256,
    }
    return keys | {name: value[:16] for name, value in hashes.items() if value}


def flattened(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flattened(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, inner in enumerate(value):
            yield from flattened(f"{path}.{number}", inner)
    else:
        yield path, str(value)


def differences(runs: Sequence[RunHistory]) -> Iterator[Element]:
    if not all(c.about.recipe_text for c in runs):
        yield el("p", "Not every recipe is known here.")
        return
    rows = recipe_differences(runs)
    if not rows:
        yield el("p", "The recipes, the base models and the data are the same.")
        return
    head = ["key", *(c.about.run for c in runs)]
    yield scrollable(table("Keys that differ; all others are the same", head, rows), "keys that differ")
