"""The quality study's tables and plots, from its cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from scripts.study.cells import Cell, Found
from scripts.study.plan import OPTIMIZERS, REFERENCE, SEEDS, SWARMS, Row, Table, best_rate, chosen_rate
from scripts.study.train import Outcome, Setting, Size

TITLES = "way | less than FP16 | learning rate | held-out loss | over all-reduce | with all that was unsent"
HEAD = f"| {TITLES} |\n" + "|---" * 6 + "|\n"
PUBLISHED = {
    "dense": "no compression",
    "feedback": "error feedback",
    "dgc": "DGC",
    "onebit": "1-bit Adam",
    "econtrol": "EControl",
    "scafcom": "SCAFCOM",
}
BY_HALF = (
    "way | optimizer | less than FP16 | learning rate | held-out loss (seeds) | over its own | over AdamW's"
)
HEAD_BY_HALF = f"| {BY_HALF} |\n" + "|---" * 7 + "|"


def outcomes(found: Found, row: Row, seeds: Sequence[int]) -> list[Outcome]:
    """Find the outcomes that are there, at the row's rate, in the order of the seeds."""
    rate = best_rate(found, row)
    cells = [Cell(row.setting, rate, seed) for seed in seeds]
    return [found[cell] for cell in cells if cell in found]


def over(found: Found, row: Row, table: Table) -> tuple[float, float] | None:
    """Average over the seeds how much more the row's loss is than the reference's, as a share; and if all
    were sent."""
    ways = [(way.setting, best_rate(found, way)) for way in (row, table.reference)]
    pairs = [tuple(found.get(Cell(*way, seed)) for way in ways) for seed in table.seeds]
    there = [(one, reference) for one, reference in pairs if one and reference]
    if not there:
        return None
    return (
        mean(one.loss / reference.loss - 1 for one, reference in there),
        mean(one.mean / reference.loss - 1 for one, reference in there),
    )


def line(found: Found, row: Row, table: Table) -> str:
    ends = outcomes(found, row, table.seeds)
    if not ends:
        return ""
    losses = [end.loss for end in ends]
    each = f" ({', '.join(f'{loss:.4f}' for loss in losses)})" if len(losses) > 1 else ""
    gaps = over(found, row, table)
    more = f"{gaps[0]:+.2%} | {gaps[1]:+.2%}" if gaps else "|"
    ratio = f"{ends[0].ratio:.0f}x" if row.setting.peers else ""
    return f"| {row.name} | {ratio} | {best_rate(found, row):g} | {mean(losses):.4f}{each} | {more} |\n"


def markdown(found: Found, table: Table) -> str:
    """Format one table; a row without cells is left out."""
    lines = "".join(line(found, row, table) for row in table.rows)
    return f"**{table.name}**\n\n{HEAD}{line(found, table.reference, table)}{lines}" if lines else ""


def optimizers(found: Found) -> str:
    """Format the table of optimizers: rates are chosen on one half of the held-out text, with the first seed;
    losses are those of the other half. Only cells that have both halves count."""
    found = {cell: outcome for cell, outcome in found.items() if outcome.halves}
    lines = list[str]()
    for peers, rows in SWARMS.items():
        plain = reported(found, Setting(peers=0, rows=rows))
        for name, ways in OPTIMIZERS.items():
            dense, sparse = (replace(way, rows=rows, peers=min(way.peers, 1) * peers) for way in ways)
            own = reported(found, dense)
            for setting, way in ((dense, "all-reduce"), (sparse, f"{peers} peers")):
                if losses := reported(found, setting):
                    ratio = max(o.ratio for c, o in found.items() if c.setting == setting)
                    cells = [
                        way if setting.peers else f"all-reduce, {rows or Size().rows} samples",
                        name,
                        f"{ratio:.0f}x" if setting.peers else "",
                        f"{chosen_rate(found, setting):g}",
                        f"{mean(losses.values()):.4f} ({len(losses)})",
                        above(losses, own) if setting.peers else "",
                        above(losses, plain),
                    ]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([HEAD_BY_HALF, *dict.fromkeys(lines)]) + "\n" if lines else ""


