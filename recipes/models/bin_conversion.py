"""Convert `.bin` weights to safetensors: once, by the host, for all peers.

A `.bin` is a pickle. It is opened with `weights_only`, which gives tensors or refuses, and mapped into
memory, so that at most one of its tensors is resident at a time. Peers fetch plain bytes behind a header.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from recipes.errors import ModelError
from recipes.foreign_json import parse_json
from recipes.weight_files import (
    TENSOR_DTYPES,
    WEIGHTS_FILE,
    atomic_folder,
    meta_model,
    safetensors_writer,
    stored_from_tensor,
    tied_names,
)

from .base_files import AS_SAFETENSORS, HASH_BLOCK, cached_commit, companion_patterns

SINGLE_FILE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def convert_bin_folder(folder: Path, place: Path, code: bool = False) -> Path:
    """Convert the model in `folder` to a folder below `place` with one safetensors file.

    The path of a hub model's conversion names its commit (`cached_commit`), and it is made once. Errors:
    ModelError; OSError where the disk is full.
    """
    if cached_commit(folder):
        place = place / folder.parent.parent.name / "snapshots" / folder.name
        if (place / WEIGHTS_FILE).exists():
            return place
    else:  # a name per source: never the conversion of another model, left by a launch that failed
        place /= hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    tied, tensors = tied_names(meta_model(folder, code=code)), dict(_tensors_in(folder))
    for name, first in tied.items():  # only where the file has one storage for both: else they may differ
        if name in tensors and first in tensors and tensors[name].data_ptr() == tensors[first].data_ptr():
            del tensors[name]
    with atomic_folder(place) as part:
        for name in {path.name for pattern in companion_patterns(code) for path in folder.glob(pattern)}:
            shutil.copyfile(folder / name, part / name)
        _write(part / WEIGHTS_FILE, tensors)
    return place


def _tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all `.bin` files, in their order. Errors: ModelError."""
    for name in _bin_files(folder):
        try:
            loaded = load_bin(folder / name)
        except Exception as error:  # any kind: a pickle holds whatever its author put there
            if "weights_only" in str(error):  # torch's own text goes on to say how to run it all the same
                said = f"{folder}: a .bin file with more than tensors in it, which could be code"
                raise ModelError(said, AS_SAFETENSORS) from error
            raise ModelError(
                f"{folder / name} cannot be read: {error}", "download or save it again"
            ) from error
        if not isinstance(loaded, Mapping):
            raise ModelError(f"{folder / name} holds no weights by name")
        for key, tensor in loaded.items():
            dtype = getattr(tensor, "dtype", type(tensor).__name__)
            if not isinstance(key, str) or dtype not in TENSOR_DTYPES:
                floats = "float32, float16 or bfloat16"
                raise ModelError(f"{folder / name}: {key} is stored as {dtype}, expected {floats}")
            yield key, tensor


def _bin_files(folder: Path) -> list[str]:
    """List the files that transformers would load. Errors: ModelError."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    try:
        index = parse_json((folder / INDEX).read_bytes())
        return sorted({Path(name).name for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its weights cannot be read: {error}") from error


def load_bin(path: Path) -> object:
    """Load a `.bin` file, memory-mapped where its format allows."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before 2020: no archive


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write wide dtypes first, so that each tensor is aligned. Two that share memory are both written."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    specs = {name: stored_from_tensor(tensors[name]).spec for name in order}
    with safetensors_writer(path, {"format": "pt"}, specs) as file:
        for name in order:
            data = stored_from_tensor(tensors[name]).data
            for start in range(0, len(data), HASH_BLOCK):
                file.write(bytes(data[start : start + HASH_BLOCK]))
