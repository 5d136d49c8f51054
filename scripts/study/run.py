"""The cost of compression in held-out loss, against synchronous all-reduce in FP32: the same tokens, the
learning rate tuned for each way.

    scripts/bench_quality --workers 2          # all cells that are not in the file yet, then the tables
    scripts/bench_quality --show               # the tables of what is in the file
    scripts/bench_quality --same-rate          # the tables at the rates of all-reduce, likewise
    scripts/bench_quality --row cocktail       # a row of README's table and all-reduce, each at its best rate
    scripts/bench_quality --cell topk_ratio=0.05,bits=2 --rates 1e-3 2e-3      # cells of one's own

On a GPU (not run yet: none was at hand) models, optimizers and the global model are on it, the aggregator is
in the host's memory; the base is trained on it too, once a size. It needs a torch with CUDA, which PyPI's for
Linux has; the environment is .venv, or COCKTAIL_VENV's. `--workers` share one GPU. For a second GPU, once the
first has made the base, the command is started again with other cells: both append to the same file.

    scripts/bench_quality --device cuda --hidden 512 --layers 8 --length 512 --rows 64 --steps 2000
    scripts/bench_quality --device cuda:1 --hidden 512 --layers 8 --length 512 --rows 64 --steps 2000 \\
        --cell peers=0 --rates 5e-4 1e-3 --seeds 1 2 3

A cell that has ended is a line of the results file; one that was cut short is made again. A model of another
size has lines and a base of its own. With --quick: a model and a run of next to nothing, in seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path

from scripts.study.cells import Cell, cells, changed, read, setting_of, shipped, write
from scripts.study.plan import COCKTAIL, REFERENCE, SAME_RATE, TABLES, best_rate, missing, row_named
from scripts.study.tables import markdown, same_rate, spread
from scripts.study.train import Outcome, Size, base, train
from scripts.swarms.lab import parser

QUICK = Size(hidden=32, layers=1, length=32, rows=4, steps=6, base_steps=4)


def ended(size: Size, wanted: list[Cell], folder: Path, workers: int) -> Iterator[tuple[Cell, Outcome]]:
    """Train the cells; yield each as it ends."""
    if workers == 1:
        yield from ((cell, train(size, cell.setting, cell.rate, cell.seed, folder)) for cell in wanted)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(train, size, c.setting, c.rate, c.seed, folder): c for c in wanted}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def run(size: Size, wanted: list[Cell], folder: Path, results: Path, workers: int) -> None:
    """Train those of the cells that are not in the file yet."""
    there = read(results, size)
    lacking = [cell for cell in dict.fromkeys(wanted) if cell not in there]
    if lacking:
        base(size, folder)  # once, before several processes want it
    for cell, outcome in ended(size, lacking, folder, workers):
        write(results, size, cell, outcome)
        what = ", ".join(f"{name}={value}" for name, value in changed(cell.setting).items()) or "cocktail"
        losses = f"{outcome.loss:.4f}, with all that was unsent {outcome.mean:.4f}"
        which = f"{what}; rate {cell.rate:g}, seed {cell.seed}"
        print(f"{which}: {losses}, {outcome.ratio:.1f}x, {outcome.seconds:.0f} s", flush=True)


def show(size: Size, results: Path) -> None:
    found = read(results, size)
    for table in TABLES:
        if text := markdown(found, table):
            print(text)
    for one in SAME_RATE:
        if text := same_rate(read(results, one.size), one):
            print(text)
    wide = spread(found)
    if wide is not None:
        print(f"all-reduce, the largest loss less the smallest of the seeds that are there: {wide:.2%}")


def options() -> argparse.ArgumentParser:
    asked, home = parser(__doc__), Path("outputs/quality")
    asked.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--show", action="store_true", help="compute nothing")
    asked.add_argument(
        "--same-rate", action="store_true", help="ways at the rates of all-reduce, --seeds each"
    )
    asked.add_argument("--row", type=row_named, help="a row of README's table, by its name or a part of it")
    asked.add_argument("--cell", type=setting_of, action="append", help="NAME=VALUE,... as in a recipe")
    asked.add_argument("--rates", type=float, nargs="+", default=[2e-3])
    asked.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked.add_argument("--folder", type=Path, default=home, help="for the pre-trained model")
    asked.add_argument("--results", type=Path, default=home / "results.jsonl")
    for field in fields(Size):
        name, usual = field.name.replace("_", "-"), field.default
        asked.add_argument(f"--{name}", type=type(usual), default=usual)
    return asked


def main() -> None:
    given = options().parse_args()
    size = QUICK if given.quick else Size(**{f.name: getattr(given, f.name) for f in fields(Size)})
    where = given.folder, given.results, given.workers
    if given.quick:
        run(size, cells([REFERENCE.setting, COCKTAIL], [2e-3], [1]), *where)
    elif given.row:
        known = shipped(size)
        for row in (REFERENCE, given.row):
            run(size, cells([row.setting], [best_rate(known, row)], given.seeds), *where)
    elif given.cell:
        run(size, cells(given.cell, given.rates, given.seeds), *where)
    elif given.same_rate:
        for table in SAME_RATE:
            ways = [table.reference, *(row.setting for row in table.rows)]
            run(table.size, cells(ways, table.rates, given.seeds), *where)
    elif not given.show:
        while wanted := missing(read(given.results, size)):
            run(size, wanted, *where)
    show(size, given.results)


if __name__ == "__main__":
    main()
