"""Weights that are there as `.bin` only, written once as safetensors: by the owner, for all peers.

A `.bin` is a pickle. It is opened here with `weights_only`, which gives tensors or refuses, and mapped into
memory, so that no more than one of its tensors is held at a time. What peers fetch is plain bytes behind a
header, the same for everybody.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from recipes.errors import ModelError
from recipes.weight_files import (
    atomic_folder,
    check_disk_space,
    meta_model,
    safetensors_header,
    stored_from_tensor,
    tied_names,
)

from .base_model import HASH_BLOCK, cached_commit, companion_patterns

ONE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHTS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BUFFERS = (torch.bool, torch.uint8, torch.int32, torch.int64)


def convert_bin_folder(folder: Path, place: Path, code: bool = False) -> Path:
    """A folder below `place` with the model in `folder`, its weights in one safetensors file.

    A model of the hub keeps its commit in the path (`commit_of`), and is made once. Errors: ModelError;
    OSError where the disk is full.
    """
    if cached_commit(folder):
        place = place / folder.parent.parent.name / "snapshots" / folder.name
        if (place / "model.safetensors").exists():
            return place
    else:  # never that of another model, with which a launch has failed
        place /= hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    tied, tensors = tied_names(meta_model(folder, code=code)), dict(tensors_in(folder))
    for name, first in tied.items():  # only where the file has one for both: else they may be no tied ones
        if name in tensors and first in tensors and tensors[name].data_ptr() == tensors[first].data_ptr():
            del tensors[name]
    with atomic_folder(place) as part:
        for name in {path.name for pattern in companion_patterns(code) for path in folder.glob(pattern)}:
            shutil.copyfile(folder / name, part / name)
        write(part / "model.safetensors", tensors)
    return place


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of all its files, in their order. Errors: ModelError."""
    for name in files_of(folder):
        try:
            held = load_bin(folder / name)
        except Exception as error:  # of any kind: what a pickle holds is somebody else's
            if "weights_only" in str(error):  # torch's own words go on to say how to run it all the same
                raise ModelError(
                    f"{folder}: a .bin file with more than tensors in it, which could be code"
                ) from error
            raise ModelError(f"{folder / name} cannot be read: {error}") from error
        if not isinstance(held, Mapping):
            raise ModelError(f"{folder / name} holds no weights by name")
        for key, tensor in held.items():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            if not isinstance(key, str) or kind not in (*WEIGHTS, *BUFFERS):
                floats = "float32, float16 or bfloat16"
                raise ModelError(f"{folder / name}: {key} is stored as {kind}, expected {floats}")
            yield key, tensor


def files_of(folder: Path) -> list[str]:
    """As transformers would look for them. Errors: ModelError."""
    if (folder / ONE).is_file():
        return [ONE]
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted({Path(name).name for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its weights cannot be read: {error}") from error


def load_bin(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # of before 2020: no archive


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Wide numbers first, so that each lies at a multiple of its width. Of two that share memory each is
    written."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    kinds = {name: stored_from_tensor(tensors[name]).kind for name in order}
    header = safetensors_header({"format": "pt"}, kinds)
    check_disk_space(path.parent, len(header) + sum(kind.size for kind in kinds.values()))
    with open(path, "wb") as file:
        file.write(header)
        for name in order:
            data = stored_from_tensor(tensors[name]).data
            for start in range(0, len(data), HASH_BLOCK):
                file.write(bytes(data[start : start + HASH_BLOCK]))
        file.flush()
        os.fsync(file.fileno())
