"""Load recipes by name, path or https address: `load_recipe("smoke", ["learning_rate=1e-4"])`.

Precedence: override > recipe > default; never the environment, so two people with one recipe get one run.
Nothing here imports torch or transformers: the CLI checks recipes while it completes a command line.

A recipe from the web may not name local files: its author is not the one who runs it, and the data of a run
go to all peers. What was set here, by an override, --data or --model, may be local; of that, others are told
the names alone.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
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
    Key,
    decoded,
    extension_sections,
    heart_alone,
    override,
    parse,
    read,
    resolve,
    set_value,
)
from .schema import Dataset, Recipe

TEMPLATES = Path(__file__).parent.parent / "templates"


# ---- local paths and hub ids -------------------------------------------------------------------------------

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")  # each also with .gz behind it
NOT_LOCAL = "a recipe from the web may only name what is on the hub, at https, or builtin"


def is_hub_id(path: str) -> bool:
    """True for the id of a hub data set: neither an existing path nor anything that looks like one."""
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not looks_like_path(path)
    return bool(named) and data_suffix(Path(path)) not in DATA_SUFFIXES and not Path(path).exists()


def looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).is_absolute()


def data_suffix(path: Path) -> str:
    """The suffix that tells the format of a data file; of one that is compressed, the suffix before `.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def local_paths(document: Document, recipe: Recipe) -> list[Problem]:
    """Problems of a recipe from the web: the keys in its text that name local files."""
    return [
        document.problem(key, f"{value} is of this machine: {NOT_LOCAL}", hint)
        for key, value, hint in _named_paths(recipe)
        if value is not None and (document.origin(key) or "").startswith(f"{document.file}:")
    ]


def _named_paths(recipe: Recipe) -> Iterator[tuple[Key, str | None, str]]:
    """Yield (key, its value where that is local, hint)."""
    model, template = recipe.model, recipe.data.chat_template
    yield ("model", "model_name_or_path"), _if_local(model.model_name_or_path), "--model FOLDER"
    if model.tokenizer_name_or_path is not None:
        hint = "tokenizer_name_or_path=FOLDER"
        yield ("model", "tokenizer_name_or_path"), _if_local(model.tokenizer_name_or_path), hint
    for section in ("datasets", "eval_datasets"):
        for number, dataset in enumerate(getattr(recipe, section)):
            hint = f"{section}.{number}.path=FILE"
            yield (section, number, "path"), _if_local(dataset.path), hint
            yield (section, number, "data_files"), _outside_repository(dataset), hint
    shipped = {"auto", *(file.stem for file in TEMPLATES.glob("*.jinja"))}
    yield ("data", "chat_template"), None if template in shipped else template, "chat_template=FILE"
    folder = recipe.checkpoint.output_dir
    yield ("checkpoint", "output_dir"), folder if _escapes(folder) else None, "checkpoint.output_dir=DIR"


def _if_local(path: str) -> str | None:
    return None if is_hub_id(path) or path.startswith(("builtin:", "http://", "https://")) else path


def _outside_repository(dataset: Dataset) -> str | None:
    files = dataset.data_files or ()
    files = (files,) if isinstance(files, str) else files
    return next((name for name in files if _escapes(name) and not name.startswith("https://")), None)


def _escapes(path: str) -> bool:
    """True where a path may lie outside the folder it is relative to."""
    rooted = PurePosixPath(path).is_absolute() or bool(PureWindowsPath(path).anchor)
    return rooted or path.startswith("~") or ":" in path or ".." in path.replace("\\", "/").split("/")


# ---- names of a run ----------------------------------------------------------------------------------------

NEUTRAL = "finetune"
LONGEST_NAME = 64  # letters of a recipe's name


def is_repository_id(path: str) -> bool:
    """Match owner/name, unless such a file or folder exists here."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", path)) and not Path(path).exists()


def public_name(path: str) -> str:
    """Return a hub id unchanged, and the last part of a local path."""
    if is_repository_id(path) or path.startswith(("builtin:", "https://")):
        return path
    return Path(path).name or Path(path).expanduser().resolve().name or path


def run_name(model: str, data: str) -> str:
    """Make a recipe's name of a model and data: `qwen3-0.6b-my` of Qwen/Qwen3-0.6B and my.jsonl."""
    words = [re.split("[/:]", public_name(path))[-1] for path in (model, data)]
    words[1] = re.sub(r"\.(jsonl|json|csv|tsv|parquet|txt)(\.gz)?$", "", words[1])
    slug = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip(".-")
    return slug[:LONGEST_NAME].rstrip(".-") or NEUTRAL


def describe(model: str, data: str) -> str:
    """Describe a run by its model and data, without local paths."""
    return f"{public_name(model)} fine-tuned on {public_name(data)}."


def method_of(recipe: Recipe) -> str:
    """Name the training method."""
    if recipe.lora is None:
        return "Full fine-tune"
    method = recipe.objective.method
    return f"LoRA adapters, by {method}," if method else "LoRA adapters"


def published_recipe(recipe: Recipe) -> dict[str, object]:
    """Dump the keys that the recipe sets, local files by their names alone."""
    values: dict[str, object] = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"checkpoint"})
    values["version"] = recipe.version
    model = recipe.model.model_dump(mode="json", exclude_defaults=True)
    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        if model.get(key):
            model[key] = public_name(model[key])
    values["model"] = model
    for key, datasets in (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets)):
        kept = [dataset.model_dump(mode="json", exclude_defaults=True) for dataset in datasets]
        if kept:
            values[key] = [
                one | {"path": public_name(dataset.path)} for one, dataset in zip(kept, datasets, strict=True)
            ]
    return values


# ---- loading -----------------------------------------------------------------------------------------------

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
    """Load every shipped recipe: that for a model of one's own, the smallest, then the others by name."""
    first = (NEUTRAL, "smoke")
    names = sorted(shipped_recipes(extend), key=lambda name: (name not in first, name))
    return [load_recipe(name, extend=extend) for name in names]
