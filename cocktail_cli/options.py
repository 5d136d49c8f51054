"""Options that several commands share, declared once. Each command takes them after its name: `status -q`.

A Typer callback at the root would take them before the command only, so they are aliases of Annotated types.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail_cli.machine import parse_rate, parse_size
from cocktail_cli.ui import Progress
from cocktail_cli.volunteer import DailyHours, parse_hours, parse_time

from .completion import overrides, recipe_names, run_names

RUN, CHECK, RECIPES, AFTER, TOOLS = "Run", "Check", "Recipes", "After", "Tools"  # panels of `cocktail --help`


def parsed(name: str, metavar: str, parser: Callable[[str], object], help: str, **more: Any) -> Any:
    """Declare an option whose text is parsed, and which has no default to show."""
    return typer.Option(name, metavar=metavar, parser=parser, help=help, show_default=False, **more)


def set_cache(folder: str | None) -> str | None:
    """Set the cache of this process and of those that it starts: `machine.cache` reads the variable."""
    if folder:
        os.environ["COCKTAIL_CACHE"] = folder
    return folder


Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout: one object, or one event a line.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the result (id, path, URL) and errors.")
]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Print more; -vv: debug.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours, like NO_COLOR.")]
ProgressOption = Annotated[
    Progress,
    typer.Option("--progress", envvar="COCKTAIL_PROGRESS", help="auto: rich on a terminal, plain elsewhere."),
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a shipped recipe, or path or https address of a YAML file.",
        autocompletion=recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Recipe fields: max_steps=20 training.seed=1",
        show_default=False,
        autocompletion=overrides,
    ),
]
DataPath = Annotated[
    str | None, typer.Option("--data", metavar="FILE", help="Train on this file, not the recipe's data.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Folder or hub id, in place of the recipe's.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let Python code of the model run on this machine.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, or its output folder.", autocompletion=run_names)
]
Output = Annotated[Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder to write to.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Aggregate shards of the model: other peers reach this machine there. Port 0: any free one.",
    ),
]
PeerAdvertise = Annotated[
    str | None,
    typer.Option("--advertise", metavar="HOST[:PORT]", help="With --listen: the address that others dial."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, mps, cuda, cuda:1, or a list cuda:0,1.")]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        envvar="COCKTAIL_MICRO_BATCH_SIZE",
        min=1,
        help="Sequences in memory at once on this machine (default: the recipe's).",
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus",
        min=1,
        metavar="N",
        help="Spread a peer over N GPUs of this machine: each has 1/N of model, gradient and optimizer.",
    ),
]
MAX_UP = "Limit what a peer here sends: --max-up 5mbit, 500kbit or 2MB/s."
MAX_DOWN = "Limit what a peer here receives: --max-down 50mbit."
VRAM_LIMIT = "Limit the memory that a peer here takes of a GPU: --vram-limit 20GiB."
MAX_DISK = "Limit the disk that fetched models and checkpoints take: --max-disk 50GB."
HOURS = "Take part in these hours only, each day, by this machine's clock: --hours 22:00-07:00."
UNTIL = "Leave for good when the clock next shows this: --until 08:00."
MaxUp = Annotated[float | None, parsed("--max-up", "RATE", parse_rate, MAX_UP, envvar="COCKTAIL_MAX_UP")]
MaxDown = Annotated[
    float | None, parsed("--max-down", "RATE", parse_rate, MAX_DOWN, envvar="COCKTAIL_MAX_DOWN")
]
VramLimit = Annotated[int | None, parsed("--vram-limit", "SIZE", parse_size, VRAM_LIMIT)]
MaxDisk = Annotated[int | None, parsed("--max-disk", "SIZE", parse_size, MAX_DISK)]
LendHours = Annotated[DailyHours | None, parsed("--hours", "FROM-TO", parse_hours, HOURS)]
Until = Annotated[time | None, parsed("--until", "TIME", parse_time, UNTIL)]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        envvar="COCKTAIL_CACHE",
        metavar="DIR",
        callback=set_cache,
        help="Folder of fetched models (default: below COCKTAIL_HOME, or the system's folder for caches).",
        show_default=False,
    ),
]
OnlyIdle = Annotated[
    bool, typer.Option("--only-idle", help="Pause while other programs use the GPU (NVIDIA).")
]
MaxTemp = Annotated[
    int | None,
    typer.Option(
        "--max-temp",
        metavar="CELSIUS",
        min=40,
        max=110,
        help="Pause while the GPU is hotter than this (NVIDIA), until it is 10 degrees below.",
        show_default=False,
    ),
]
