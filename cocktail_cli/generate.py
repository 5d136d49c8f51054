"""`cocktail generate`: let a model write, to see what it learnt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cocktail_cli.completion import run_names
from cocktail_cli.errors import Failure
from cocktail_cli.options import Json, TrustCode
from cocktail_cli.runs import load


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|RUN", help="A model's folder, or a finished run's name.", autocompletion=run_names
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What it goes on from (default: stdin).", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="How much it writes at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="For the same text again at a temperature.")
    ] = None,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Let a model go on from a prompt.

    Example: cocktail generate outputs/smoke "The import statement"
    """
    from recipes.model import generate as write

    folder = Path(model) if Path(model).is_dir() else Path(load(model).output_dir)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        hint = "of a run that was cut short: cocktail export RUN -o DIR"
        raise Failure("model_invalid", f"{folder} holds no model (no config.json)", hints=(hint,))
    if prompt is None:
        if sys.stdin.isatty():
            raise Failure("usage", "no prompt", hints=('cocktail generate DIR "a prompt"',))
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise Failure("usage", "the prompt is empty", hints=('cocktail generate DIR "a prompt"',))
    text = write(folder, prompt, max_new_tokens, temperature, seed, trust_remote_code)
    if as_json:
        typer.echo(json.dumps({"v": 1, "model": str(folder), "prompt": prompt, "text": text}))
    else:
        typer.echo(prompt + text)
