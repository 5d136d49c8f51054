"""Options that several commands share, declared once. Each command takes them after its name: `status -q`.

A Typer callback at the root would take them before the command only, so they are aliases of Annotated types.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cocktail_cli.assembly import MACHINE, NETWORK, OUTPUT, Option, options_of
from cocktail_cli.machine import PORT, parse_rate, parse_size
from cocktail_cli.ui import Progress

from .completion import overrides, recipe_names, run_names

RUN, CHECK, RESULTS, TOOLS = "Run", "Check", "Results", "Tools"  # panels of `cocktail --help`


def parsed(name: str, metavar: str, parser: Callable[[str], object], help: str, **more: Any) -> Any:
    """Declare an option whose text is parsed, and which has no default to show."""
    panel = {"rich_help_panel": MACHINE} | more
    return typer.Option(name, metavar=metavar, parser=parser, help=help, show_default=False, **panel)


def duration(name: str, help: str) -> Any:
    """Declare an option of seconds, given as a duration: 10m."""
    return parsed(name, "TIME", seconds_of, help, rich_help_panel=None)


def seconds_of(text: str) -> float:
    """Parse a duration. Raises ValueError."""
    from recipes.config import parse_duration

    return float(parse_duration(text))


def port(help: str, **more: Any) -> Any:
    """Declare --port, of a TCP server."""
    return typer.Option("--port", metavar="PORT", max=65535, help=help, **{"min": 0} | more)


def with_extensions(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of extensions to the command of this name, which gets those that were given as `given`:
    by extension, each by its name in Python."""
    added = {option.parameter: (folder, option) for folder, option in options_of(function.__name__)}

    def command(**values: Any) -> None:
        given: dict[str, dict[str, Any]] = {}
        for name, (folder, option) in added.items():
            if (value := values.pop(name)) not in (None, False):
                option.check(values)
                given.setdefault(folder, {})[option.parameter] = value
        function(**values, given=given)

    shown = inspect.signature(function, eval_str=True)
    kept = [one for one in shown.parameters.values() if one.name != "given"]
    own = [declared(name, folder, option) for name, (folder, option) in added.items()]
    command.__signature__ = shown.replace(parameters=[*kept, *own])  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def declared(name: str, folder: str, option: Option) -> inspect.Parameter:
    """Declare an option of an extension as a parameter."""
    kind, more = option.kind, dict[str, Any](zip(("min", "max"), option.bounds, strict=False))
    if isinstance(kind, str):
        kind, more = object, more | {"parser": option.reader(folder)}
    info = typer.Option(
        option.name,
        metavar=option.metavar,
        help=option.help,
        rich_help_panel=option.panel,
        show_default=False,
        **more,
    )
    where, default = inspect.Parameter.KEYWORD_ONLY, False if kind is bool else None
    wanted = kind if kind is bool else kind | None
    return inspect.Parameter(name, where, default=default, annotation=Annotated[wanted, info])


def set_cache(folder: str | None) -> str | None:
    """Set the cache of this process and of those that it starts: `machine.cache` reads the variable."""
    if folder:
        os.environ["COCKTAIL_CACHE"] = folder
    return folder


Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Write JSON: an object, or an event a line."),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print results (id, path, URL) and errors."),
]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, rich_help_panel=OUTPUT, help="Print more; -vv: debug.")
]
NoColor = Annotated[
    bool, typer.Option("--no-color", rich_help_panel=OUTPUT, help="Print no colours, as with NO_COLOR.")
]
ProgressOption = Annotated[
    Progress,
    typer.Option(
        "--progress",
        metavar="KIND",
        rich_help_panel=OUTPUT,
        help="auto, rich, plain or none.",
    ),
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A shipped recipe, a YAML file, or its address.", autocompletion=recipe_names
    ),
]
RecipeOrModel = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A shipped recipe, a YAML file, its address, or a model.",
        show_default=False,
        autocompletion=recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Recipe fields: max_steps=20 training.seed=1.",
        show_default=False,
        autocompletion=overrides,
    ),
]
DataPath = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="jsonl, json, csv, parquet, txt, folder or hub id."),
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Train this: a folder or a hub id.")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=MACHINE, help="Run Python code of the model here."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, or its output folder.", autocompletion=run_names)
]
Output = Annotated[Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder to write to.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        rich_help_panel=NETWORK,
        help="Pass packets on, aggregate here; port 0: any.",
    ),
]
PeerAdvertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST[:PORT]",
        rich_help_panel=NETWORK,
        help="With --listen: address others dial.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="auto|SIZE",
        rich_help_panel=MACHINE,
        help="Lend memory for some layers; the hub places them.",
    ),
]
BIND = typer.Option("--bind", metavar="ADDRESS", rich_help_panel=NETWORK, help="Address to listen on.")
Bind = Annotated[str, BIND]
Port = Annotated[
    int | None,
    port(
        f"TCP port ({PORT}, or the next free one); 0: any.",
        rich_help_panel=NETWORK,
        show_default=False,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST[:PORT]",
        rich_help_panel=NETWORK,
        help="Address in the run URL.",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return when the run has started; it goes on.")]
Detached = Annotated[bool, typer.Option("--detached", hidden=True)]
LifeLine = Annotated[bool, typer.Option("--life-line", hidden=True)]  # leave when stdin ends
DEVICES = "auto, cpu, mps, xpu, cuda:1 or cuda:0,1."
DEVICE = typer.Option("--device", metavar="DEVICE", rich_help_panel=MACHINE, help=DEVICES)
Device = Annotated[str, DEVICE]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        metavar="N",
        min=1,
        rich_help_panel=MACHINE,
        help="Sequences in memory at once.",
    ),
]
MAX_UP = "Limit sending: 5mbit, 500kbit or 2MB/s."
MAX_DOWN = "Limit receiving: 50mbit."
VRAM_LIMIT = "Limit a peer's GPU memory: 20GiB."
MAX_DISK = "Limit what models and checkpoints take: 50GB."
MaxUp = Annotated[float | None, parsed("--max-up", "RATE", parse_rate, MAX_UP)]
MaxDown = Annotated[float | None, parsed("--max-down", "RATE", parse_rate, MAX_DOWN)]
VramLimit = Annotated[int | None, parsed("--vram-limit", "SIZE", parse_size, VRAM_LIMIT)]
MaxDisk = Annotated[int | None, parsed("--max-disk", "SIZE", parse_size, MAX_DISK)]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        envvar="COCKTAIL_CACHE",
        metavar="DIR",
        callback=set_cache,
        rich_help_panel=MACHINE,
        help="Folder of downloaded models.",
        show_default=False,
    ),
]
