"""Check and write model folders, and keep transformers quiet while it loads one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.errors import ModelError

from .safetensors_files import ADAPTER_FILE, WEIGHTS_FILE

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
    if not (folder / "config.json").is_file():
        hint = "(hint: a folder that save_pretrained wrote, of model and tokenizer, or a hub id)"
        raise ModelError(f"{name}: no config.json, so this is no model saved by save_pretrained {hint}")
    if not any(next(folder.glob(pattern), None) for pattern in ("model*.safetensors", "pytorch_model*.bin")):
        raise ModelError(f"{name}: no weights (model.safetensors or pytorch_model.bin)")


def weights_file_in(folder: Path) -> Path:
    """The weights of a model's or an adapter's folder."""
    return folder / (ADAPTER_FILE if (folder / ADAPTER_FILE).is_file() else WEIGHTS_FILE)


def write_model_files(folder: Path, config_files: Mapping[str, str], tokenizer: Path) -> None:
    """Turn a folder of weights into a model folder: write its configs, copy the files of a tokenizer."""
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        shutil.copyfile(file, folder / file.name)
    for name, text in config_files.items():
        (folder / name).write_text(text, encoding="utf-8")
