"""Tensors on the disk, in safetensors' format: whole under their name, or not at all.

Written piece by piece from wherever they lie, so that no second copy of a model is made in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

PIECE = 1 << 24  # elements brought to the host at a time: 64 MiB


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write float32 `tensors` under `path`, readable by its user alone.

    Raises:
        OSError: the disk is full, say. What was under `path` is still there, and nothing beside it.
    """
    part = path.with_name(path.name + ".part")  # a fixed name: what a killed writer left is written over
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(header(tensors, metadata))
            for tensor in tensors.values():
                flat = tensor.detach().reshape(-1)
                for start in range(0, flat.numel(), PIECE):
                    file.write(flat[start : start + PIECE].cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name != "nt":  # Windows has no handle for a folder; elsewhere the name must be on the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Length (u64) and JSON: what lies where, in the order of `tensors`."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}, expected float32")
        start, end = end, end + 4 * tensor.numel()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
