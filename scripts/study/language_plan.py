"""The ways that are compared on a language model, their cells in the order of weight, and their table.

All ways take all-reduce's learning rate, as people know theirs from one machine; then other rates, until the
best one is inside of those tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import mean

from scripts.study.cells import Cell, Found, setting_text
from scripts.study.plan import ADAPTERS, COCKTAIL, DILOCO, EXACT, REFERENCE, SEEDS, SUM, WIDE, name_meant
from scripts.study.tables import above
from scripts.study.train import Outcome, Setting, Size

LANGUAGE = Size(model="smollm2", length=512, rows=32, steps=300)
RANK = 16
RATES = {RANK: 2e-3, 0: 6e-4}  # of adapters, of whole models


@dataclass(frozen=True)
class Way:
    """One way to train a language model."""

    name: str
    setting: Setting

    @property
    def rate(self) -> float:
        """The rate at which it is compared first."""
        return RATES[self.setting.lora]

    @property
    def reference(self) -> Setting:
        """Return the setting it is compared with: all-reduce of the same parameters."""
        return replace(REFERENCE.setting, lora=self.setting.lora)


def ways(rank: int) -> dict[str, tuple[Way, ...]]:
    """List the ways of adapters, or (0) of whole models: the first, with other numbers of peers, others."""
    kind = f"LoRA r {rank}" if rank else "full"
    product, named = (replace(ADAPTERS, lora=0), "`lora-cocktail`") if rank else (SUM, "`cocktail`")

    def way(name: str, setting: Setting, peers: int = 8) -> Way:
        whose = f"{peers} peers, {name}" if peers else name
        return Way(f"{whose}, {kind}", replace(setting, peers=peers, lora=rank))

    first = way("all-reduce", REFERENCE.setting, 0), way("averaged exactly", EXACT), way(named, product)
    counts = way(named, product, 4), way(named, product, 16)
    sparser = [
        way("K=.2, 4 bits", replace(product, keep=0.2)),
        way("2 bits", replace(product, bits=2)),
        way("1 bit", replace(product, bits=1)),
    ]
    loco = replace(
        DILOCO, keep=1 / 64, bits=2, local_steps=30, outer_rate=1.0, momentum=0.0, error_decay=0.95
    )
    published = [
        way("`cocktail-wide`", WIDE),
        way("`cocktail-paper`", COCKTAIL),
        way("DiLoCo, every 50 steps, FP16", DILOCO),
        way("SparseLoCo, every 30 steps", loco),
    ]
    others = [way("`cocktail`", SUM), *sparser] if rank else published
    tried = [way(f"{named}, steps ahead of the delay", replace(product, ahead=1))]
    if rank:
        signs = replace(product, bits=1, correlated=1)
        tried += [
            way("2 bits, correlated", replace(signs, bits=2)),
            way("1 bit, correlated", signs),
            way(f"{named}, A and B in turn", replace(product, in_turn=1)),
            way(f"{named}, 1 gathering step", replace(product, gathering=1)),
        ]
    else:
        tried += [way(f"{named}, what BF16 sees", replace(product, seen=1))]
    return {"first": first, "counts": counts, "others": tuple(others), "levers": tuple(tried)}


WAYS = {rank: ways(rank) for rank in RATES}
EVERY = tuple(way for groups in WAYS.values() for group in groups.values() for way in group)
UNTOUCHED = Cell(replace(REFERENCE.setting, lora=RANK), 0.0, SEEDS[0])


def at(group: str, factor: float = 1.0, seed: int = SEEDS[0]) -> list[Cell]:
    """List the cells of a group of ways, of adapters and of whole models, at a multiple of their rate."""
    return [Cell(way.setting, way.rate * factor, seed) for groups in WAYS.values() for way in groups[group]]


LANGUAGE_CELLS = [
    UNTOUCHED,
    *at("first"),
    *at("counts"),
    *(cell for factor in (2, 0.5, 4) for cell in at("first", factor)),
    *at("others"),
    *(cell for seed in SEEDS for cell in at("levers", seed=seed)),
    *(cell for seed in SEEDS[1:] for group in ("first", "counts") for cell in at(group, seed=seed)),
]


def way_named(text: str) -> Way:
    """Find a way by its name, or its preset with 8 peers. Errors: ArgumentTypeError."""
    ways = {way.name: way for way in EVERY}
    return ways[name_meant(text, ways)]


def tried(found: Iterable[Cell], setting: Setting) -> list[float]:
    """List the rates of a way that were tried with the first seed."""
    return sorted({c.rate for c in found if c.setting == setting and c.seed == SEEDS[0] and c.rate})


def best(found: Found, setting: Setting) -> tuple[float, bool] | None:
    """Find the rate that is best on the half that settings are chosen on, and whether it is tuned: one lower
    and one higher were tried. None: no rate was."""
    rates = tried(found, setting)
    if not rates:
        return None
    chosen = min(rates, key=lambda rate: found[Cell(setting, rate, SEEDS[0])].halves[0])
    return chosen, rates[0] < chosen < rates[-1]


def reported(found: Found, setting: Setting, rate: float) -> dict[int, float]:
    """Find seed -> loss on the half that is reported."""
    return {c.seed: o.halves[1] for c, o in found.items() if c.setting == setting and c.rate == rate}


BESIDE = "over all-reduce at this rate | each at its best rate | right of four | another text"
HEAD = f"way | less than FP16 | rate | held-out loss (seeds) | {BESIDE}"


def compared(found: Found, way: Way, rate: float) -> tuple[str, str]:
    """Say how much more a way loses than all-reduce at one rate, and, if this is its best, at best rates."""
    losses = reported(found, way.setting, rate)
    own, dense = best(found, way.setting), best(found, way.reference)
    same = above(losses, reported(found, way.reference, rate)) if way.setting.peers else ""
    if own is None or dense is None or rate != own[0] or not way.setting.peers:
        return same, "tuned" if own == (rate, True) else ""
    over = above(losses, reported(found, way.reference, dense[0]))
    return same, over if own[1] and dense[1] else f"{over}, not tuned"


def language(found: Found, cut: Found) -> str:
    """Format the table of a language model, with the cells that were cut short."""
    lines = [f"| {HEAD} |", "|---" * 8 + "|"]
    if (untouched := found.get(UNTOUCHED)) is not None:
        lines.append(line("untouched", untouched, ["", "", f"{untouched.halves[1]:.4f}", "", ""]))
    for setting in dict.fromkeys(one.setting for one in (*EVERY, *found)):
        way = Way(name_of(setting), setting)
        for rate in tried(found, setting):
            outcome, losses = found[Cell(setting, rate, SEEDS[0])], reported(found, setting, rate)
            ratio = f"{outcome.ratio:.0f}x" if setting.peers else ""
            cells = [ratio, f"{rate:g}", f"{mean(losses.values()):.4f} ({len(losses)})"]
            lines.append(line(way.name, outcome, [*cells, *compared(found, way, rate)]))
    for cell, outcome in cut.items():
        short = f"{outcome.halves[1]:.4f} after {outcome.done:.0%} of the steps"
        lines.append(line(name_of(cell.setting), outcome, ["", f"{cell.rate:g}", short, "", ""]))
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def name_of(setting: Setting) -> str:
    """Name a way of the plan; any other setting by its keys."""
    return next((way.name for way in EVERY if way.setting == setting), setting_text(setting))


def line(name: str, outcome: Outcome, cells: list[str]) -> str:
    return f"| {' | '.join([name, *cells, f'{outcome.choice:.0%}', f'{outcome.other:.4f}'])} |"
