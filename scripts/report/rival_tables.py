"""The tables and plots of RESULTS.md beside rivals, and the three of the README, from rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.algorithm import compressor_of, cost_of
from scripts import ROOT
from scripts.comparison import work
from scripts.comparison.links import SPEEDS
from scripts.comparison.systems import SYSTEMS
from scripts.report.markdown import NOTHING, dates, section, table
from scripts.report.plot import svg
from scripts.report.rows import Row, read
from scripts.study import cells, plan, tables
from scripts.study.cells import Found
from scripts.study.language_plan import LANGUAGE, language
from scripts.study.train import Setting, Size

QUALITY = ROOT / "recipes" / "quality.jsonl"
LOCAL = (50, 500)  # steps between DiLoCo's exchanges, a row each
BUSY = 0.95  # share of the cores from which on a figure may be the machine's
BySpeed = Mapping[str, Mapping[str, float]]  # system -> speed -> a figure


def by_speed(head: str, figures: BySpeed, speeds: Sequence[str], shown: Callable[[float], str]) -> str:
    """Make a table of figures, a row for each system; a figure that is missing is an empty cell."""
    rows = [[name, *(shown(by[s]) if s in by else "" for s in speeds)] for name, by in figures.items() if by]
    return table([head, *speeds], rows)


def percent(share: float) -> str:
    """Format a share; small ones with more digits."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


# ---- wall clock --------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> dict[str, dict[str, float]]:
    """Find how many times its compute a step of four peers takes: system -> speed -> times. DiLoCo's local
    steps are compute alone."""
    found: dict[str, dict[str, float]] = {}
    for row in read(folder / "links.jsonl"):
        if "exchange_s" not in row:
            found.setdefault(row["system"], {})[row["speed"]] = row["step_s"] / row["compute_s"]
            continue
        for local in LOCAL:
            times = 1 + row["exchange_s"] / local / row["compute_s"]
            found.setdefault(f"{row['system']}, H={local}", {})[row["speed"]] = times
    order = [name for system in SYSTEMS for name in (system, *(f"{system}, H={n}" for n in LOCAL))]
    return {name: found[name] for name in order if name in found}


def links(folder: Path) -> str:
    steps, rows = steps_of(folder), read(folder / "links.jsonl")
    if not steps:
        return NOTHING
    ideal = work.GPTJ_TOKENS / work.GPTJ_S
    speeds = [speed for speed in SPEEDS if any(speed in by for by in steps.values())]
    sent, rivals = dict[str, dict[str, float]](), list[str]()
    for row in (row for row in rows if row["sent"]):
        share = row["sent"] / (2 * row["parameters"])
        if row["system"].startswith("cocktail"):
            sent.setdefault(row["system"], {})[row["speed"]] = share
        elif row["speed"] == "100":  # at each speed about the same
            rivals.append(f"{row['system']} {share:.3g}")
    at = ("20", "100", "500", "1000")
    plotted = {name: [(float(s), 1 / by[s]) for s in at if s in by] for name, by in steps.items()}
    title = "Share of the time that devices compute"
    (folder / "links.svg").write_text(svg(title, "Mbit/s, each way", plotted, (0.0, 1.0), True))
    return section(
        "links",
        dates=dates(rows),
        seconds=work.GPTJ_S,
        line=100 * work.MBIT,
        rtt=work.RTT,
        ideal=ideal,
        computing=by_speed("computing at Mbit/s", steps, speeds, lambda times: percent(1 / times)),
        sent=by_speed(
            "sent", {n: sent[n] for n in SYSTEMS if n in sent}, speeds, lambda share: f"{share:.4f}"
        ),
        rivals=", ".join(rivals),
        busy="; ".join(f"{row['system']} at {row['speed']}" for row in rows if row["busy"] >= BUSY),
    )


# ---- loss --------------------------------------------------------------------------------------------------

TIMED_AT = ("1000", "500", "100", "20")
# the timed runs of cocktail with as many rounds in flight
IN_FLIGHT = {1: ("cocktail",), 2: ("cocktail-thin",)}
SAME = 2e-3  # half of all-reduce's best rate
HELD_OUT = (f"held-out loss over all-reduce, at the same rate, {SAME:g}", "each at its best rate")
ENOUGH = 0.9  # of a cell's bytes that went over a timed line: then its step takes no longer there


