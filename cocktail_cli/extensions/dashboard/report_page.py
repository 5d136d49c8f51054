"""The content of dashboard and report as a document of JSON, which page/page.js draws.

A pure function of a `RunHistory`: two documents of an unchanged run are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line, paragraphs, readable
from cocktail_cli.ui import counted, duration_text, megabytes, rung_text, short, time_left_text, timestamp

from .run_history import Contribution, Point, Presence, Round, RunHistory, flattened

PEERS = 200  # peers in a table by name
CROSSES = 200  # crosses for one peer: rounds without it
ROWS = 24  # peers with a row of bars; the others are counted
RUNS = 4  # on one page; page.js has as many looks of a curve
MOST = 120  # points of a curve; more are averaged
WIDE = 10  # an axis is logarithmic where a value is this many times the median
UNSET = "-"

STATES = {
    "running": "is running",
    "waiting": "waits for peers",
    "finished": "is finished",
    "stopped": "was stopped by its host before all steps were done",
    "paused": "is paused by its host, and may go on",
    "failed": "ended without a result",
    "unreachable": "cannot be reached any more",
    "died": "has stopped: its hub is gone, and may be started again",
}

Bar = dict[str, Any]
Kind = Literal["p", "ending", "code", "figures", "table", "sample", "bars", "chart"]  # see DRAW of page.js
Block = tuple[Kind, Any]  # "p" is a sentence with `code`
Document = dict[str, Any]


def page_of_one(c: RunHistory) -> Document:
    """Describe one run: figures, curves, and what is said in words behind them."""

    def over(x: str, title: str, curves: Mapping[str, Callable[[Round], float | None]]) -> list[Block]:
        seen = {name: [(getattr(r, x), of(r)) for r in c.rounds] for name, of in curves.items()}
        points = {name: [(at, y) for at, y in values if y is not None] for name, values in seen.items()}
        return chart(title, points, x)

    sub = f"cocktail · recipe {c.about.recipe}" if c.about.recipe else "cocktail"
    versions = ", ".join(f"{name} {found}" for name, found in c.about.versions.items())
    up_down = {
        "bytes sent by a peer": lambda r: r.up / len(r.members) if r.up else None,
        "bytes received": lambda r: r.down / len(r.members) if r.down else None,
    }

    sections: dict[str, Sequence[Any]] = {
        "Summary": [*ending(c), ("figures", figures(c))],
        "Loss": chart("Loss", {"training": c.losses, "held-out": c.evaluations}, zero=False),
        "Speed": chart("Tokens a second", {"trained tokens a second": c.speeds}),
        "Learning rate": over("step", "Learning rate", {"learning rate": lambda r: r.lr}),
        "Gradient norm": over("step", "Gradient norm", {"before clipping": lambda r: r.grad_norm}),
        "Bytes": over("round", "Bytes of a peer", up_down),
        "Below FP16": over("round", "Times fewer bytes than FP16", {"times fewer bytes": lambda r: r.ratio}),
        "Waiting": over(
            "round", "Share of a step spent waiting", {"share of a step": lambda r: idle_of([r])}
        ),
        **{
            title: [made for kind, given in blocks for made in drawn(kind, given)]
            for part in c.of_extensions
            for title, blocks in part.sections.items()
        },
        "Peers": timeline(c),
        "In words": [("p", line) for line in words(c)],
        "Contributors": contributors(c),
        "Recipe": recipe(c),
        "How to do it again": [("p", step) for step in steps(c)],
        "Versions": [("p", versions)] if versions else [],
    }
    return document(c.about.run, headline(c), sub, sections)


def document(title: str, headline: str, sub: str, sections: Mapping[str, Sequence[Block]]) -> Document:
    """Describe a page: its heading, the window's title, a line under the heading, sections."""
    found = [{"title": name, "blocks": blocks} for name, blocks in sections.items() if blocks]
    return readable({"title": title, "headline": headline, "sub": sub, "sections": found}, paragraphs)


# ---- in words ----------------------------------------------------------------------------------------------


def headline(c: RunHistory) -> str:
    """Summarize the run in one line; a screen reader announces it when it changes."""
    return f"{c.about.run} {STATES.get(c.state, c.state)}, step {c.step:,} of {c.steps:,}"


