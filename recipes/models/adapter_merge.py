"""Rewrite the weights of a folder: merge adapters into their base, or convert the dtype.

W' = W + s B A     in float32, one weight at a time, whatever the size of the model; DoRA: see lora.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recipes.config import Recipe
from recipes.foreign_json import parse_object, read_object
from recipes.weight_files import (
    TENSOR_DTYPES,
    WEIGHTS_FILE,
    Layout,
    TensorSpec,
    open_tensors,
    safetensors_writer,
    weights_file_in,
    write_model_files,
)

from .base_model import configs_with_eos
from .causal_lm import open_vector
from .lora import adapter_scale, split_adapters
from .trainable import DTYPES, meta_trained_model

Dtype = Literal["float32", "bfloat16", "float16"]
WINDOW = 1 << 22  # elements converted at a time


@dataclass(frozen=True)
class AdapterVector:
    """A vector of trained adapter parameters and its layout."""

    layout: Layout
    values: Tensor  # (P,) float32

    def by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.layout.names, self.layout.views(self.values), strict=True))


def write_merged(
    folder: Path,
    recipe: Recipe,
    base: Path,
    trained: AdapterVector,
    tokenizer: Path,
    dtype: Dtype = "float32",
) -> None:
    """Write the base with its adapters merged: a model that needs no peft. Errors: ModelError, OSError."""
    assert recipe.lora is not None
    code = recipe.model.trust_remote_code
    adapters, full = split_adapters(meta_trained_model(recipe, base), trained.by_name())
    scale = adapter_scale(recipe.lora)
    with closing(open_vector(base, code)) as stored:
        shapes = dict(zip(stored.layout.names, stored.layout.shapes, strict=True))
        untied = {name: tuple(tensor.shape) for name, tensor in full.items() if name not in shapes}
        file_names = dict(zip(stored.layout.names, stored.names, strict=True))
        every = (shapes | untied).items()
        specs = {file_names.get(name, name): tensor_spec(shape, dtype) for name, shape in every}
        specs |= {name: tensor.spec for name, tensor in stored.buffers.items()}
        texts = configs_with_eos(stored.config_files, recipe.model, tokenizer)
        write_model_files(folder, _config_files(texts, dtype, bool(untied)), tokenizer)
        with safetensors_writer(folder / WEIGHTS_FILE, {"format": "pt"}, specs) as file:
            for (name, shape), start in zip(shapes.items(), stored.layout.offsets, strict=False):
                weight = full.get(name)
                if weight is None:
                    weight = torch.from_numpy(stored.read(start, start + prod(shape))).reshape(shape)
                if (found := adapters.get(name)) is not None:
                    weight = found.merged(weight, scale)
                file.write(as_bytes(weight, dtype))
            for name in untied:
                file.write(as_bytes(full[name], dtype))
            for tensor in stored.buffers.values():
                file.write(bytes(tensor.data[:]))


def _config_files(texts: Mapping[str, str], dtype: Dtype, untied: bool) -> dict[str, str]:
    """Set the dtype in the base's config; its output layer may no longer be tied to the embedding."""
    config = parse_object(texts["config.json"], "config.json") | {"dtype": dtype}
    config |= {"tie_word_embeddings": False} if untied else {}
    return {**texts, "config.json": json.dumps(config, indent=2) + "\n"}


def tensor_spec(shape: tuple[int, ...], dtype: Dtype) -> TensorSpec:
    stored = DTYPES[dtype]
    return TensorSpec(TENSOR_DTYPES[stored], shape, prod(shape) * stored.itemsize)


def convert_file_dtype(path: Path, dtype: Dtype) -> None:
    """Convert the float32 tensors of a safetensors file to `dtype`, window by window; others are copied."""
    part = path.with_name(path.name + ".part")
    with ExitStack() as files:
        tensors = open_tensors(path.parent, files)
        specs = {
            name: tensor_spec(tensor.shape, dtype) if tensor.dtype == "F32" else tensor.spec
            for name, tensor in tensors.items()
        }
        with safetensors_writer(part, {"format": "pt"}, specs) as file:
            for tensor in tensors.values():
                for at in range(0, len(tensor.data), 4 * WINDOW):
                    window = bytes(tensor.data[at : at + 4 * WINDOW])
                    if tensor.dtype == "F32":
                        window = as_bytes(torch.frombuffer(bytearray(window), dtype=torch.float32), dtype)
                    file.write(window)
    os.replace(part, path)


def convert_dtype(folder: Path, dtype: Dtype) -> None:
    """Convert the weights in a model's or an adapter's folder to `dtype`, and say so in its config."""
    convert_file_dtype(weights_file_in(folder), dtype)
    config = folder / "config.json"
    if config.is_file():
        values = read_object(config) | {"dtype": dtype}
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def as_bytes(tensor: Tensor, dtype: Dtype) -> bytes:
    flat = tensor.to(DTYPES[dtype]).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
