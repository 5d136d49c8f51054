"""`cocktail validate`: check a recipe, its data and its model before anything large is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli.machine import check_trust
from cocktail_cli.options import DataPath, Json, ModelName, Overrides, Quiet, RecipeOrModel, TrustCode, flag
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.ui import print_findings, say, say_text

if TYPE_CHECKING:
    from recipes.config import Resolved
    from recipes.errors import Finding

COLUMN = 56  # column of the origins


def validate(
    recipe: RecipeOrModel = None,
    overrides: Overrides = None,
    data: DataPath = None,
    model: ModelName = None,
    offline: Annotated[
        bool,
        flag(
            "--offline", "Do not contact the Hugging Face hub; files missing from the cache are not checked."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    print_: Annotated[
        bool, flag("--print", "Print every value with its origin, and check nothing else.")
    ] = False,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a recipe: keys, model, data, and the first 1,000 rows.

    Of a model on the hub only config and tokenizer are fetched, of its data sets the first rows.

    Examples: cocktail validate my.yaml learning_rate=1e-4 --data rows.jsonl
    cocktail validate smoke --print
    cocktail validate --model ./my-model --data rows.jsonl

    With --json one object: {"v": 1, "recipe", "hash", "findings": [{"level", "about", "text", "hint"}]}
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub and datasets are first imported
    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    request, said = request.choose(room_for(["auto"]) if request.is_own else None)
    resolved = request.resolve()
    if print_:
        say_text(printed(resolved, as_json))
        return
    checked = resolved.recipe
    told, beside = findings(resolved, said, offline), {"recipe": checked.name, "hash": checked.recipe_hash}
    print_findings(told, as_json, quiet, "recipe_invalid", strict, **beside)
    if not as_json and not quiet:
        again = request.typed()
        say(f"Next: cocktail plan {again}", f"      cocktail launch {again}", err=True)


def findings(resolved: Resolved, notes: Sequence[str], offline: bool = False) -> Iterator[Finding]:
    """Check the recipe itself first, as that needs no torch, then its model and data."""
    from recipes.errors import Finding

    said = sum(origin is not None for _, _, origin in values(resolved))
    digest = resolved.recipe.recipe_hash[:8]
    yield Finding("ok", "recipe", f"schema {resolved.recipe.version}, {said} keys set, sha256 {digest}")
    yield from (Finding("ok", "recipe", note) for note in notes)
    from recipes.planning import examine

    yield from examine(resolved.recipe, offline)


def values(resolved: Resolved) -> Iterator[tuple[tuple[str | int, ...], Any, str | None]]:
    """Yield (key, value, origin) in the order of the schema; a mapping inside a section is one value."""
    for name, held in resolved.recipe.model_dump(mode="json").items():
        inner: list[tuple[str | int, ...]] = [(name,)]
        if isinstance(held, dict):
            inner = [(name, leaf) for leaf in held]
        elif isinstance(held, list) and isinstance(next(iter(held), None), dict):
            inner = [(name, place, leaf) for place, item in enumerate(held) for leaf in item]
        for key in inner:
            value = held
            for part in key[1:]:
                value = value[part]
            yield key, value, resolved.document.origin(key)


def printed(resolved: Resolved, as_json: bool) -> str:
    """Format the recipe with all its keys as YAML, with the origin of each value as a comment."""
    if as_json:
        origins = {".".join(map(str, key)): origin or "default" for key, _, origin in values(resolved)}
        checked = resolved.recipe
        keys = checked.model_dump(mode="json")
        return json.dumps({"v": 1, "hash": checked.recipe_hash, "recipe": keys, "origins": origins})
    lines: list[str] = []
    above: tuple[str | int, ...] = ()
    for key, value, origin in values(resolved):
        if len(key) > 1 and key[:1] != above[:1]:
            lines.append(f"{key[0]}:")
        first = len(key) == 3 and key[:2] != above[:2]  # first key of a list entry
        indent = "" if len(key) == 1 else "  - " if first else "    " if len(key) == 3 else "  "
        lines.append(f"{indent + written(str(key[-1]), value):<{COLUMN}}  # {origin or 'default'}")
        above = key
    return "\n".join(lines)


def written(name: str, value: Any) -> str:
    """Format `name: value` on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return f"{name}: {text.removesuffix(chr(10)).removesuffix('...').strip()}"