BY_HALF = """: packets of p=.38 K=.047, 1 bit (`cocktail-wide`). One half of the held-out text chooses
the rate; losses are of the other half, so they compare within this table only.

"""
MILLION = "The same with a million parameters, 400 steps.\n\n"


def loss(folder: Path) -> str:
    found, rivals = quality(folder), rival_losses(folder, quality(folder))
    longer = tables.markdown(cells.read(QUALITY, Size(steps=3200)), plan.LONGER)
    compared, larger = (
        tables.optimizers(cells.read(folder / "optimizers.jsonl", size)) for size in (Size(), plan.MILLION)
    )
    study = [*(tables.markdown(found, one) for one in plan.TABLES), longer]
    same = [tables.same_rate(quality(folder, one.size), one) for one in plan.SAME_RATE]
    head = ["rival", "less than FP16", "learning rate", "held-out loss, by seed", "over all-reduce"]
    return section(
        "loss",
        study="\n".join(part for part in study if part),
        same="\n".join(part for part in same if part),
        language=language_models(folder),
        optimizers=f"**optimizers**{BY_HALF}{compared}\n{MILLION}{larger}" if compared else "",
        rivals=f"**rivals**\n\n{table(head, rivals)}" if rivals else "",
        steps=Size().steps,
        timed=table(["way", "held-out loss", *(f"h at {s} Mbit/s" for s in TIMED_AT)], timed(folder, found)),
    )


def language_models(folder: Path) -> str:
    """Format the README's ways on a language model, a table for each model and text."""
    file, end = folder / "quality.jsonl", LANGUAGE.name
    names = dict.fromkeys(row["size"] for row in read(file) if row["size"].endswith(end))
    made = {name: replace(LANGUAGE, text=name.removesuffix(end)) for name in names}.items()
    both = ((name, cells.read(file, size), cells.read(file, size, cut=True)) for name, size in made)
    return "\n".join(f"**{name}**\n\n{language(found, cut)}" for name, found, cut in both)


def rival_losses(folder: Path, found: Found) -> list[list[str]]:
    """Make the rivals' rows, each at the rate that was best with the first seed."""
    dense = tables.losses_of(tables.at_best_rate(found, plan.REFERENCE))
    ways = [
        (name, one[0]["ratio"], one[0]["rate"], {r["seed"]: r["loss"] for r in one})
        for name, one in powersgd(folder).items()
    ]
    for diloco in plan.RIVALS:
        if losses := tables.losses_of(tables.at_best_rate(found, diloco)):
            rate = plan.best_rate(found, diloco)
            ways.append((diloco.name, max(ratios_of(found, diloco.setting)), rate, losses))
    rows = []
    for name, ratio, rate, losses in ways if dense else []:
        each = ", ".join(f"{loss:.4f}" for loss in losses.values())
        rows.append([name, f"{ratio:.0f}x", f"{rate:g}", each, tables.above(losses, dense)])
    return rows


def powersgd(folder: Path) -> dict[str, list[Row]]:
    """Find its rows by seed, by name, at the rate that was best with the first seed."""
    ways = dict[str, list[Row]]()
    for row in sorted(read(folder / "powersgd.jsonl"), key=lambda row: (row["optim"], row["rank"])):
        if row["size"] == Size().name:
            with_muon = ", with Muon" if row["optim"] == "muon" else ""
            ways.setdefault(f"PowerSGD, rank {row['rank']}{with_muon}", []).append(row)
    for name, tried in ways.items():
        best = min((row for row in tried if row["seed"] == plan.SEEDS[0]), key=lambda row: float(row["loss"]))
        at_best = (row for row in tried if row["rate"] == best["rate"])
        ways[name] = sorted(at_best, key=lambda row: int(row["seed"]))
    return ways


def quality(folder: Path, size: Size | None = None) -> Found:
    """Read all cells of a size, those of rivals too."""
    size = size or Size()
    return cells.read(QUALITY, size) | cells.read(folder / "quality.jsonl", size)


