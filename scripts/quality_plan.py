"""What the quality study asks, in the order of weight: the rows of its tables and the cells that they need.

A row's learning rate is found on one grid, with the first seed, by going downhill from its middle; the rows
of the first tables are then made again with the other seeds. Ablations take the rate of what they change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quality_cells import Cell, Found
from quality_train import Setting

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
START = (2e-3, 4e-3)  # the middle
SEEDS = (1, 2, 3)

ALL_REDUCE = Setting(peers=0)
AVERAGE = Setting(sample=1.0, keep=1.0, bits=16, staleness=0)
COCKTAIL = Setting()
TWO_BITS = Setting(bits=2)
THIN = Setting(sample=0.04, bits=2)
THINNEST = Setting(bits=2, local_steps=8)


@dataclass(frozen=True)
class Row:
    name: str
    setting: Setting
    like: Setting | None = None  # whose learning rate it takes; None: it is tuned


@dataclass(frozen=True)
class Table:
    name: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = SEEDS[:1]


def with_peers(rows: tuple[Row, ...], peers: int) -> tuple[Row, ...]:
    return tuple(replace(row, setting=replace(row.setting, peers=peers)) for row in rows)


REFERENCE = Row("all-reduce, FP32", ALL_REDUCE)
METHODS = (
    Row("averaged each step, FP16", AVERAGE),
    Row("p=.1 K=.2, 4 bits (`cocktail`)", COCKTAIL),
    Row("p=.1 K=.2, 2 bits", TWO_BITS),
    Row("p=.04 K=.2, 2 bits", THIN),
    Row("p=.1 K=.2, 2 bits, H=8", THINNEST),
)


def changed_from(like: Setting, rows: dict[str, dict[str, object]]) -> tuple[Row, ...]:
    """Rows that differ from `like` in what is told."""
    return tuple(Row(name, replace(like, **keys), like) for name, keys in rows.items())  # type: ignore[arg-type]


TABLES = (
    Table("four peers", (REFERENCE, *METHODS), SEEDS),
    Table("eight peers", (REFERENCE, *with_peers(METHODS, 8)), SEEDS),
)


def losses(found: Found, setting: Setting, seed: int = SEEDS[0]) -> dict[float, float]:
    """rate -> loss."""
    return {c.rate: o.loss for c, o in found.items() if c.setting == setting and c.seed == seed}


def best_rate(found: Found, row: Row) -> float:
    """KeyError where nothing was tried."""
    tried = losses(found, row.like or row.setting)
    return min(tried, key=tried.__getitem__) if tried else START[0]


def searched(found: Found, setting: Setting) -> list[Cell]:
    """What is missing to know the best rate of the grid."""
    tried = losses(found, setting)
    rates = START
    if tried:
        at = RATES.index(min(tried, key=tried.__getitem__))
        rates = RATES[max(at - 1, 0) : at + 2]
    return [Cell(setting, rate, SEEDS[0]) for rate in rates if rate not in tried]


def missing(found: Found, tables: tuple[Table, ...] = TABLES) -> list[Cell]:
    """The cells to be made next: of the first table that lacks some, rates before seeds."""
    for table in tables:
        rates = [cell for row in table.rows for cell in searched(found, row.like or row.setting)]
        if rates:
            return list(dict.fromkeys(rates))
        cells = [Cell(row.setting, best_rate(found, row), seed) for seed in table.seeds for row in table.rows]
        lacking = [cell for cell in dict.fromkeys(cells) if cell not in found]
        if lacking:
            return lacking
    return []
