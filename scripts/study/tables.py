"""The quality study's tables, from its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from scripts.study.cells import Cell, Found
from scripts.study.plan import (
    OPTIMIZERS,
    REFERENCE,
    SEEDS,
    SWARMS,
    Row,
    SameRate,
    Table,
    best_rate,
    chosen_rate,
    losses,
)
from scripts.study.train import Outcome, Setting, Size

TITLES = "way | less than FP16 | learning rate | held-out loss (seeds) | over all-reduce"
HEAD = f"| {TITLES} |\n" + "|---" * 5 + "|\n"
BY_HALF = (
    "way | optimizer | less than FP16 | learning rate | held-out loss (seeds) | over its own | over AdamW's"
)
HEAD_BY_HALF = f"| {BY_HALF} |\n" + "|---" * 7 + "|"


def at_best_rate(found: Found, row: Row, seeds: Sequence[int] = SEEDS) -> dict[int, Outcome]:
    """Find seed -> outcome of the cells that are there, at the row's rate."""
    rate = best_rate(found, row)
    return {seed: found[cell] for seed in seeds if (cell := Cell(row.setting, rate, seed)) in found}


def losses_of(outcomes: Mapping[int, Outcome]) -> dict[int, float]:
    return {seed: outcome.loss for seed, outcome in outcomes.items()}


def line(found: Found, row: Row, table: Table) -> str:
    ends = at_best_rate(found, row, table.seeds)
    if not ends:
        return ""
    losses, reference = losses_of(ends), losses_of(at_best_rate(found, table.reference, table.seeds))
    cells = [
        row.name,
        f"{next(iter(ends.values())).ratio:.0f}x" if row.setting.peers else "",
        f"{best_rate(found, row):g}",
        f"{mean(losses.values()):.4f} ({len(losses)})",
        above(losses, reference),
    ]
    return f"| {' | '.join(cells)} |\n"


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


def same_rate(found: Found, table: SameRate) -> str:
    """Format one table of ways at all-reduce's own rates. Each is compared at the same rate and seeds, and at
    last the best of its rates with the best of all-reduce's."""
    head = ["way", *(f"{rate:g}" for rate in table.rates), "best"]
    rows = list[str]()
    for row in table.rows:
        over = [at_rate(found, row.setting, table.reference, rate) for rate in table.rates]
        if any(over):
            own, dense = (losses_of_best(found, one, table.rates) for one in (row.setting, table.reference))
            rows.append(f"| {' | '.join([row.name, *over, above(own, dense)])} |")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]
    return f"**{table.name}**\n\n" + "\n".join(lines) + "\n" if rows else ""


def at_rate(found: Found, setting: Setting, reference: Setting, rate: float) -> str:
    """Average over the seeds how much more one way loses than the other at one rate, with their number."""
    both = len(losses_at(found, setting, rate).keys() & losses_at(found, reference, rate).keys())
    return f"{over_at(found, setting, reference, rate)} ({both})" if both else ""


def over_at(found: Found, setting: Setting, reference: Setting, rate: float) -> str:
    """Average over the seeds how much more one way loses than the other at one rate."""
    return above(losses_at(found, setting, rate), losses_at(found, reference, rate))


def losses_at(found: Found, setting: Setting, rate: float) -> dict[int, float]:
    """Find seed -> loss."""
    return {c.seed: o.loss for c, o in found.items() if c.setting == setting and c.rate == rate}


def losses_of_best(found: Found, setting: Setting, rates: Sequence[float]) -> dict[int, float]:
    """Find seed -> loss at the one of these rates that has the lowest loss with the first seed."""
    tried = {rate: loss for rate, loss in losses(found, setting).items() if rate in rates}
    return losses_at(found, setting, min(tried, key=tried.__getitem__)) if tried else {}


def reported(found: Found, setting: Setting) -> dict[int, float]:
    """Find seed -> loss on the reported half, at the rate that the other half chose."""
    rate = chosen_rate(found, setting)
    return {c.seed: o.halves[1] for c, o in found.items() if c.setting == setting and c.rate == rate}


def above(losses: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Average over the seeds that both have how much more the losses are, as a share."""
    both = losses.keys() & reference.keys()
    return f"{mean(losses[seed] / reference[seed] - 1 for seed in both):+.2%}" if both else ""


def spread(found: Found) -> float | None:
    """Compute the reference's largest loss less its smallest over the seeds, as a share of their mean."""
    losses = losses_of(at_best_rate(found, REFERENCE)).values()
    return (max(losses) - min(losses)) / mean(losses) if len(losses) > 1 else None