@dataclass(frozen=True)
class Timed:
    """A way of the study, and its end: how long a step takes, by speed, in those of its compute."""

    name: str
    loss: float
    steps: dict[str, float]
    curve: tuple[float, ...] = ()  # held-out losses on a quarter of the text, at even distances

    def hours(self, speed: str) -> float:
        return self.steps[speed] * work.GPTJ_S * Size().steps / 3600


def timed_ways(folder: Path, found: Found) -> list[Timed]:
    """Find the ways with the first seed, at the best rate."""
    steps, ways = steps_of(folder), list[Timed]()

    def add(name: str, setting: Setting, by: dict[str, float]) -> None:
        ends = [o for c, o in found.items() if c.setting == setting and c.seed == plan.SEEDS[0]]
        if ends and by:
            best = min(ends, key=lambda outcome: outcome.loss)
            ways.append(Timed(name, best.loss, by, tuple(best.curve)))

    for row in (*plan.METHODS, *plan.THIN_LINES):
        if row.setting.peers and row.setting.staleness and not row.setting.own_noise:  # as it is now
            by, ratios = affordable(folder, row.setting), ratios_of(found, row.setting)
            add(f"cocktail, {max(ratios, default=0):.0f}x less", row.setting, by)
    for system in ("torch DDP FP16", "torch DDP FP32", "hivemind FP16"):
        add(f"{system}: all-reduce", plan.REFERENCE.setting, steps.get(system, {}))
    add("DiLoCo FP16, H=50", plan.DILOCO, steps.get("DiLoCo FP16, H=50", {}))
    for name, (first, *_) in powersgd(folder).items():
        ways.append(Timed(name, first["loss"], steps.get("torch DDP PowerSGD", {})))
    return ways


def affordable(folder: Path, setting: Setting) -> dict[str, float]:
    """Find cocktail's steps at the speeds at which it sent about what this setting sends, or more.

    What the cell sent itself is no measure: a fifth of its packets are headers, as its model is small.
    """
    systems, steps = IN_FLIGHT.get(setting.staleness, ()), steps_of(folder)
    bits = cost_of(compressor_of(setting.compression)) / setting.local_steps  # a parameter
    found = dict[str, float]()
    for row in read(folder / "links.jsonl"):
        speed, system = row["speed"], row["system"]
        if system in systems and row["sent"] / row["parameters"] >= ENOUGH * bits / 8:
            found[speed] = min(found.get(speed, math.inf), steps[system][speed])
    return found


def ratios_of(found: Found, setting: Setting) -> list[float]:
    """Find how many times fewer bytes than FP16 each of its cells sent."""
    return [outcome.ratio for cell, outcome in found.items() if cell.setting == setting]


def timed(folder: Path, found: Found) -> list[list[str]]:
    ways = timed_ways(folder, found)
    at = "100"
    curves = {
        way.name: [(way.hours(at) * (i + 1) / len(way.curve), loss) for i, loss in enumerate(way.curve)]
        for way in ways
        if at in way.steps and way.curve
    }
    if curves:
        losses = [loss for points in curves.values() for _, loss in points]
        up = min(losses) - 0.02, max(losses) + 0.02
        title = "Held-out loss (a quarter of the text) against time at 100 Mbit/s"
        (folder / "loss.svg").write_text(svg(title, "hours of GPT-J's steps", curves, up))
    return [
        [way.name, f"{way.loss:.4f}", *(f"{way.hours(s):,.1f}" if s in way.steps else "" for s in TIMED_AT)]
        for way in ways
    ]


# ---- faults ------------------------------------------------------------------------------------------------

FAULTS = {
    "none": "nothing",
    "kill": "killed in a round",
    "dark": "its line dark for 5 s",
    "stop": "stopped for 60 s",
    "late": "a fifth comes",
}


def faults(folder: Path) -> str:
    rows = read(folder / "faults.jsonl")
    if not rows:
        return NOTHING
    order, systems = list(FAULTS), list(SYSTEMS)
    body = [
        [FAULTS[r["fault"]], r["system"], stalled(r), peers_apart(r), lost(r), back(r), f"{r['usual']:.1f}"]
        for r in sorted(rows, key=lambda r: (order.index(r["fault"]), systems.index(r["system"])))
        if r["fault"] != "none"
    ]
    head = [
        "fault of one peer of four",
        "system",
        "seconds lost",
        "peers apart",
        "samples lost",
        "back after, s",
        "ordinary step, s",
    ]
    return section("faults", dates=dates(rows), table=table(head, body))


