"""The plan of the quality study, in the order of weight: the rows of its tables and the cells that they need.

A row's learning rate is found on one grid, with the first seed, by going downhill from its middle; the rows
of the first tables are then made again with the other seeds. Ablations take the rate of what they change.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from scripts.study.cells import Cell, Found
from scripts.study.train import Optim, Setting, Size

RATES = (5e-4, 1e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 11e-3, 16e-3, 32e-3)
START = (2e-3, 4e-3)  # the middle
SEEDS = (1, 2, 3)
MILLION = Size(hidden=160, layers=3, steps=400, base_steps=1000)  # a second size, of a million parameters

COCKTAIL = Setting()
SUM = Setting(sample=0.113, bits=2, outer_rate=0.0, own_noise=0)  # the recipes' default
OWN_NOISE = replace(SUM, beta1=0.5, own_noise=1)  # until 2026-11-27
WIDE = replace(SUM, sample=0.38, keep=0.047, bits=1)  # visits more, sends less of it
OWN_WIDE = replace(WIDE, beta1=0.0, own_noise=1)
THIN = replace(SUM, sample=0.04)
THINNEST = replace(SUM, sample=0.129, bits=1, staleness=0, local_steps=8, error_decay=0.8)


@dataclass(frozen=True)
class Row:
    name: str
    setting: Setting
    like: Setting | None = None  # whose learning rate it takes; None: it is tuned


REFERENCE = Row("all-reduce, FP32", Setting(peers=0))
SIGNS = replace(OWN_NOISE, bits=1, staleness=2)
SPARSE_SIGNS = replace(SIGNS, sample=0.0264, error_decay=0.9)
SPARSEST = replace(SPARSE_SIGNS, beta1=0.9, own_noise=0)  # `cocktail-thin`
THIN_LINES = (
    Row(
        "p=.113 K=.025, 2 bits, `packets`, beta1 .5, staleness 2", replace(OWN_NOISE, keep=0.025, staleness=2)
    ),
    Row("p=.113 K=.029, 1 bit, `packets`, beta1 .5, staleness 2", replace(SIGNS, keep=0.029)),
    Row("p=.113 K=.022, 1 bit, `packets`, beta1 .5, staleness 2", replace(SIGNS, keep=0.0222)),
    Row(
        "p=.022 K=.2, 2 bits, `packets`, beta1 .5, staleness 2",
        replace(OWN_NOISE, sample=0.0218, staleness=2),
    ),
    Row(
        "p=.022 K=.2, 1 bit, `packets`, beta1 .5, staleness 2, error decay .9",
        replace(SPARSE_SIGNS, sample=0.022),
    ),
    Row("p=.026 K=.2, 1 bit, `packets`, beta1 .5, staleness 2, error decay .9", SPARSE_SIGNS),
    Row("p=.026 K=.2, 1 bit, `packets`, staleness 2, error decay .9 (`cocktail-thin`)", SPARSEST),
    Row("the same with SOAP, betas .5 .99", replace(SPARSE_SIGNS, optim="soap", beta2=0.99)),
)
TOP_K = Setting(sample=1.0, keep=0.0053, bits=16, staleness=0)  # at the default's bytes
DGC = replace(TOP_K, keep=0.001, masked=1, uncompressed=100)
MASKING = (
    Row("p=1 K=.001, 16 bits, 100 uncompressed steps, the mean, fresh, momentum masked (`dgc`)", DGC),
    Row("the same without masking", replace(DGC, masked=0)),
    Row("p=1 K=.0053, 16 bits, the mean, fresh, momentum masked", replace(TOP_K, masked=1)),
    Row("p=1 K=.0053, 16 bits, the mean, fresh", TOP_K),
)
BEFORE_AMORTISED = Row(
    "p=.129 K=.2, 1 bit, `packets`, beta1 .5, fresh, H=8, error decay .8, each by its own noise",
    replace(THINNEST, beta1=0.5, own_noise=1),
)
DILOCO = Setting(sample=1.0, keep=1.0, bits=16, staleness=0, local_steps=50, outer_rate=0.7, momentum=0.9)
RIVALS = (
    Row("DiLoCo, every 50 steps, FP16", DILOCO),
    Row("the same with Muon (MuLoCo)", replace(DILOCO, optim="muon")),
)
AMORTISED = Row("p=.129 K=.2, 1 bit, `packets`, fresh, H=8, error decay .8", THINNEST)


@dataclass(frozen=True)
class Table:
    name: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = SEEDS[:1]
    reference: Row = REFERENCE  # what each row is compared with

    @property
    def all(self) -> tuple[Row, ...]:
        return (self.reference, *self.rows)


def with_peers(rows: tuple[Row, ...], peers: int) -> tuple[Row, ...]:
    return tuple(
        replace(row, setting=replace(row.setting, peers=peers)) if row.setting.peers else row for row in rows
    )


METHODS = (
    Row("p=.1 K=.2, 4 bits (`cocktail-paper`)", COCKTAIL),
    Row("p=.113 K=.2, 2 bits, `packets` (`cocktail`)", SUM),
    Row("p=.04 K=.2, 2 bits, `packets`", THIN),
    AMORTISED,
    Row("p=.38 K=.047, 1 bit, `packets` (`cocktail-wide`)", WIDE),
    Row("p=.113 K=.2, 2 bits, `packets`, beta1 .5, each by its own noise", OWN_NOISE),
    Row("p=.04 K=.2, 2 bits, `packets`, beta1 .5, each by its own noise", replace(OWN_NOISE, sample=0.04)),
    BEFORE_AMORTISED,
    Row("p=.38 K=.047, 1 bit, `packets`, beta1 0, each by its own noise", OWN_WIDE),
)


def changed_from(like: Setting, rows: dict[str, dict[str, Any]]) -> tuple[Row, ...]:
    """Make rows that differ from `like` in these settings, at its learning rate."""
    return tuple(Row(name, replace(like, **keys), like) for name, keys in rows.items())


EQUAL = {  # at about what a parameter takes in 2 bits with p=.113 K=.2: 0.13 bit a step
    "all three": {},
    "sampling alone": {"sample": 0.0084, "keep": 1.0, "bits": 16},
    "top-K alone": {"sample": 1.0, "keep": 0.0053, "bits": 16},
    "1 bit alone, every 9 steps": {"sample": 1.0, "keep": 1.0, "bits": 1, "local_steps": 9},
    "sampling and 1 bit": {"sample": 0.1, "keep": 1.0, "bits": 1},
    "sampling and top-K": {"sample": 0.1, "keep": 0.058, "bits": 16},
    "top-K and 2 bits": {"sample": 1.0, "keep": 0.012},
}
WITHOUT = {
    "as it is": {},
    "peers forget what a round left of what it visited": {"error_decay": 0.0},
    "10 % of the packets too late": {"dropped": 0.1},
    "30 % of the packets too late": {"dropped": 0.3},
}
SIXTEEN = replace(OWN_NOISE, rows=16)  # twice the batch, so that 16 peers have a sample each

TABLES = (
    Table("four peers", METHODS, SEEDS),
    Table("four peers on 20 Mbit/s, two rounds in flight", THIN_LINES, SEEDS),
    Table("four peers, momentum masking", MASKING),
    Table("eight peers", with_peers(METHODS, 8), SEEDS),
    Table("one technique at a time", changed_from(OWN_NOISE, EQUAL), SEEDS),
    Table("without", changed_from(OWN_NOISE, WITHOUT), SEEDS),
    Table(
        "peers",
        changed_from(SIXTEEN, {f"{n} peers": {"peers": n} for n in (1, 2, 4, 8, 16)}),
        reference=Row("all-reduce, FP32, 16 samples", Setting(peers=0, rows=16)),
    ),
)

DENSE = REFERENCE.setting
SOAP: dict[str, Any] = {"optim": "soap", "beta2": 0.99}
OPTIMIZERS = {  # all-reduce with it, and peers whose packets are sums of its steps
    "AdamW": (DENSE, OWN_WIDE),
    "Muon": (replace(DENSE, optim="muon"), replace(OWN_WIDE, optim="muon", matrix_momentum=0.9)),
    "SOAP": (replace(DENSE, **SOAP), replace(OWN_WIDE, **SOAP)),
}
OTHERS: dict[Optim, tuple[float, float, float]] = {  # a quarter, half and all of all-reduce's best rate
    "muon": (2e-3, 4e-3, 8e-3),
    "soap": (2e-3, 4e-3, 8e-3),
    "adafactor": (1e-3, 2e-3, 4e-3),
    "adamw_8bit": (1e-3, 2e-3, 4e-3),
    "sgd": (0.1, 0.2, 0.4),
}
SWARMS = {4: 0, 8: 0, 16: 16, 32: 32}  # peers -> samples of a step, where they are not the study's

# ---- at all-reduce's own rate -----------------------------------------------------------------------------

EXACT = Setting(sample=1.0, keep=1.0, bits=32, staleness=0, own_noise=0)  # AdamW's steps, averaged exactly
ADAPTERS = replace(EXACT, bits=4, staleness=1, lora=8)  # `lora-cocktail`


@dataclass(frozen=True)
class SameRate:
    """Ways to train at the rate of all-reduce: at a quarter, at half and at all of its best."""

    name: str
    size: Size
    reference: Setting
    rates: tuple[float, float, float]
    rows: tuple[Row, ...]


def of_peers(name: str, setting: Setting, counts: tuple[int, ...]) -> tuple[Row, ...]:
    return tuple(Row(f"{n} peer{'s' * (n > 1)}, {name}", replace(setting, peers=n)) for n in counts)


def of_swarms(counts: tuple[int, ...], **keys: Any) -> tuple[Row, ...]:
    """Make the rows of peers that average exactly, and of `cocktail` with them."""
    exact, swarm = (replace(one, **keys) for one in (EXACT, SUM))
    return (*of_peers("averaged exactly", exact, counts), *of_peers("`cocktail`", swarm, counts))


def larger(rows: int, rates: tuple[float, ...], peers: int, size: Size, more: str = "") -> SameRate:
    """Make the table of a batch of so many samples."""
    batch, swarms = Setting(peers=0, rows=rows), of_swarms((peers,), rows=rows)
    return SameRate(f"{rows} samples a step{more}", size, batch, rates, swarms)


SHORT, HARSH = Size(steps=400), Size(steps=400, base_steps=400)
SAME_RATE = (
    SameRate(
        "8 samples a step",
        Size(),
        REFERENCE.setting,
        (1e-3, 2e-3, 4e-3),
        (
            *of_swarms((1, 2, 4, 8)),
            Row("2 peers, 1 row and 7, `cocktail`", replace(SUM, peers=2, shares="1:7")),
            Row("2, then 8, then 2 peers, `cocktail`", replace(SUM, peers=8, turns="2:8:2")),
        ),
    ),
    larger(16, (2.8e-3, 5.6e-3, 11e-3), 16, Size()),
    SameRate(
        "8 samples a step, 400 steps",
        SHORT,
        REFERENCE.setting,
        (1e-3, 2e-3, 4e-3),
        (
            *of_swarms((1, 2, 4, 8)),
            Row("2 peers, 1 row and 7, averaged exactly", replace(EXACT, peers=2, shares="1:7")),
        ),
    ),
    larger(16, (2e-3, 4e-3, 8e-3), 16, SHORT, ", 400 steps"),
    larger(64, (4e-3, 8e-3, 16e-3), 8, SHORT, ", 400 steps"),
    SameRate(
        "a base of 400 steps, which still learns, 400 steps",
        HARSH,
        REFERENCE.setting,
        (2e-3, 4e-3, 8e-3),
        (
            *of_swarms((4, 8)),
            Row("8 peers, `cocktail` after 45 uncompressed steps", replace(SUM, peers=8, uncompressed=45)),
            Row("8 peers, p=1 K=.023, 2 bits", replace(SUM, peers=8, sample=1.0, keep=0.0227)),
        ),
    ),
    SameRate(
        "a million parameters, 400 steps",
        MILLION,
        REFERENCE.setting,
        (7e-4, 1.4e-3, 2.8e-3),
        of_swarms((1, 4, 8)),
    ),
    larger(16, (1e-3, 2e-3, 4e-3), 16, MILLION, ", a million parameters, 400 steps"),
    SameRate(
        "adapters of rank 8, 400 steps",
        SHORT,
        Setting(peers=0, lora=8),
        (4e-3, 8e-3, 16e-3),
        (
            *of_peers("`lora-cocktail`", ADAPTERS, (4, 8)),
            *of_peers("`lora-cocktail`, each by its own noise", replace(ADAPTERS, own_noise=1), (4, 8)),
            *of_peers("`cocktail`", replace(SUM, lora=8), (4, 8)),
        ),
    ),
    *(
        SameRate(
            f"{optim}, 8 samples a step, 400 steps",
            SHORT,
            Setting(peers=0, optim=optim),
            rates,
            (
                *of_peers("averaged exactly", replace(EXACT, optim=optim), (8,)),
                *of_peers(
                    "averaged exactly, each by its own noise", replace(EXACT, optim=optim, own_noise=1), (8,)
                ),
                *of_peers("`cocktail`", replace(SUM, optim=optim), (8,)),
            ),
        )
        for optim, rates in OTHERS.items()
    ),
)

LONGER = Table("four peers, 3,200 steps", (BEFORE_AMORTISED,), SEEDS)


def losses(found: Found, setting: Setting, seed: int = SEEDS[0]) -> dict[float, float]:
    """Find rate -> loss."""
    return {c.rate: o.loss for c, o in found.items() if c.setting == setting and c.seed == seed}


def best_rate(found: Found, row: Row) -> float:
    """Find the rate with the lowest loss; the first of START where none was tried."""
    tried = losses(found, row.like or row.setting)
    return min(tried, key=tried.__getitem__) if tried else START[0]


def searched(found: Found, setting: Setting) -> list[Cell]:
    """List the cells that are missing to know the best rate of the grid."""
    tried = losses(found, setting)
    rates = START
    if tried:
        at = RATES.index(min(tried, key=tried.__getitem__))
        rates = RATES[max(at - 1, 0) : at + 2]
    return [Cell(setting, rate, SEEDS[0]) for rate in rates if rate not in tried]


def chosen_rate(found: Found, setting: Setting) -> float | None:
    """Find the rate with the lowest loss on the half that settings are chosen on, with the first seed."""
    tried = {c.rate: o.halves[0] for c, o in found.items() if c.setting == setting and c.seed == SEEDS[0]}
    return min(tried, key=tried.__getitem__) if tried else None


def row_named(text: str) -> Row:
    """Find a row of README by its name. Errors: ArgumentTypeError."""
    rows = {row.name: row for row in (*(row for table in TABLES[:3] for row in table.rows), *RIVALS)}
    return rows[name_meant(text, rows)]


def name_meant(text: str, names: Iterable[str]) -> str:
    """Find a name by its preset, or a part that no other has. Errors: ArgumentTypeError."""
    eight = f"|8 peers, `{text}`, "
    parts = f"|{text}|", f"(`{text}`)", f"{eight}full|", f"{eight}LoRA r 16|", text
    meant = next(filter(None, ([name for name in names if part in f"|{name}|"] for part in parts)), [*names])
    if len(meant) == 1:
        return meant[0]
    asked = f"which row is {text!r}? PowerSGD's: scripts/rivals powersgd"
    raise ArgumentTypeError("\n".join([asked, *meant]))


def missing(found: Found, tables: tuple[Table, ...] = TABLES) -> list[Cell]:
    """List the cells to be made next: of the first table that lacks some, rates before seeds."""
    for table in tables:
        rates = [cell for row in table.all for cell in searched(found, row.like or row.setting)]
        if rates:
            return list(dict.fromkeys(rates))
        cells = [Cell(row.setting, best_rate(found, row), seed) for seed in table.seeds for row in table.all]
        lacking = [cell for cell in dict.fromkeys(cells) if cell not in found]
        if lacking:
            return lacking
    return []
