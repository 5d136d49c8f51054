"""Weights of a folder made anew: adapters merged into their base, or all as another kind of number.

W' = W + s B A     in float32, one weight at a time, whatever the size of the model
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recipes.adapters import delta, scale_of
from recipes.flat import Layout
from recipes.schema import Recipe
from recipes.state import check_room, weights_in, write_beside
from recipes.trained import KINDS, in_base
from recipes.weights import WEIGHTS, Kind, blueprint, open_vector, read_header, stored_in, write_header

Name = Literal["float32", "bfloat16", "float16"]
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
WINDOW = 1 << 22  # elements cast at a time


@dataclass(frozen=True)
class Adapter:
    """What is trained beside one weight."""

    A: Tensor  # (r, in)
    B: Tensor  # (out, r)
    transposed: bool  # the weight is (in, out)


def write_merged(
    folder: Path,
    recipe: Recipe,
    base: Path,
    layout: Layout,
    vector: Tensor,  # (P,) float32, adapters
    tokenizer: Path,
    dtype: Name = "float32",
) -> None:
    """The base with its adapters in it, as a model that needs no peft. Errors: ModelError, OSError."""
    assert recipe.lora is not None
    adapters, whole = taken_apart(base, layout, vector)
    scale = scale_of(recipe.lora)
    with closing(open_vector(base)) as stored:
        shapes = dict(zip(stored.layout.names, stored.layout.shapes, strict=True))
        called = dict(zip(stored.layout.names, stored.names, strict=True))
        extra = {
            name: tensor for name, tensor in whole.items() if name not in shapes
        }  # it was tied, and is no more
        width = torch.empty(0, dtype=KINDS[dtype]).element_size()
        every = shapes | {name: tuple(tensor.shape) for name, tensor in extra.items()}
        kinds = {
            called.get(name, name): Kind(STORED[dtype], shape, width * torch.Size(shape).numel())
            for name, shape in every.items()
        } | {name: tensor.kind for name, tensor in stored.others.items()}
        texts = dict(stored.texts)
        config = json.loads(texts["config.json"]) | {"dtype": dtype}
        texts["config.json"] = (
            json.dumps(config | ({"tie_word_embeddings": False} if extra else {}), indent=2) + "\n"
        )
        write_beside(folder, texts, tokenizer)
        header = write_header({"format": "pt"}, kinds)
        check_room(folder, len(header) + sum(kind.size for kind in kinds.values()))
        with open(folder / WEIGHTS, "wb") as file:
            file.write(header)
            for name, shape in every.items():
                weight = whole.get(name)
                if weight is None:
                    start = stored.layout.offsets[stored.layout.names.index(name)]
                    read = stored.read(start, start + torch.Size(shape).numel())
                    weight = torch.from_numpy(read).reshape(shape)
                if (found := adapters.get(name)) is not None:
                    weight += delta(found.A, found.B, scale, shape, found.transposed)
                file.write(as_bytes(weight, dtype))
            for tensor in stored.others.values():
                file.write(bytes(tensor.data[:]))
            file.flush()
            os.fsync(file.fileno())


def taken_apart(base: Path, layout: Layout, vector: Tensor) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Weight of the base -> its adapter; weight that was trained as a whole -> what it is now."""
    modules = dict(blueprint(base).named_modules())
    halves: dict[str, dict[str, Tensor]] = {}
    whole = dict[str, Tensor]()
    for name, part in zip(layout.names, layout.views(vector), strict=True):
        module, lora, rest = in_base(name).partition(".lora_")
        if lora:
            halves.setdefault(module, {})[rest.removeprefix("embedding_")[0]] = part
        else:
            whole[module] = part
    adapters = {
        f"{module}.weight": Adapter(
            both["A"], both["B"], type(modules[module]).__name__ in ("Conv1D", "Embedding")
        )
        for module, both in halves.items()
    }
    return adapters, whole


def recast(path: Path, dtype: Name) -> None:
    """The float32 tensors of a safetensors file as `dtype`, window by window; others stay what they are."""
    part = path.with_name(path.name + ".part")
    width = torch.empty(0, dtype=KINDS[dtype]).element_size()
    with ExitStack() as files:
        tensors = stored_in(path.parent, files)
        with open(path, "rb", buffering=0) as old:
            told = read_header(old, str(path)).metadata
        kinds = {
            name: Kind(STORED[dtype], t.shape, len(t.data) // 4 * width) if t.dtype == "F32" else t.kind
            for name, t in tensors.items()
        }
        check_room(path.parent, sum(kind.size for kind in kinds.values()))
        with open(part, "wb") as file:
            file.write(write_header({"format": told.get("format", "pt")}, kinds))
            for tensor in tensors.values():
                for at in range(0, len(tensor.data), 4 * WINDOW):
                    window = bytes(tensor.data[at : at + 4 * WINDOW])
                    if tensor.dtype == "F32":
                        window = as_bytes(torch.frombuffer(bytearray(window), dtype=torch.float32), dtype)
                    file.write(window)
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, path)


def recast_model(folder: Path, dtype: Name) -> None:
    """The weights of a model's or an adapter's folder as `dtype`."""
    recast(weights_in(folder), dtype)
    config = folder / "config.json"
    if config.is_file():
        told = json.loads(config.read_text(encoding="utf-8")) | {"dtype": dtype}
        config.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def as_bytes(tensor: Tensor, dtype: Name) -> bytes:
    flat = tensor.to(KINDS[dtype]).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
