"""Options that several commands share, declared once. Each command takes them after its name: `status -q`
works.

A Typer callback at the root would take them before the command only, so they are aliases of Annotated types.
"""

from __future__ import annotations

import os
from datetime import time
from pathlib import Path
from typing import Annotated

import typer

from cocktail_cli.machine import parse_rate, parse_size
from cocktail_cli.ui import Progress
from cocktail_cli.volunteer import DailyHours, parse_hours, parse_time

from .completion import overrides, recipe_names, run_names

RUN, CHECK, RECIPES, AFTER, TOOLS = "Run", "Check", "Recipes", "After", "Tools"  # panels of `cocktail --help`

Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout: one object, or one event a line.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only the result (an id, a path, a URL) and errors.")
]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice: debug.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours (NO_COLOR is honoured too).")]
ProgressOption = Annotated[
    Progress,
    typer.Option("--progress", envvar="COCKTAIL_PROGRESS", help="auto: rich on a terminal, plain elsewhere."),
]

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a shipped recipe, path or https address of a YAML file.",
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
    str | None, typer.Option("--data", metavar="FILE", help="Train on this instead of the recipe's data.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Folder or hub id, instead of the recipe's.")
]


def cache_at(place: str | None) -> str | None:
    """For this process and those that it starts: runs.cache reads it there."""
    if place:
        os.environ["COCKTAIL_CACHE"] = place
    return place


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Let Python code that comes with the model run on this machine."
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Name of a run, or its output folder.", autocompletion=run_names),
]
Output = Annotated[Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Where to write.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Own shards of the model: other members reach this machine there. Port 0: any free one.",
    ),
]
PeerAdvertise = Annotated[
    str | None,
    typer.Option("--advertise", metavar="HOST[:PORT]", help="With --listen: as others dial it."),
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
        help="Spread a peer over N GPUs of this machine: each holds 1/N of model, gradient and optimizer.",
    ),
]
MaxUp = Annotated[
    float | None,
    typer.Option(
        "--max-up",
        envvar="COCKTAIL_MAX_UP",
        metavar="RATE",
        parser=parse_rate,
        help="A peer here sends no faster than this: --max-up 5mbit, 500kbit or 2MB/s.",
        show_default=False,
    ),
]
MaxDown = Annotated[
    float | None,
    typer.Option(
        "--max-down",
        envvar="COCKTAIL_MAX_DOWN",
        metavar="RATE",
        parser=parse_rate,
        help="A peer here receives no faster than this: --max-down 50mbit.",
        show_default=False,
    ),
]
VramLimit = Annotated[
    int | None,
    typer.Option(
        "--vram-limit",
        metavar="SIZE",
        parser=parse_size,
        help="A peer here takes no more of a GPU's memory: --vram-limit 20GiB.",
        show_default=False,
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        envvar="COCKTAIL_CACHE",
        metavar="DIR",
        callback=cache_at,
        help="Fetched models lie there (default: below COCKTAIL_HOME, or the system's folder for caches).",
        show_default=False,
    ),
]
MaxDisk = Annotated[
    int | None,
    typer.Option(
        "--max-disk",
        metavar="SIZE",
        parser=parse_size,
        help="Fetched models take no more of this disk, nor does what is kept for a return: --max-disk 50GB.",
        show_default=False,
    ),
]
LendHours = Annotated[
    DailyHours | None,
    typer.Option(
        "--hours",
        metavar="FROM-TO",
        parser=parse_hours,
        help="Take part in these hours only, each day, by this machine's clock: --hours 22:00-07:00.",
        show_default=False,
    ),
]
Until = Annotated[
    time | None,
    typer.Option(
        "--until",
        metavar="TIME",
        parser=parse_time,
        help="Leave for good when the clock says this next: --until 08:00.",
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
