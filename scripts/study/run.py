"""The cost of compression in held-out loss, against synchronous all-reduce in FP32: the same tokens, the
learning rate tuned for each way.

    scripts/bench_quality --workers 2          # all cells that are not in the file yet, then the tables
    scripts/bench_quality --show               # the tables of what is in the file
    scripts/bench_quality --same-rate          # the tables at the rates of all-reduce, likewise
    scripts/bench_quality --row cocktail       # a row of README's table and all-reduce, each at its best rate
    scripts/bench_quality --cell topk_ratio=0.05,bits=2 --rates 1e-3 2e-3      # cells of one's own
    scripts/bench_quality --model smollm2 --device cuda --minutes 8   # a language model, on documents
    scripts/bench_quality --model smollm2 --row lora-cocktail    # a row of it, and what that is beside

On a GPU models, optimizers, codec and aggregator are on it. It needs a torch with CUDA, which PyPI's for
Linux has; the environment is .venv, or COCKTAIL_VENV's. A second GPU wants other cells and --results.

A cell that has ended is a line of the results file. One of a language model that the clock cuts short is a
line that says so, and the next call goes on with it where its peers' vectors are no more than 4 GiB. Another
size has lines and a base of its own. With --quick: a model and a run of next to nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from scripts.study.begun import Begun, say
from scripts.study.cells import Cell, cells, changed, read, setting_of, setting_text, shipped, write
from scripts.study.language_plan import LANGUAGE, LANGUAGE_CELLS, UNTOUCHED, language, way_named
from scripts.study.plan import COCKTAIL, REFERENCE, SAME_RATE, TABLES, best_rate, missing, row_named
from scripts.study.tables import markdown, same_rate, spread
from scripts.study.train import Outcome, Setting, Size, base, train
from scripts.swarms.lab import parser

QUICK = Size(hidden=32, layers=1, length=32, rows=4, steps=6, base_steps=4)


@dataclass(frozen=True)
class Place:
    """Folders, processes and time limit of the cells of a study."""

    folder: Path
    results: Path
    workers: int
    until: float


def begun_cell(size: Size, place: Place, cell: Cell) -> tuple[Cell, Outcome | None]:
    """Train a cell, or what is left of one that was cut short; None: the time was over before."""
    if time.monotonic() >= place.until:
        return cell, None
    # 2: optimizers' states are of whole vectors
    named = repr((2, size.name, setting_text(cell.setting), cell.rate, cell.seed)).encode()
    file = place.folder / "begun" / f"{hashlib.sha256(named).hexdigest()[:16]}.safetensors"
    begun = Begun(place.until, file if size.model else None, say if size.model else None)
    outcome = train(size, cell.setting, cell.rate, cell.seed, place.folder, begun)
    if outcome.done == 1:
        file.unlink(missing_ok=True)
    return cell, outcome


def ended(size: Size, wanted: list[Cell], place: Place) -> Iterator[tuple[Cell, Outcome | None]]:
    """Train the cells; yield each as it ends, or is cut short."""
    one = partial(begun_cell, size, place)
    if place.workers == 1:
        yield from map(one, wanted)
        return
    with ProcessPoolExecutor(place.workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(one, cell) for cell in wanted]):
            yield done.result()


def run(size: Size, wanted: list[Cell], place: Place) -> None:
    """Train those of the cells that are not in the file yet."""
    there = read(place.results, size)
    lacking = [cell for cell in dict.fromkeys(wanted) if cell not in there]
    if lacking and not size.model:
        base(size, place.folder)  # once, before several processes want it
    for cell, outcome in ended(size, lacking, place):
        if outcome is None:
            continue
        write(place.results, size, cell, outcome)
        what = ", ".join(f"{name}={value}" for name, value in changed(cell.setting).items()) or "cocktail"
        losses = f"{outcome.loss:.4f}, with all that was unsent {outcome.mean:.4f}"
        which = f"{what}; rate {cell.rate:g}, seed {cell.seed}"
        cut = f", cut short after {outcome.done:.0%} of its steps" if outcome.done < 1 else ""
        print(f"{which}: {losses}, {outcome.ratio:.1f}x, {outcome.seconds:.0f} s{cut}", flush=True)


def show(size: Size, results: Path) -> None:
    found = read(results, size)
    if size.model:
        print(language(found, read(results, size, cut=True)))
        return
    for table in TABLES:
        if text := markdown(found, table):
            print(text)
    for one in SAME_RATE:
        if text := same_rate(read(results, one.size), one):
            print(text)
    if (wide := spread(found)) is not None:
        print(f"all-reduce, the largest loss less the smallest of the seeds that are there: {wide:.2%}")


def options() -> argparse.ArgumentParser:
    asked, home = parser(__doc__), Path("outputs/quality")
    asked.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--show", action="store_true", help="compute nothing")
    asked.add_argument("--same-rate", action="store_true", help="ways at all-reduce's rates, --seeds each")
    asked.add_argument("--row", help="a row of README's tables, by its name or a part of it")
    asked.add_argument("--cell", type=setting_of, action="append", help="NAME=VALUE,... as in a recipe")
    asked.add_argument("--rates", type=float, nargs="+", default=[2e-3])
    asked.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked.add_argument("--folder", type=Path, default=home, help="for the pre-trained model")
    asked.add_argument("--results", type=Path, default=home / "results.jsonl")
    asked.add_argument("--minutes", type=float, default=float("inf"), help="a cell is cut short then")
    for field in fields(Size):
        name, usual = field.name.replace("_", "-"), field.default
        asked.add_argument(f"--{name}", type=type(usual), help=f"usual: {usual or 'none'}")
    return asked


def main() -> None:
    given = options().parse_args()
    if given.same_rate and given.model:
        raise SystemExit("--same-rate: its tables are of the study's own model; leave out --model")
    size = QUICK if given.quick else size_of(given)
    if size.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--device {size.device}: this machine has no CUDA device, or a torch without CUDA")
    place = Place(given.folder, given.results, given.workers, time.monotonic() + 60 * given.minutes)
    if given.quick:
        run(size, cells([REFERENCE.setting, COCKTAIL], [2e-3], [1]), place)
    elif given.row:
        run(size, [Cell(*way, seed) for seed in given.seeds for way in ways_of(given.row, size)], place)
    elif given.cell:
        run(size, cells(given.cell, given.rates, given.seeds), place)
    elif given.same_rate:
        for table in SAME_RATE:
            ways = [table.reference, *(row.setting for row in table.rows)]
            run(table.size, cells(ways, table.rates, given.seeds), place)
    elif size.model and not given.show:
        run(size, LANGUAGE_CELLS, place)
    elif not given.show:
        while (wanted := missing(read(given.results, size))) and time.monotonic() < place.until:
            run(size, wanted, place)
    show(size, given.results)


def ways_of(name: str, size: Size) -> list[tuple[Setting, float]]:
    """Find a row of README by its name, and what it is compared with, each at its rate."""
    try:
        if size.model:
            way = way_named(name)
            return [(UNTOUCHED.setting, 0.0), (way.reference, way.rate), (way.setting, way.rate)]
        return [(row.setting, best_rate(shipped(size), row)) for row in (REFERENCE, row_named(name))]
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"--row: {error}") from None


def size_of(given: argparse.Namespace) -> Size:
    """Take the sizes that were given; of a language model the others are those of README's rows."""
    usual = LANGUAGE if given.model else Size()
    told = {field.name: getattr(given, field.name) for field in fields(Size)}
    size = replace(usual, **{name: value for name, value in told.items() if value is not None})
    if not size.model:
        return size
    from scripts.study.language import resolved  # imports peft

    return resolved(size, given.folder)


if __name__ == "__main__":
    main()