def words(c: RunHistory) -> Iterator[str]:
    """Describe the run in sentences."""
    about, losses = c.about, c.losses
    if about.model:
        size = f" ({about.parameters:,} trained parameters)" if about.parameters else ""
        data = ", ".join(about.data)
        yield f"{about.method} of {about.model}{size} on {data}, by the recipe {about.recipe}."
    took = f" in {duration_text(duration(c))}" if c.rounds else ""
    ended = f": {c.reason}" if c.reason else ""
    rounds = counted(c.rounds[-1].round + 1 if c.rounds else 0, "round")
    yield f"{headline(c)}: {rounds}{took}{ended}."
    if losses:
        held = f"; on held-out data {trend(c.evaluations, '.4f')}" if c.evaluations else ""
        best = f", best {best_of(c, 'step ')}" if len(c.evaluations) > 1 else ""
        yield f"The loss in training {trend(losses, '.4f')}{held}{best} (nats a {about.term})."
    if c.need:
        yield f"Rounds have {rung_text(c.rung, c.need)}."
    if up := sum(r.up for r in c.rounds):
        down, times = sum(r.down for r in c.rounds), ratio_of(c)
        below = f", {times:,.0f} times less than all parameters in FP16" if times else ""
        yield f"In the rounds the peers sent {megabytes(up)} and received {megabytes(down)}{below}."
    if fetched := sum(one.fetched_bytes for one in c.contributions):
        yield f"To join they fetched another {megabytes(fetched)}: the model, and the packets they lacked."
    if (share := idle_of(c.rounds)) is not None:
        yield f"Their devices waited {share:.1%} of their time for an exchange."
    if did := participants(c):
        missed, packets = sum(one.left_out for one in did), sum(one.rounds + one.left_out for one in did)
        late = f"; {missed:,} of {packets:,} packets were late or refused" if missed else ""
        are = "is" if len(c.present) == 1 else "are"
        yield f"{counted(len(did), 'peer')} took part, {len(c.present)} {are} there now{late}."
    yield from (line for part in c.of_extensions for line in part.words)
    if c.note:
        yield c.note
    if c.seen:
        yield f"Newest entry: {utc(c.seen)}."


def steps(c: RunHistory) -> list[str]:
    """List the commands that repeat a run of this machine, and what makes it the same."""
    about, peers = c.about, max((len(r.members) for r in c.rounds), default=1)
    save = f"Save the recipe above as {about.recipe}.yaml; the host's data files are in it by their names."
    found = [
        *([save] if about.recipe_text else []),
        f"`cocktail launch {about.recipe}.yaml --peers {peers}` (or fewer, and others join)",
        f"It is the same base model if the sha256 of its files is `{about.base_sha256}`",
        f"They are the same data if their sha256, tokenized, is `{about.data_sha256}`",
        "The same model to the bit is the base plus the packets in the run's ledger, at its host: "
        f"`cocktail export {about.run} -o DIR`. A second run differs by who takes part in which round, which "
        "machines and lines decide.",
    ]
    return [f"{number}. {step}" for number, step in enumerate(found, 1)] if about.base_sha256 else []


def ending(c: RunHistory) -> list[Block]:
    """Say above all figures why a run does not go on, unless it is finished."""
    why = f": {c.reason}" if c.reason else ""
    goes_on = c.state in ("running", "waiting", "finished")
    return [] if goes_on else [("ending", f"{headline(c)}{why}.")]


def participants(c: RunHistory) -> list[Contribution]:
    """Peers that took part in at least one round; excludes joiners and `cocktail doctor`."""
    return [one for one in c.contributions if one.rounds or one.left_out]


def trend(points: Sequence[Point], form: str) -> str:
    """Describe first and last value: `fell from 4.70 to 2.61`."""
    first, last = points[0][1], points[-1][1]
    if first == last:
        return f"is {last:{form}}"
    return f"{'fell' if last < first else 'rose'} from {first:{form}} to {last:{form}}"


def utc(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC)).replace("T", " ").replace("Z", " UTC")


# ---- figures -----------------------------------------------------------------------------------------------


