"""`cocktail export`: the model of a run, as its ledger has it, as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cocktail_cli import folder as in_folder
from cocktail_cli.errors import Failure
from cocktail_cli.options import Json, Quiet, RunArgument
from cocktail_cli.runs import load


def export(
    run: RunArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", metavar="DIR", help="A new folder.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's model: all that is committed, while it runs or after. Example: cocktail export RUN -o
    model
    """
    from cocktail_cli.snapshots import Place
    from recipes.recipe import recipe_from_json

    record = load(run)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise Failure(
            "output_in_use", f"{output_dir} is not an empty folder", hints=("choose another: -o DIR",)
        )
    source = Path(record.output_dir)
    recipe = recipe_from_json((source / in_folder.RESOLVED).read_text(encoding="utf-8"))
    rounds = Place(recipe, Path(record.base), source).write_model(output_dir)
    if as_json:
        typer.echo(json.dumps({"v": 1, "run": record.run, "model": str(output_dir), "rounds": rounds}))
        return
    typer.echo(str(output_dir))
    if not quiet:
        typer.echo(f'Next: cocktail generate {output_dir} "Once upon a time"', err=True)
