"""Load recipes by name, path or https address: `load_recipe("smoke", ["learning_rate=1e-4"])`.

Precedence: override > recipe > default; never the environment, so two people with one recipe get one run.
Nothing here imports torch or transformers: the CLI checks recipes while it completes a command line.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

from pydantic import ValidationError

from recipes.downloads import DownloadError, fetch_text
from recipes.errors import Problem, RecipeError
from recipes.foreign_json import parse_json

from .checks import check
from .document import (
    MAX_BYTES,
    Document,
    Extend,
    decoded,
    extension_sections,
    heart_alone,
    override,
    parse,
    read,
    resolve,
    set_value,
)
from .locations import local_paths
from .own_model import NEUTRAL, describe, run_name
from .schema import Recipe

LIBRARY = Path(__file__).parent.parent / "library"


@dataclass(frozen=True)
class Source:
    """The text of a recipe and where it comes from."""

    file: str  # path or address
    name: str  # of the file alone
    text: str


@dataclass(frozen=True)
class Resolved:
    """A checked recipe with the document it comes from."""

    recipe: Recipe
    document: Document  # `document.origin(key)`: where a value was set


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    data: str | None = None,  # replaces `datasets`
    model: str | None = None,  # replaces model.model_name_or_path, its revision and its tokenizer
    extend: Extend = heart_alone,  # the schema with sections of extensions
) -> Recipe:
    """Load and check a recipe: a frozen `Recipe`. Errors: RecipeError with every problem and its line."""
    return load_resolved(name_or_path, overrides, data, model, extend=extend).recipe


def load_resolved(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    data: str | None = None,
    model: str | None = None,
    chosen: Mapping[str, Any] = MappingProxyType({}),
    extend: Extend = heart_alone,
) -> Resolved:
    """Load a recipe as `load_recipe` does, and keep its document.

    Args:
        chosen: values of dotted keys that win over the recipe, and that overrides win over.
        extend: the schema with sections of extensions.
    """
    source = source_of(name_or_path, extend)
    document = parse(source.text, source.file)
    for name, value in chosen.items():
        key = resolve(name)
        set_value(document.values, key, value)
        document.overridden[key] = "chosen by model, data and memory"
    if data is not None:
        document.values["datasets"] = [{"path": data}]
        document.overridden[("datasets",)] = f"--data {data}"
    if model is not None:
        former = document.values.get("model")
        section = dict(former) if isinstance(former, dict) else {}
        for former_key in ("model_revision", "tokenizer_name_or_path", "pad_token"):
            section.pop(former_key, None)
            document.lines.pop(("model", former_key), None)
        document.values["model"] = {**section, "model_name_or_path": model}
        document.overridden[("model", "model_name_or_path")] = f"--model {model}"
        if str(name_or_path) == NEUTRAL:
            rows = data or document.values["datasets"][0]["path"]
            document.values["name"] = run_name(model, rows)
            document.values["description"] = describe(model, rows)
    recipe = check(document, override(document, overrides, extend), extend)
    if _is_address(source.file) and (problems := local_paths(document, recipe)):
        raise RecipeError(problems, source.file)
    return Resolved(recipe, document)


def recipe_from_json(text: str, extend: Extend | None = heart_alone, former: bool = False) -> Recipe:
    """Parse the resolved recipe that a peer receives (`Recipe.to_json`). Errors: RecipeError.

    Args:
        extend: the schema with sections of extensions; None: these sections are left out.
        former: it is of an earlier version: keys that are gone since then are left out.
    """
    try:
        values = parse_json(text)
        given: dict[str, Any] = values if isinstance(values, dict) else {}
        if extend is None:
            ours = {name: value for name, value in given.items() if name in Recipe.model_fields}
            return Recipe.model_validate_json(json.dumps(ours))
        return extend(given).model_validate_json(text)
    except ValueError as error:
        found = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        gone = [one["loc"] for one in found if one["type"] == "extra_forbidden"]
        if former and gone:
            for key in gone:
                set_value(given, key, None)
            return recipe_from_json(json.dumps(given), extend)
        problems = [
            Problem("the run's recipe", None, ".".join(map(str, e["loc"])), e["msg"]) for e in found
        ] or [Problem("the run's recipe", None, "", str(error))]
        raise RecipeError(problems, "the run's recipe (is it from another version?)") from None


def source_of(name_or_path: str | Path, extend: Extend = heart_alone) -> Source:
    """Read the text of a shipped recipe, a path, or an https address, which each command fetches anew.

    Errors: RecipeError.
    """
    file = str(name_or_path)
    if not _is_address(file):
        path = recipe_path(name_or_path, extend)
        return Source(str(path), path.name, read(path))
    try:
        if not file.startswith("https://"):
            raise DownloadError("recipes are read from https addresses only")
        text = decoded(fetch_text(file, MAX_BYTES), file)
    except DownloadError as error:
        raise RecipeError([Problem(file, None, "", str(error))]) from None
    name = Path(urlparse(file).path).name or "recipe"
    return Source(file, name if name.endswith((".yaml", ".yml")) else f"{name}.yaml", text)


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def shipped_recipes(extend: Extend = heart_alone) -> dict[str, Path]:
    """Return the files of the shipped recipes by name: ours, and those beside the keys of extensions."""
    modules = (sys.modules[section.__module__] for _, section in extension_sections(extend(None)))
    folders = (LIBRARY, *(Path(str(module.__file__)).parent for module in modules))
    return {file.stem: file for folder in folders for file in folder.glob("*.yaml")}


def recipe_path(name_or_path: str | Path, extend: Extend = heart_alone) -> Path:
    """Find the file of a shipped recipe or of a path. Errors: RecipeError with the nearest name."""
    text = str(name_or_path)
    path = Path(text).expanduser()
    if (shipped := shipped_recipes()).get(text) is None and not path.is_file():
        shipped = shipped_recipes(extend)
    if text in shipped:
        return shipped[text]  # a name wins over a file of that name: `smoke` is the same run everywhere
    if path.is_file():
        return path
    if path.is_dir():
        message, hint = "is a folder, not a recipe", ""
    elif path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1)
        message = "no such file"
        hint = f"did you mean {path.with_name(near[0])}?" if near else "shipped ones: cocktail recipes list"
    else:
        near = difflib.get_close_matches(text, shipped, n=1, cutoff=0.5)
        message = "no recipe of this name and no such file"
        hint = f"did you mean `{near[0]}`?" if near else f"shipped: {', '.join(sorted(shipped))}"
    raise RecipeError([Problem(text, None, "", message, hint)])


def list_recipes(extend: Extend = heart_alone) -> list[Recipe]:
    """Load every shipped recipe, by name."""
    return [load_recipe(name, extend=extend) for name in sorted(shipped_recipes(extend))]
