"""Check and write model folders, and keep transformers quiet while it loads one."""

from __future__ import annotations

import os
import shutil
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.downloads import from_pretrained_options
from recipes.errors import ModelError
from recipes.foreign_json import read_object

from .safetensors_files import ADAPTER_FILE, WEIGHTS_FILE

LONGEST_WORDS = 300  # characters of transformers' error texts, some of which list every model there is
LOADING = threading.RLock()  # serializes transformers' loading code (`quiet_transformers`)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a sibling of `folder` to write into; its files move to `folder` at the end, the weights last.

    After an error the sibling is removed and `folder` is unchanged.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # half a model is of no use, least of all on a full disk
        raise
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.glob("*.safetensors"):  # written with the rights of a temporary file
        shutil.copymode(next(part.glob("*config.json")), file)
    for file in sorted(part.iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name)):
        os.replace(file, folder / file.name)
    part.rmdir()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers: the library reports, the CLI shows.

    One thread at a time: while transformers loads a model it patches `tie_weights` and the initialization of
    its classes, for the whole process. Two threads that do so together leave them patched for good.
    """
    from transformers.utils import logging

    untyped: Any = logging
    with LOADING:
        bars, level = untyped.is_progress_bar_enabled(), untyped.get_verbosity()
        untyped.disable_progress_bar()
        untyped.set_verbosity_error()
        try:
            yield
        finally:
            untyped.set_verbosity(level)
            if bars:
                untyped.enable_progress_bar()


def check_model_folder(folder: Path, name: str | None = None) -> None:
    """Raise ModelError unless `folder` has a config and weights; `name`: what the message calls it."""
    name = name or str(folder)
    if not folder.is_dir():
        raise ModelError(f"no such model folder: {name}")
    check_config(folder, name)
    if not any(next(folder.glob(pattern), None) for pattern in ("model*.safetensors", "pytorch_model*.bin")):
        hint = "GGUF is for inference; give the folder that it was made from"
        if next(folder.glob("*.gguf"), None) is None:
            hint = "save_pretrained writes them, or give the folder that has them"
        raise ModelError(f"{name}: no weights (model.safetensors or pytorch_model.bin) (hint: {hint})")


def check_config(folder: Path, name: str) -> None:
    """Raise ModelError unless config.json is a JSON object; `name`: what the message calls the folder."""
    if not (folder / "config.json").is_file():
        hint = "(hint: a folder that save_pretrained wrote, of model and tokenizer, or a hub id)"
        raise ModelError(f"{name}: no config.json, so this is no model saved by save_pretrained {hint}")
    read_object(folder / "config.json", f"{name}/config.json")


def not_loadable(folder: Path, what: str, error: Exception) -> ModelError:
    """Make the error of a folder that transformers does not load as `what`, with transformers' own words.

    A tokenizer is loaded by way of the config: what is wrong there is said of the config.
    """
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        try:
            AutoConfig.from_pretrained(folder, **from_pretrained_options(folder, code=False))
        except ModelError:
            pass  # with code of its own, which is not run to explain an error
        except Exception as of_config:  # any kind: the class of the config checks its values
            what, error = "config.json", of_config
    words = textwrap.shorten(str(error), LONGEST_WORDS, placeholder=" ...")
    return ModelError(f"{folder}: transformers cannot load this {what}: {words}")


def weights_file_in(folder: Path) -> Path:
    """The weights of a model's or an adapter's folder."""
    return folder / (ADAPTER_FILE if (folder / ADAPTER_FILE).is_file() else WEIGHTS_FILE)


def write_model_files(folder: Path, config_files: Mapping[str, str], tokenizer: Path) -> None:
    """Turn a folder of weights into a model folder: write its configs, copy the files of a tokenizer."""
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        shutil.copyfile(file, folder / file.name)
    for name, text in config_files.items():
        (folder / name).write_text(text, encoding="utf-8")
