"""The quality study's tables, from its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from scripts.study.cells import Cell, Found
from scripts.study.plan import OPTIMIZERS, REFERENCE, SWARMS, Row, Table, best_rate, chosen_rate
from scripts.study.train import Outcome, Setting, Size

TITLES = "way | less than FP16 | learning rate | held-out loss | over all-reduce | with all that was unsent"
HEAD = f"| {TITLES} |\n" + "|---" * 6 + "|\n"
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
