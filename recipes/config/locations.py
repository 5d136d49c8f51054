"""Local paths and hub ids, and the rule that a recipe from the web may not name local files.

Its author is not the one who runs it, and the data of a run go to all peers. What was set here, by an
override, --data or --model, may be local.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from recipes.errors import Problem

from .document import Document, Key
from .schema import Dataset, Recipe

TEMPLATES = Path(__file__).parent.parent / "templates"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")  # each also with .gz behind it
NOT_LOCAL = "a recipe from the web may only name what is on the hub, at https, or builtin"


def is_hub_id(path: str) -> bool:
    """True for the id of a hub data set: neither an existing path nor anything that looks like one."""
    if path.startswith(("builtin:", "http://", "https://")) or looks_like_data_file(path):
        return False
    return not Path(path).exists() and not any(c in path for c in "*?[")


def looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).is_absolute()


def looks_like_data_file(path: str) -> bool:
    return looks_like_path(path) or data_suffix(Path(path)) in DATA_SUFFIXES


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
