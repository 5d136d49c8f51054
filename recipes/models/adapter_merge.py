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
    WEIGHTS_FILE,
    Layout,
    TensorSpec,
    check_disk_space,
    meta_model,
    open_tensors,
    open_vector,
    safetensors_header,
    weights_file_in,
    write_model_files,
)

from .lora import adapter_delta, adapter_scale
from .trainable import DTYPES, base_parameter_name

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
    adapters, whole = split_adapters(meta_model(base, code=code), layout, vector)
    scale = adapter_scale(recipe.lora)
    with closing(open_vector(base, code)) as stored:
        shapes = dict(zip(stored.layout.names, stored.layout.shapes, strict=True))
        untied = {name: tuple(tensor.shape) for name, tensor in whole.items() if name not in shapes}
        called = dict(zip(stored.layout.names, stored.names, strict=True))
        kinds = {
            called.get(name, name): tensor_spec(shape, dtype) for name, shape in (shapes | untied).items()
        }
        kinds |= {name: tensor.kind for name, tensor in stored.others.items()}
        write_model_files(folder, told(stored.texts, dtype, bool(untied)), tokenizer)
        with safetensors_writer(folder / WEIGHTS_FILE, {"format": "pt"}, kinds) as file:
            for name, start, shape in zip(
                stored.layout.names, stored.layout.offsets, shapes.values(), strict=False
            ):
                weight = whole.get(name)
                if weight is None:
                    weight = torch.from_numpy(stored.read(start, start + prod(shape))).reshape(shape)
                if (found := adapters.get(name)) is not None:
                    weight += adapter_delta(found.A, found.B, scale, shape, found.transposed)
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


def tensor_spec(shape: tuple[int, ...], dtype: Name) -> TensorSpec:
    return TensorSpec(STORED[dtype], shape, prod(shape) * DTYPES[dtype].itemsize)


@contextmanager
def safetensors_writer(
    path: Path, metadata: Mapping[str, str], kinds: Mapping[str, TensorSpec]
) -> Iterator[BinaryIO]:
    """A safetensors file, to write the tensors into one after the other; on the disk at the end."""
    header = safetensors_header(metadata, kinds)
    check_disk_space(path.parent, len(header) + sum(kind.size for kind in kinds.values()))
    with open(path, "wb") as file:
        file.write(header)
        yield file
        file.flush()
        os.fsync(file.fileno())


def split_adapters(
    model: nn.Module, layout: Layout, vector: Tensor
) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Weight of the base -> its adapter; weight that was trained as a whole -> what it is now."""
    modules = dict(model.named_modules())
    halves: dict[str, dict[str, Tensor]] = {}
    whole = dict[str, Tensor]()
    for name, part in zip(layout.names, layout.views(vector), strict=True):
        module, lora, rest = base_parameter_name(name).partition(".lora_")
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


def convert_file_dtype(path: Path, dtype: Name) -> None:
    """The float32 tensors of a safetensors file as `dtype`, window by window; others stay what they are."""
    part = path.with_name(path.name + ".part")
    with ExitStack() as files:
        tensors = open_tensors(path.parent, files)
        kinds = {
            name: tensor_spec(tensor.shape, dtype) if tensor.dtype == "F32" else tensor.kind
            for name, tensor in tensors.items()
        }
        with safetensors_writer(part, {"format": "pt"}, kinds) as file:
            for tensor in tensors.values():
                for at in range(0, len(tensor.data), 4 * WINDOW):
                    window = bytes(tensor.data[at : at + 4 * WINDOW])
                    if tensor.dtype == "F32":
                        window = as_bytes(torch.frombuffer(bytearray(window), dtype=torch.float32), dtype)
                    file.write(window)
    os.replace(part, path)


def convert_dtype(folder: Path, dtype: Name) -> None:
    """The weights of a model's or an adapter's folder as `dtype`."""
    convert_file_dtype(weights_file_in(folder), dtype)
    config = folder / "config.json"
    if config.is_file():
        told = json.loads(config.read_text(encoding="utf-8")) | {"dtype": dtype}
        config.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def as_bytes(tensor: Tensor, dtype: Name) -> bytes:
    flat = tensor.to(DTYPES[dtype]).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