def stalled(row: Row) -> str:
    if row["over"]:
        return "the run ends for all"
    return f"{row['stalled']:.1f}" + ("" if row["steps"] else ", and still no step")


def peers_apart(row: Row) -> str:
    if row["apart"] is None:
        return ""
    far = f" (by up to {row['furthest']:.0%})" if row["apart"] and row["furthest"] else ""
    return f"{row['apart']}{far}"


def lost(row: Row) -> str:
    stuck = not row["over"] and not row["steps"]
    return "not told" if stuck or row["lost"] is None else str(row["lost"])


def back(row: Row) -> str:
    """Say how long after the fault, or after its start, the peer was in a round."""
    if row["fault"] == "late" and row.get("joined") is None:
        return "never"
    seconds = row.get("joined") if row["fault"] == "late" else row.get("back")
    return "" if seconds is None else f"{seconds:.1f}"


# ---- the README's ------------------------------------------------------------------------------------------


def newcomer(folder: Path) -> str:
    """Make the README's tables: time that GPUs compute, what a fault costs, what the model loses."""
    steps, rows, found = steps_of(folder), read(folder / "faults.jsonl"), quality(folder)
    for name in ("torch DDP FP32", "torchft DDP FP32", "torchft DiLoCo FP32, H=50", "hivemind FP16"):
        steps.pop(name, None)  # each does better in another way
    speeds, kinds = ("1000", "500", "100", "20"), [fault for fault in FAULTS if fault != "none"]
    steps = {n: by for n, by in steps.items() if by.keys() >= set(speeds)}
    each = {name: {r["fault"]: in_short(r) for r in rows if r["system"] == name} for name in SYSTEMS}
    ruined = [[name, *(by.get(fault, "") for fault in kinds)] for name, by in each.items() if by]
    return "\n".join(
        [
            "**How much of the time do GPUs compute?** (`scripts/rivals links`; Mbit/s; GPT-J-6B ratios)\n",
            by_speed("", steps, speeds, lambda times: percent(1 / times)),
            "**What if one of four drops out?** (`scripts/rivals faults`; seconds lost, peers apart after)\n",
            table(["", *(FAULTS[fault] for fault in kinds)], ruined),
            "**What does the model lose?** (`scripts/bench_quality --row TEXT`; 1,600 steps, four peers, "
            ".13 M parameters)\n",
            table(["", "less than FP16", *HELD_OUT], losses_in_short(folder, found)),
        ]
    )


def losses_in_short(folder: Path, found: Found) -> list[list[str]]:
    """Make the README's rows on loss: presets and settings that a recipe names, then the rivals."""
    four_peers, rows = plan.TABLES[0], []
    dense = tables.losses_of(tables.at_best_rate(found, plan.REFERENCE))
    for row in (*four_peers.rows, *(row for row in plan.THIN_LINES if "(`" in row.name)):
        ends = tables.at_best_rate(found, row, four_peers.seeds)
        over = tables.above(tables.losses_of(ends), dense)
        as_now = not row.setting.own_noise or row.setting == plan.COCKTAIL  # which is the paper's
        if as_now and over:
            same = tables.over_at(found, row.setting, plan.REFERENCE.setting, SAME)
            rows.append([row.name, f"{ends[plan.SEEDS[0]].ratio:.0f}x", same, over])
    rivals = rival_losses(folder, found)
    return rows + [
        [name, ratio, "", over]
        for name, ratio, _, each, over in rivals
        if each.count(",") + 1 == len(plan.SEEDS)
    ]


def in_short(row: Row) -> str:
    if row["fault"] == "late":
        joined = row.get("joined")
        return "never in" if joined is None else f"in after {joined:.0f} s"
    if row["over"] or not row["steps"]:
        return "the run ends" if row["over"] else "no step any more"
    return f"{row['stalled']:.1f} s, {row['apart'] if row['apart'] is not None else '?'} apart"