# label on the page -> name in OpenMetrics, a counter's with `_total`; its words; its value of a run, if known
FIGURES: dict[str, tuple[str, Callable[[float], str], Callable[[RunHistory], float | None]]] = {
    "left": ("left_seconds", time_left_text, lambda c: time_left(c) if c.state == "running" else None),
    "loss": ("loss", "{:.4f}".format, lambda c: last(loss for _, loss in c.losses)),
    "held-out": ("held_out_loss", "{:.4f}".format, lambda c: last(loss for _, loss in c.evaluations)),
    "tokens/s": ("tokens_per_second", short, lambda c: c.recent_speed if c.speeds else None),
    "tokens": ("tokens_total", short, lambda c: sum(r.tokens for r in c.rounds) or None),
    "learning rate": ("learning_rate", "{:.2g}".format, lambda c: last(r.lr for r in c.rounds)),
    "gradient norm": ("gradient_norm", "{:.2f}".format, lambda c: last(r.grad_norm for r in c.rounds)),
    "peers now": ("peers", "{:,}".format, lambda c: len(c.present)),
    "peers in all": ("peers_in_all", "{:,}".format, lambda c: len(participants(c))),
    "sent by peers": ("sent_bytes_total", megabytes, lambda c: sum(r.up for r in c.rounds) or None),
    "below FP16": ("below_fp16", "{:,.0f}x".format, lambda c: ratio_of(c)),
    "idle": ("idle_ratio", "{:.1%}".format, lambda c: idle_of(c.rounds)),
}


def figures(c: RunHistory) -> dict[str, str]:
    """Format the key figures by name."""
    known = {label: (text, of(c)) for label, (_, text, of) in FIGURES.items()}
    return {
        "state": "no answer" if c.state == "unreachable" else c.state,
        "step": f"{c.step:,} / {c.steps:,}",
        **{label: UNSET if value is None else text(value) for label, (text, value) in known.items()},
        "best": best_of(c),
        **{name: figure for part in c.of_extensions for name, figure in part.figures.items()},
        "took": duration_text(duration(c)),
    }


def best_of(c: RunHistory, unit: str = "") -> str:
    """Format the lowest held-out loss, with its step."""
    return f"{c.best[1]:.4f} at {unit}{c.best[0]:,}" if c.best else UNSET


def metrics_of(runs: Sequence[RunHistory]) -> str:
    """Write the figures of runs in the text format of OpenMetrics, those that are known."""
    lines = list[str]()
    found: dict[str, Callable[[RunHistory], float | None]] = {
        "step": lambda c: c.step,
        "steps": lambda c: c.steps,
        "running": lambda c: c.state == "running",
    }
    for name, of in (found | {name: of for name, _, of in FIGURES.values()}).items():
        family, kind = name.removesuffix("_total"), "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE cocktail_{family} {kind}")
        named = ((json.dumps(one_line(c.about.run), ensure_ascii=False), of(c)) for c in runs)
        lines += [f"cocktail_{name}{{run={run}}} {+value}" for run, value in named if value is not None]
    return "\n".join([*lines, "# EOF\n"])


def last(values: Iterable[float | None]) -> float | None:
    """Return the last value that is known."""
    return next((value for value in reversed([*values]) if value is not None), None)


def time_left(c: RunHistory) -> float | None:
    """Estimate the seconds left from the pace of the last twenty steps."""
    recent = c.rounds[-21:]
    steps = recent[-1].step - recent[0].step if recent else 0
    return (recent[-1].at - recent[0].at) / steps * (c.steps - c.step) if steps else None


def duration(c: RunHistory) -> float:
    return max(0.0, (c.seen or 0.0) - (c.started or 0.0)) if c.started else 0.0


def ratio_of(c: RunHistory) -> float | None:
    """Compute the compression ratio against FP16 over all rounds whose bytes are known."""
    known = [r for r in c.rounds if r.ratio]
    return sum(r.fp16 for r in known) / sum(r.up + r.down for r in known) if known else None


def idle_of(rounds: Sequence[Round] | Sequence[Contribution]) -> float | None:
    wait, compute = sum(r.wait_s for r in rounds), sum(r.compute_s for r in rounds)
    return wait / (wait + compute) if wait + compute else None


# ---- curves ------------------------------------------------------------------------------------------------


