"""A recipe from the web may name nothing on this machine: whoever wrote it is not whoever runs it, and what a
run trains on goes to all its peers.

What was said here, by an override, --data or --model, may.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from recipes.errors import Problem

from .document import Document, Key
from .locations import is_hub_id
from .schema import Dataset, Recipe

TEMPLATES = Path(__file__).parent.parent / "templates"
ASKED = "a recipe from the web may only name what is on the hub, at https, or builtin"


def names_what_is_here(document: Document, recipe: Recipe) -> list[Problem]:
    """The keys of `document` that say where, and say here."""
    return [
        document.problem(key, f"{value} is of this machine: {ASKED}", hint)
        for key, value, hint in places(recipe)
        if value is not None and (document.origin(key) or "").startswith(f"{document.file}:")
    ]


def places(recipe: Recipe) -> Iterator[tuple[Key, str | None, str]]:
    """(key, what it says where that is here and else None, what to do)."""
    model, template = recipe.model, recipe.data.chat_template
    yield ("model", "model_name_or_path"), here(model.model_name_or_path), "--model FOLDER"
    if model.tokenizer_name_or_path is not None:
        said = "tokenizer_name_or_path=FOLDER"
        yield ("model", "tokenizer_name_or_path"), here(model.tokenizer_name_or_path), said
    for section in ("datasets", "eval_datasets"):
        for number, dataset in enumerate(getattr(recipe, section)):
            said = f"{section}.{number}.path=FILE"
            yield (section, number, "path"), here(dataset.path), said
            yield (section, number, "data_files"), outside(dataset), said
    shipped = {"auto", *(file.stem for file in TEMPLATES.glob("*.jinja"))}
    yield ("data", "chat_template"), None if template in shipped else template, "chat_template=FILE"
    folder = recipe.checkpoint.output_dir
    yield ("checkpoint", "output_dir"), folder if leads_out(folder) else None, "checkpoint.output_dir=DIR"


def here(path: str) -> str | None:
    return None if is_hub_id(path) or path.startswith(("builtin:", "http://", "https://")) else path


def outside(dataset: Dataset) -> str | None:
    """The first of its files that is not one of the repository."""
    files = dataset.data_files or ()
    files = (files,) if isinstance(files, str) else files
    return next((name for name in files if leads_out(name) and not name.startswith("https://")), None)


def leads_out(path: str) -> bool:
    """Whether it may be elsewhere than below the folder it is put to."""
    rooted = PurePosixPath(path).is_absolute() or bool(PureWindowsPath(path).anchor)
    return rooted or path.startswith("~") or ":" in path or ".." in path.replace("\\", "/").split("/")
