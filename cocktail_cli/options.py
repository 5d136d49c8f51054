"""Options that several commands share, declared once. Each command takes them after its name: `status -q`.

A Typer callback at the root would take them before the command only, so they are aliases of Annotated types.

Shell completion must never print an error: where something cannot be read it offers nothing. It imports
nothing heavy.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from cocktail_cli.assembly import MACHINE, NETWORK, OUTPUT, Option, options_of, recipe_type
from cocktail_cli.errors import Failure
from cocktail_cli.machine import PORT, known_runs, load_run
from cocktail_cli.ui import Progress

Offers = list[tuple[str, str]]  # (word, description)


def recipe_names(incomplete: str) -> Offers:
    """Offer shipped recipes, and YAML files here."""
    spec = find_spec("recipes")
    places = [Path(place) / "library" for place in (spec.submodule_search_locations or [])] if spec else []
    places += Path(__file__).parent.glob("extensions/*")
    shipped = [(path.stem, "shipped recipe") for place in places for path in place.glob("*.yaml")]
    files: list[Path] = []
    # A word that is being typed may be no path yet (/, **x, a null byte). Then no file is offered, as a
    # traceback would stand in the middle of the line that is typed.
    with suppress(OSError, ValueError, NotImplementedError):
        files = [*Path().glob(f"{incomplete}*.yaml"), *Path().glob(f"{incomplete}*.yml")]
    return beginning(incomplete, [*shipped, *((str(path), "file") for path in files)])


def run_names(incomplete: str) -> Offers:
    """Offer the runs that this machine knows."""
    with suppress(OSError):
        return beginning(incomplete, [(run.run, f"{run.state}, {run.recipe}") for run in known_runs()])
    return []


def unfinished_runs(incomplete: str) -> Offers:
    """Offer the runs that can be resumed."""
    return [offer for offer in run_names(incomplete) if not offer[1].startswith(("finished", "stopped"))]


def local_peers(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the local peers of the run that is named before."""
    with suppress(OSError, Failure):
        folder = Path(load_run(str(ctx.params.get("run"))).output_dir) / "peers"
        return beginning(incomplete, [(path.stem, "local peer") for path in folder.glob("*.jsonl")])
    return []


def overrides(incomplete: str) -> Offers:
    """Offer `training.learning_rate=` and `learning_rate=`; after the = the choices, if there are any."""
    found: Offers = []
    for key, annotation in leaves(recipe_type()):
        for name in {key, key.rpartition(".")[2]}:
            values = choices(annotation)
            if "=" not in incomplete:
                found.append((f"{name}=", " | ".join(values) if values else "field of the recipe"))
            else:
                found += [(f"{name}={value}", "") for value in values]
    return beginning(incomplete, found)


def beginning(incomplete: str, words: Offers) -> Offers:
    return sorted({word: about for word, about in words if word.startswith(incomplete)}.items())