def chart(
    title: str, curves: Mapping[str, Sequence[Point]], x: str = "step", zero: bool = True
) -> list[Block]:
    """Describe the curves that have finite points: a column of x, then one for each of them.

    The y axis begins at 0 with `zero`, but is logarithmic where values lie far apart. So is that of x where
    the curves end far apart.
    """
    finite = {name: [one for one in points if isfinite(one[1])] for name, points in curves.items()}
    shown = {name: points for name, points in finite.items() if points}
    columns = [dict(downsample(points)) for points in shown.values()]
    xs = sorted({x for column in columns for x in column})
    ys = [y for column in columns for y in column.values()]
    ends = [max(column) for column in columns]
    made = {
        "title": f"{title} by {x}"
        + " (neighbours averaged)" * any(len(one) > MOST for one in shown.values()),
        "said": "; ".join(f"{name} {trend(points, '.4g')}" for name, points in shown.items()),
        "names": [x, *shown],
        "columns": [xs, *([column.get(x) for x in xs] for column in columns)],
        "zero": zero,
        "log": bool(ys) and min(ys) > 0 and max(ys) > WIDE * median(ys),
        "logX": bool(xs) and xs[0] > 0 and max(ends) > WIDE * min(ends),
    }
    return [("chart", made)] if shown else []


def drawn(kind: str, given: Any) -> list[Block]:
    """Describe a block of an extension, which leaves its "curves" to `chart`."""
    return chart(**given) if kind == "curves" else [(kind, given)]  # type: ignore[list-item]


