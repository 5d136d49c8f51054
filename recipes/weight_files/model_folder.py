"""Check a model folder, and keep transformers quiet while it loads one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.errors import ModelError

LOADING = threading.RLock()  # held by whoever is in transformers' loading code (`quiet`)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into; its files are moved when all are written, the weights last.
    After an error it is removed, and `folder` is as it was.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # half a model helps nobody, least of all on a full disk
        raise
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.glob("*.safetensors"):  # written with the rights of a temporary file
        shutil.copymode(next(part.glob("*config.json")), file)
    for file in sorted(part.iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name)):
        os.replace(file, folder / file.name)
    part.rmdir()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers: the library tells, the command shows.

    For one thread at a time: while transformers loads a model it takes `tie_weights` and the initialization
    out of its classes, for the whole process. Two that do so together leave them out for good.
    """
    from transformers.utils import logging

    tell: Any = logging  # it has no types
    with LOADING:
        bars, level = tell.is_progress_bar_enabled(), tell.get_verbosity()
        tell.disable_progress_bar()
        tell.set_verbosity_error()
        try:
            yield
        finally:
            tell.set_verbosity(level)
            if bars:
                tell.enable_progress_bar()


def check_model_folder(folder: Path, name: str | None = None) -> None:
    called = name or str(folder)
    if not folder.is_dir():
        raise ModelError(f"no such model folder: {called}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{called}: no config.json, so this is no model saved by save_pretrained")
    if not any(next(folder.glob(pattern), None) for pattern in ("model*.safetensors", "pytorch_model*.bin")):
        raise ModelError(f"{called}: no weights (model.safetensors or pytorch_model.bin)")