def leaves(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and annotation of every field, but for lists, which take an index."""
    for name, field in section.model_fields.items():
        inner = [part for part in parts(field.annotation) if hasattr(part, "model_fields")]
        if not inner:
            yield f"{above}{name}", field.annotation
        elif get_origin(field.annotation) is not tuple:
            yield from leaves(inner[0], f"{above}{name}.")


def parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and its parts."""
    yield annotation
    for inner in get_args(annotation):
        yield from parts(inner)


def choices(annotation: Any) -> list[str]:
    """List the values of a field that has choices."""
    found: list[str] = []
    for part in parts(annotation):
        if part is bool:
            found += ["true", "false"]
        elif part is type(None):
            found.append("null")
        elif get_origin(part) is Literal:
            found += [str(word) for word in get_args(part)]
    return found if any(word != "null" for word in found) else []


def parsed(name: str, metavar: str, parser: Callable[[str], object], help: str, **more: Any) -> Any:
    """Declare an option whose text is parsed, and which has no default to show."""
    panel = {"rich_help_panel": MACHINE} | more
    return typer.Option(name, metavar=metavar, parser=parser, help=help, show_default=False, **panel)


def value(name: str, metavar: str | None, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option by its names, with a blank between them, and what is shown of it."""
    return typer.Option(*name.split(), metavar=metavar, help=help, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option without a value, by its names with a blank between them."""
    return typer.Option(*name.split(), help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, completes: Any = None, **more: Any) -> Any:
    """Declare an argument, and what completes it."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=completes, **more)


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
        typed = dict(values)
        for name, (folder, option) in added.items():
            if (value := values.pop(name)) not in (None, False):
                if option.excluded and typed.get(option.excluded[0]):
                    raise Failure("usage", option.excluded[1], hints=(option.excluded[2],))
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
    info = value(option.name, option.metavar, option.help, option.panel, show_default=False, **more)
    where, default = inspect.Parameter.KEYWORD_ONLY, False if kind is bool else None
    wanted = kind if kind is bool else kind | None
    return inspect.Parameter(name, where, default=default, annotation=Annotated[wanted, info])


# ---- rates and sizes as people write them ------------------------------------------------------------------

# Bits in any case, as `tc` and providers write them; bytes with a capital B and a time: 2mb could be either.
RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmg]?)bits?(?:/s)?|([kmg]?)B/s)", re.IGNORECASE)
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
LOWEST_RATE = 1000.0  # bytes a second: below, pings and messages alone would fill it


def parse_rate(text: str) -> float:
    """Parse a rate into bytes a second. Raises typer.BadParameter, a usage error (exit 2)."""
    match = RATE.fullmatch(text.strip())
    if match is None or (match[3] is not None and "B" not in text):
        raise typer.BadParameter(f"{text!r} is not a rate; write 20mbit, 500kbit or 2MB/s")
    number, bits, size = match.groups()
    rate = float(number) * SCALE[(bits if size is None else size).lower()] / (8 if size is None else 1)
    if rate < LOWEST_RATE:
        raise typer.BadParameter(f"{text!r} is too slow for a run; at least 8kbit")
    return rate


def rate_text(rate: float) -> str:
    """Format a rate so that `parse_rate` reads it."""
    return f"{rate:.0f}B/s"


def parse_size(text: str) -> int:
    """Parse `20GiB` or `80GB` into bytes. Raises typer.BadParameter."""
    from recipes.config import parse_size

    try:
        return int(parse_size(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def set_cache(folder: str | None) -> str | None:
    """Set the cache of this process and of those that it starts: `machine.cache` reads the variable."""
    if folder:
        os.environ["COCKTAIL_CACHE"] = folder
    return folder


Json = Annotated[bool, flag("--json", "Write JSON: an object, or an event a line.", OUTPUT)]
Quiet = Annotated[bool, flag("--quiet -q", "Print results (id, path, URL) and errors.", OUTPUT)]
Verbose = Annotated[int, flag("--verbose -v", "Print more; -vv: debug.", OUTPUT, count=True)]
NoColor = Annotated[bool, flag("--no-color", "Print no colours, as with NO_COLOR.", OUTPUT)]
ProgressOption = Annotated[Progress, value("--progress", "KIND", "auto, rich, plain or none.", OUTPUT)]
Recipe = Annotated[str, argument("RECIPE", "A shipped recipe, a YAML file, or its address.", recipe_names)]
RecipeOrModel = Annotated[
    str | None,
    argument(
        "RECIPE", "A shipped recipe, a YAML file, its address, or a model.", recipe_names, show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    argument("KEY=VALUE", "Recipe fields: max_steps=20 training.seed=1.", overrides, show_default=False),
]
DataPath = Annotated[str | None, value("--data", "DATA", "jsonl, json, csv, parquet, txt, folder or hub id.")]
ModelName = Annotated[str | None, value("--model", "MODEL", "Train this: a folder or a hub id.")]
TrustCode = Annotated[bool, flag("--trust-remote-code", "Run Python code of the model here.", MACHINE)]
RunArgument = Annotated[str, argument("RUN", "A run's name, or its output folder.", run_names)]
Output = Annotated[Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder to write to.")]
Listen = Annotated[
    str | None, value("--listen", "HOST:PORT", "Pass packets on, aggregate here; port 0: any.", NETWORK)
]
PeerAdvertise = Annotated[
    str | None, value("--advertise", "HOST[:PORT]", "With --listen: address others dial.", NETWORK)
]
BIND = typer.Option("--bind", metavar="ADDRESS", rich_help_panel=NETWORK, help="Address to listen on.")
Bind = Annotated[str, BIND]
Port = Annotated[
    int | None,
    port(f"TCP port ({PORT}, or the next free one); 0: any.", rich_help_panel=NETWORK, show_default=False),
]
Advertise = Annotated[str | None, value("--advertise", "HOST[:PORT]", "Address in the run URL.", NETWORK)]
Detach = Annotated[bool, typer.Option("--detach", help="Return when the run has started; it goes on.")]
Detached = Annotated[bool, typer.Option("--detached", hidden=True)]
LifeLine = Annotated[bool, typer.Option("--life-line", hidden=True)]  # leave when stdin ends
DEVICES = "auto, cpu, mps, xpu, cuda:1 or cuda:0,1."
DEVICE = typer.Option("--device", metavar="DEVICE", rich_help_panel=MACHINE, help=DEVICES)
Device = Annotated[str, DEVICE]
MicroBatch = Annotated[
    int | None, value("--micro-batch-size", "N", "Sequences in memory at once.", MACHINE, min=1)
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
    value(
        "--cache-dir",
        "DIR",
        "Folder of downloaded models.",
        MACHINE,
        envvar="COCKTAIL_CACHE",
        callback=set_cache,
        show_default=False,
    ),
]
