"""Weights of a folder made anew: adapters merged into their base, or all as another kind of number.

W' = W + s B A     in float32, one weight at a time, whatever the size of the model
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor, nn

from recipes.config import Recipe
from recipes.weight_files import (
    WEIGHTS,
    Kind,
    Layout,
    blueprint,
    check_room,
    open_vector,
    stored_in,
    weights_in,
    write_beside,
    write_header,
)

from .lora import delta, scale_of
from .trainable import KINDS, in_base

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
    code = recipe.model.trust_remote_code
    adapters, whole = taken_apart(blueprint(base, code=code), layout, vector)
    scale = scale_of(recipe.lora)
    with closing(open_vector(base, code)) as stored:
        shapes = dict(zip(stored.layout.names, stored.layout.shapes, strict=True))
        untied = {name: tuple(tensor.shape) for name, tensor in whole.items() if name not in shapes}
        called = dict(zip(stored.layout.names, stored.names, strict=True))
        kinds = {called.get(name, name): kind_of(shape, dtype) for name, shape in (shapes | untied).items()}
        kinds |= {name: tensor.kind for name, tensor in stored.others.items()}
        write_beside(folder, told(stored.texts, dtype, bool(untied)), tokenizer)
        with begun(folder / WEIGHTS, {"format": "pt"}, kinds) as file:
            for name, start, shape in zip(
                stored.layout.names, stored.layout.offsets, shapes.values(), strict=False
            ):
                weight = whole.get(name)
                if weight is None:
                    weight = torch.from_numpy(stored.read(start, start + prod(shape))).reshape(shape)
                if (found := adapters.get(name)) is not None:
                    weight += delta(found.A, found.B, scale, shape, found.transposed)
                file.write(as_bytes(weight, dtype))
            for name in untied:
                file.write(as_bytes(whole[name], dtype))
            for tensor in stored.others.values():
                file.write(bytes(tensor.data[:]))


def told(texts: Mapping[str, str], dtype: Name, untied: bool) -> dict[str, str]:
    """The base's texts; its output layer may have been tied to the embedding, and is so no more."""
    config = json.loads(texts["config.json"]) | {"dtype": dtype}
    config |= {"tie_word_embeddings": False} if untied else {}
    return {**texts, "config.json": json.dumps(config, indent=2) + "\n"}


def kind_of(shape: tuple[int, ...], dtype: Name) -> Kind:
    return Kind(STORED[dtype], shape, prod(shape) * KINDS[dtype].itemsize)


@contextmanager
def begun(path: Path, metadata: Mapping[str, str], kinds: Mapping[str, Kind]) -> Iterator[BinaryIO]:
    """A safetensors file, to write the tensors into one after the other; on the disk at the end."""
    header = write_header(metadata, kinds)
    check_room(path.parent, len(header) + sum(kind.size for kind in kinds.values()))
    with open(path, "wb") as file:
        file.write(header)
        yield file
        file.flush()
        os.fsync(file.fileno())


def taken_apart(
    model: nn.Module, layout: Layout, vector: Tensor
) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Weight of the base -> its adapter; weight that was trained as a whole -> what it is now."""
    modules = dict(model.named_modules())
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
    with ExitStack() as files:
        tensors = stored_in(path.parent, files)
        kinds = {
            name: kind_of(tensor.shape, dtype) if tensor.dtype == "F32" else tensor.kind
            for name, tensor in tensors.items()
        }
        with begun(part, {"format": "pt"}, kinds) as file:
            for tensor in tensors.values():
                for at in range(0, len(tensor.data), 4 * WINDOW):
                    window = bytes(tensor.data[at : at + 4 * WINDOW])
                    if tensor.dtype == "F32":
                        window = as_bytes(torch.frombuffer(bytearray(window), dtype=torch.float32), dtype)
                    file.write(window)
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
