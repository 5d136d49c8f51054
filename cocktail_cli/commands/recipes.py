"""`cocktail recipes list|show|copy|schema`: the recipes that ship with the package."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocktail_cli.assembly import recipe_type
from cocktail_cli.errors import Failure
from cocktail_cli.help_pages import CommandTable
from cocktail_cli.host import as_yaml
from cocktail_cli.machine import pick_device
from cocktail_cli.options import Device, Json, Quiet, Recipe, argument, flag
from cocktail_cli.ui import say, say_json, say_own, say_text, table
from cocktail_cli.volunteer import Resources, VolunteerLimits, lacking, requirements_column

if TYPE_CHECKING:
    from recipes.config import Recipe as Resolved

app = CommandTable(help="Shipped recipes, and the keys of a recipe.")


@app.command("list")
def list_(
    fits: Annotated[bool, flag("--fits", "Mark recipes whose requirements this machine meets.")] = False,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the recipes that come with cocktail.

    Example: cocktail recipes list --fits
    """
    from recipes.config import list_recipes

    used = pick_device(device) if fits else ""
    here = Resources.of(VolunteerLimits("", [used])) if fits else None
    rows = []
    for recipe in list_recipes(recipe_type):
        row = {
            "name": recipe.name,
            "model": recipe.model.model_name_or_path,
            "peers": f"{recipe.swarm.min_peers}+",
            "needs": requirements_column(recipe),
        }
        if here is not None:
            row["here"] = "; ".join(lacking_gpu(recipe, used) or lacking(recipe, here)) or "fits"
        rows.append(row | {"description": recipe.description})
    if as_json:
        say_json({"recipes": rows})
        return
    if quiet:
        say(*(row["name"] for row in rows))
        return
    say(*laid_out(rows, width_of_output()))
    say("Next: to try it cocktail launch smoke · cocktail plan NAME · cocktail launch NAME", err=True)
    say("      with your own: cocktail launch --model MODEL --data FILE", err=True)


def lacking_gpu(recipe: Resolved, device: str) -> list[str]:
    """Say that a recipe needs a GPU and none trains here: memory of the processor is no VRAM."""
    wants = recipe.swarm.requires
    return ["needs a GPU"] if wants is not None and wants.vram and device == "cpu" else []


def width_of_output() -> int | None:
    """Return the columns of the terminal; None where lines go elsewhere and may be as long as they are."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return shutil.get_terminal_size().columns if told else None


def laid_out(rows: list[dict[str, str]], width: int | None) -> Iterator[str]:
    """Lay rows out in columns; the last ones go on below where they do not fit, wrapped between words."""
    columns, below = list(rows[0]), list[str]()

    def lines() -> list[str]:
        titles = dict.fromkeys(map(str.upper, columns), "<")
        return [*table(titles, [[row[key] for key in columns] for row in rows])]

    while width is not None and len(columns) > 1 and max(map(len, lines())) > width:
        below.insert(0, columns.pop())
    title, *shown = lines()
    yield title
    for line, row in zip(shown, rows, strict=True):
        yield line
        for key in below:
            text, indent = row[key] if key == "description" else f"{key}: {row[key]}", " " * 4
            wrapper = textwrap.TextWrapper(width or 80, indent, indent, break_on_hyphens=False)
            wrapper.break_long_words = False
            yield from wrapper.wrap(text)


@app.command("show")
def show(
    recipe: Recipe,
    resolved: Annotated[
        bool, flag("--resolved", "Show all keys with their values, defaults included.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print a recipe as it is written, or with every key.

    Example: cocktail recipes show smoke --resolved
    """
    from recipes.config import load_resolved, source_of

    if as_json or resolved:
        loaded = load_resolved(recipe, extend=recipe_type).recipe
        values = loaded.model_dump(mode="json")
        if as_json:
            say_json({"hash": loaded.recipe_hash, "recipe": values})
        else:
            say_text(as_yaml(json.dumps(values)).rstrip("\n"))
        return
    say_text(source_of(recipe, recipe_type).text.rstrip("\n"))


@app.command("copy")
def copy(
    recipe: Recipe,
    destination: Annotated[
        Path | None, argument("DEST", "Where to write the copy (default: NAME.yaml in this folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite DEST.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a recipe, to change it.

    Example: cocktail recipes copy smoke my.yaml

    With --json one object: recipe, the path of the copy.
    """
    from recipes.config import source_of

    source = source_of(recipe, recipe_type)
    target = destination or Path(source.name)
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise Failure("usage", f"{target} exists already", hints=("--force overwrites it",))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.text, encoding="utf-8", newline="")
    if as_json:
        say_json({"recipe": str(target)})
        return
    say_own(str(target))
    if not quiet:
        say(f"Next: cocktail launch {shlex.quote(str(target))}", err=True)


@app.command("schema")
def schema(
    field: Annotated[
        str | None, argument("FIELD", "A section or one key (default: all).", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the keys of a recipe: default, type, meaning. With --json: as JSON schema.

    Examples: cocktail recipes schema training
    cocktail recipes schema learning_rate --json
    """
    from recipes.config import describe_keys, json_schema

    if as_json:
        say(json.dumps(json_schema(field or "", recipe_type())))
        return
    found = describe_keys(field or "", recipe_type())
    keys, defaults = max(len(row.key) for row in found), max(len(row.default) for row in found)
    for row in found:
        meaning = f"  # {row.meaning}" if row.meaning else ""
        say(f"{row.key:<{keys}}  {row.default:<{defaults}}  {row.type}{meaning}")