def downsample(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Reduce to `most` points: neighbours are averaged at the x of their last, and the last point is kept."""
    if len(points) <= most:
        return list(points)
    many, last = len(points) - 1, most - 1
    groups = [points[many * i // last : many * (i + 1) // last] for i in range(last)]
    return [(group[-1][0], float(f"{fmean(y for _, y in group):.6g}")) for group in groups] + [points[-1]]


# ---- peers, recipe -----------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Block]:
    """Describe a table that has rows; its first column holds row headers."""
    return [("table", {"title": title, "head": head, "rows": rows})] if rows else []


def timeline(c: RunHistory) -> list[Block]:
    """Describe when each peer was present, with the rounds that went on without it."""
    start, bars = c.started or 0.0, dict[str, list[Bar]]()
    did = {one.peer for one in participants(c)}
    stays = [
        one for one in c.stays if one.peer in did or one.ready or not one.left
    ]  # others have only looked
    for stay in stays:
        bars.setdefault(stay.peer, []).extend(bars_of(stay, start, c.seen or 0.0))
    stop = max((bar["start"] + bar["wide"] for row in bars.values() for bar in row), default=0.0) or 1.0
    missed = [(peer, r) for r in c.rounds for peer in r.left_out if peer in bars]
    for peer, r in missed[-CROSSES:]:
        bars[peer].append(bar_of(r.at - start, 0.0, f"round {r.round} without it", "cross"))
    made = {
        "title": "Peers over time; pale while they fetch the model, a cross where one was late or refused",
        "said": f"{len(bars)} peers came, {len(c.present)} are there",
        "rows": dict([*bars.items()][:ROWS]),
        "left": max(0, len(bars) - ROWS),
        "stop": stop,
        "ticks": [time_left_text(stop * n / 4) for n in range(5)],
        "stays": [
            [one.peer, utc(one.joined), utc(one.left) if one.left else "", one.reason]
            for one in stays[: -PEERS - 1 : -1]
        ],
    }
    return [("bars", made)] if bars else []


def bars_of(stay: Presence, start: float, end: float) -> Iterator[Bar]:
    """Yield bars from joining to leaving; the bar is pale while the peer fetches the model."""
    gone = f"left {utc(stay.left)}: {stay.reason}" if stay.left else "still there"
    joined, ready, left = (max(0.0, (at or end) - start) for at in (stay.joined, stay.ready, stay.left))
    if stay.ready is not None:
        yield bar_of(joined, ready - joined, f"fetched the model until {utc(stay.ready)}", "pale")
        joined = ready
    yield bar_of(joined, max(0.0, left - joined), f"joined {utc(stay.joined)}, {gone}")


def bar_of(start: float, wide: float, title: str, look: str = "") -> Bar:
    """Describe a time of a peer in the run, or a round without it, in seconds since the start. `look`: its
    CSS class."""
    return {"start": start, "wide": wide, "title": title, "look": look}


def contributors(c: RunHistory) -> list[Block]:
    """Describe what each peer gave; a run whose ledger lies elsewhere has fewer columns."""
    columns: dict[str, Callable[[Contribution], str]] = {
        "peer": lambda one: one.peer,
        "hardware": lambda one: one.hardware,
        "share": lambda one: f"{one.part:.1%}",
        "samples": lambda one: f"{one.samples:,}",
        "rounds": lambda one: f"{one.rounds:,}",
        "left out": lambda one: f"{one.left_out:,}",
        "idle": lambda one: UNSET if (idle := idle_of([one])) is None else f"{idle:.1%}",
        "sent": lambda one: megabytes(one.up_bytes),
        "received": lambda one: megabytes(one.down_bytes),
    }
    did = participants(c)
    if not any(one.samples for one in did):
        del columns["samples"]
    rows = [[of(one) for of in columns.values()] for one in did[:PEERS]]
    more: list[Block] = [("p", f"and {len(did) - PEERS:,} more.")] if len(did) > PEERS else []
    return [*table("What each gave", [*columns], rows), *more]


def recipe(c: RunHistory) -> list[Block]:
    named = f"{c.about.recipe}.yaml; sha256 of the recipe in full: `{c.about.recipe_hash}`"
    return [("p", named), ("code", c.about.recipe_text)] if c.about.recipe_text else []


# ---- several runs ------------------------------------------------------------------------------------------


def check_comparable(names: Sequence[str]) -> None:
    """Raises Failure (usage): too many runs, or one of them twice."""
    if len(names) > RUNS:
        raise Failure("usage", f"{len(names)} runs, where at most {RUNS} can be compared")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Failure("usage", f"{twice} cannot be compared with itself", hints=("cocktail runs lists all",))


def page_of(runs: Sequence[RunHistory]) -> Document:
    """Describe one run, or two to RUNS beside each other."""
    if len(runs) == 1:
        return page_of_one(runs[0])
    names, different = [c.about.run for c in runs], differing_keys(runs)
    labels = labels_of(names, different)

    def curves(of: Callable[[RunHistory], Sequence[Point]]) -> dict[str, Sequence[Point]]:
        return dict(zip(labels, map(of, runs), strict=True))

    columns = [figures(c) for c in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    sections = {
        "Loss": chart("Loss", curves(lambda c: c.losses), zero=False),
        "Held-out loss": chart("Held-out loss", curves(lambda c: c.evaluations), zero=False),
        "Loss by bytes": chart("Loss", curves(losses_by_bytes), "bytes of all peers", zero=False),
        "Tokens a second": chart("Tokens a second", curves(lambda c: c.speeds)),
        "Figures": table("How they ended, or are now", ["", *labels], rows),
        "Recipes": table("Keys that differ; all others are the same", ["key", *names], different)
        or [("p", SAME if all(c.about.recipe_text for c in runs) else "Not every recipe is known here.")],
    }
    title = " and ".join(names)
    return document(title, f"{title}, compared", "cocktail · compared", sections)


def losses_by_bytes(c: RunHistory) -> list[Point]:
    """Return the loss in training over the bytes exchanged until then."""
    exchanged = accumulate(r.up + r.down for r in c.rounds)
    return [(at, r.loss) for at, r in zip(exchanged, c.rounds, strict=True) if at and r.loss is not None]


SAME = "The recipes, the base models and the data are the same."
NAMING = "compression.preset"  # the key that says most of a run


def differing_keys(runs: Sequence[RunHistory]) -> list[list[str]]:
    """List the recipe keys that differ, each with its values; base and data by their hashes."""
    if not all(c.about.recipe_text for c in runs):
        return []
    of_runs = [{**keys_of(c), **c.about.keys} for c in runs]
    names = dict.fromkeys(name for keys in of_runs for name in keys)
    rows = [[name, *(keys.get(name, UNSET) for keys in of_runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def labels_of(names: Sequence[str], different: Sequence[Sequence[str]]) -> list[str]:
    """Name runs by the key that tells most of them apart, if they differ in one: `diloco, calm-lynx-56`."""
    rows = [row for row in different if "." in row[0] and not row[0].startswith("checkpoint")]
    if not rows:
        return [*names]
    key, *values = max(rows, key=lambda row: (row[0] == NAMING, len(set(row[1:]))))
    what = "" if key == NAMING else key.rpartition(".")[2] + "="
    return [f"{what}{value}, {name}" for value, name in zip(values, names, strict=True)]


def keys_of(c: RunHistory) -> dict[str, str]:
    """Flatten the keys that a recipe sets to dotted ones."""
    import yaml

    keys = dict(flattened("", yaml.safe_load(c.about.recipe_text) or {}))
    hashes = {
        "sha256 of the base model": c.about.base_sha256,
        "sha256 of the data, and how much is trained": c.about.data_sha256,
    }
    return keys | {name: value[:16] for name, value in hashes.items() if value}