def published(rows: Sequence[Mapping[str, Any]], dense: Mapping[int, float]) -> list[list[str]]:
    """Make the rows of methods as published: each at the rate with the lowest loss on the half that settings
    are chosen on, with the first seed; the loss is that of the other half.

    Args:
        rows: of `published.jsonl`, of one size.
        dense: seed -> loss of all-reduce with AdamW, on that half.
    """
    named = dict[str, list[Mapping[str, Any]]]()
    for row in rows:
        named.setdefault(way_text(row), []).append(row)
    lines = list[list[str]]()
    for name, tried in named.items():
        first = [row for row in tried if row["seed"] == SEEDS[0]]
        if not first:
            continue
        best = min(first, key=lambda row: float(row["halves"][0]))
        losses = {int(row["seed"]): float(row["halves"][1]) for row in tried if row["rate"] == best["rate"]}
        ratio = f"{best['ratio']:.0f}x" if best["method"] != "dense" else ""
        mean_loss = f"{mean(losses.values()):.4f} ({len(losses)})"
        lines.append([name, ratio, f"{best['rate']:g}", mean_loss, above(losses, dense)])
    return lines


def way_text(row: Mapping[str, Any]) -> str:
    """Describe the method of a row of `published.jsonl`."""
    number = {"econtrol": f", eta {row['control']:g}", "scafcom": f", beta {row['control']:g}"}
    warm = f", {row['warm']} steps of warm-up" if row["warm"] else ""
    members = f"{row['members']} of {row['peers']}" if row["members"] else f"{row['peers']}"
    optim = "" if row["method"] == "onebit" else {"adam": "; Adam", "sgd": "; SGD"}[row["optim"]]
    packets = "" if row["share"] == 1 else f"; p={row['share']:g} K={row['keep']:g}, {row['bits']} bit"
    apart = ", each with a text of its own" if row["apart"] else ""
    name = PUBLISHED[row["method"]] + number.get(row["method"], "") + warm + optim + packets
    return f"{name}; {members} peers{apart}"


def reported(found: Found, setting: Setting) -> dict[int, float]:
    """Find seed -> loss on the reported half, at the rate that the other half chose."""
    rate = chosen_rate(found, setting)
    return {c.seed: o.halves[1] for c, o in found.items() if c.setting == setting and c.rate == rate}


def above(losses: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Average over the seeds that both have how much more the losses are, as a share."""
    both = losses.keys() & reference.keys()
    return f"{mean(losses[seed] / reference[seed] - 1 for seed in both):+.2%}" if both else ""


def spread(found: Found, seeds: Sequence[int]) -> float | None:
    """Compute the reference's largest loss less its smallest over the seeds, as a share of their mean."""
    losses = [end.loss for end in outcomes(found, REFERENCE, seeds)]
    return (max(losses) - min(losses)) / mean(losses) if len(losses) > 1 else None


def plot(found: Found, table: Table) -> str:
    """Draw an SVG: how much more than all-reduce, in %, over how many times less than FP16."""
    points = []
    for row in table.rows:
        ends, gaps = outcomes(found, row, table.seeds), over(found, row, table)
        if row.setting.peers and ends and gaps:
            points.append((math.log10(max(ends[0].ratio, 1.0)), 100 * gaps[0], row.name))
    high = max([math.ceil(y) for _, y, _ in points] + [1])
    low = min([math.floor(y) for _, y, _ in points] + [0])

    def at(x: float, y: float) -> tuple[float, float]:
        return 60 + 150 * x, 20 + 260 * (high - y) / (high - low)

    parts = [
        f'<line x1="60" x2="560" y1="{at(0, y)[1]:.1f}" y2="{at(0, y)[1]:.1f}" stroke="#ddd"/>'
        f'<text x="52" y="{at(0, y)[1] + 4:.1f}" text-anchor="end">{y} %</text>'
        for y in range(low, high + 1)
    ]
    parts += [f'<text x="{at(n, low)[0]:.0f}" y="300" text-anchor="middle">{10**n}x</text>' for n in range(4)]
    for x, y, name in points:
        px, py = at(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="#2563eb"/>')
        parts.append(f'<text x="{px + 7:.1f}" y="{py - 5:.1f}">{name}</text>')
    title = f"{table.name}: held-out loss over all-reduce, against bytes less than FP16"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="330" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="760" height="330" fill="white"/><text x="60" y="14">{title}</text>'
        f"{''.join(parts)}</svg>\n"
    )
