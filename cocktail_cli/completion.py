"""Shell completion of recipes, runs of this machine, recipe fields and their values. Imports nothing heavy.

Completion must never print an error: where something cannot be read it offers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

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
    from cocktail_cli.machine import known_runs

    with suppress(OSError):
        return beginning(incomplete, [(run.run, f"{run.state}, {run.recipe}") for run in known_runs()])
    return []


def unfinished_runs(incomplete: str) -> Offers:
    """Offer the runs that can be resumed."""
    return [offer for offer in run_names(incomplete) if not offer[1].startswith(("finished", "stopped"))]


def local_peers(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the local peers of the run that is named before."""
    from cocktail_cli.errors import Failure
    from cocktail_cli.machine import load_run

    with suppress(OSError, Failure):
        folder = Path(load_run(str(ctx.params.get("run"))).output_dir) / "peers"
        return beginning(incomplete, [(path.stem, "local peer") for path in folder.glob("*.jsonl")])
    return []


def overrides(incomplete: str) -> Offers:
    """Offer `training.learning_rate=` and `learning_rate=`; after the = the choices, if there are any."""
    from cocktail_cli.assembly import recipe_type

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
