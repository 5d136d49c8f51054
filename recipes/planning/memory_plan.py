"""What a peer will take of its machine's memory, by part, from the model's config alone.

Arithmetic: no weight is read or made. The vectors follow from P, the number of trained parameters; what a
micro-batch takes is counted on tensors without memory (activations.py). Every part says its formula.
`scripts/bench_memory` measures the same on real processes; LOG.md has how far off it was.

    m = p P     coordinates that a round visits
    k = K m     of them that are sent
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.fingerprint import AT_ONCE as FINGERPRINT_AT_ONCE
from recipes.config import Compression, Model, Recipe
from recipes.models import autocast_dtype, meta_trained_model, trained_dtype
from recipes.training import STATE
from recipes.weight_files import GRADIENT_CHUNK, layout_of

from .activations import trace

FLOAT = 4  # bytes
SENT = 13  # bytes of a value that was sent: position, int64, number, float32, and its part of the packet
ENCODING = 12  # bytes of a value that is chosen; 11 to 14, as the threshold was met
DECODING = 18  # bytes of a value while it is decoded
FINGERPRINT = 50  # bytes of a value while the fingerprint follows it, so many values at a time
FOUR_BITS = 0.5 + FLOAT / 64  # bytes a quantized weight, with the scale of each 64
ROOMY = 24  # bytes of a trained parameter that are free where x' lies on a device that may be without it


@dataclass(frozen=True)
class Part:
    """One holder of memory."""

    name: str
    bytes: int
    how: str  # the formula, with its numbers
    host: bool = False  # in the host's memory, whatever the device


@dataclass(frozen=True)
class MemoryPlan:
    """What a peer holds at its fullest moment, beside Python and its libraries."""

    parts: tuple[Part, ...]
    parameters: int  # P
    flops: int  # of one micro-batch

    @property
    def bytes(self) -> int:
        """On the device; on a CPU that is all of it."""
        return sum(part.bytes for part in self.parts if not part.host)

    def part(self, name: str) -> int:
        return sum(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Machine:
    """What trains."""

    bytes: int  # that a program can have of it
    gpu: bool = False
    count: int = 1  # over so many a peer is spread


def plan_memory(recipe: Recipe, folder: Path, micro_batch: int, machine: Machine) -> MemoryPlan:
    """Of a peer with the model in `folder`, where a config is enough; of one device, where it is spread.

    Errors: ModelError.
    """
    model = with_attention(meta_trained_model(recipe, folder), recipe.model.attn_implementation)
    size, kind = layout_of(model).size, trained_dtype(recipe)
    frozen = frozen_bytes(model, recipe.model)
    away = machine.count > 1 or on_host(recipe.compression, size, machine, frozen)
    gathered = block_of(model) if machine.count > 1 else 0
    rows = f"{micro_batch} x {recipe.data.max_length} tokens"
    passed = trace(model, micro_batch, recipe.data.max_length, half_of(recipe, model, machine.gpu))
    # Of gradients in half precision so many at a time become float32, when the activations are gone.
    step = 0 if kind == torch.float32 else FLOAT * min(size, GRADIENT_CHUNK)
    parts = [
        Part("base", frozen, "frozen weights as they are held, and buffers"),
        *vectors(recipe, size, kind.itemsize, away),
    ]
    parts = [part if part.host else spread(part, machine.count) for part in parts]
    parts += [
        Part("gathered", 2 * kind.itemsize * gathered, "the largest block, whole, and its gradient"),
        Part("activations", passed.kept, f"what the layers keep of {rows}"),
        Part("logits", passed.most - passed.kept, f"logits, loss and what passes through, of {rows}"),
        exchange_part(recipe.compression, size, passed.most, step),
    ]
    return MemoryPlan(tuple(part for part in parts if part.bytes), size, passed.flops)


def vectors(recipe: Recipe, size: int, width: int, away: bool) -> list[Part]:
    """All that is as long as the vector. `width`: bytes of what the model computes with."""
    half, state = width < FLOAT, STATE[recipe.training.optim]
    masters = recipe.training.fp32_master_weights or not half
    own = "4 P, x_i" if masters else "2 P, x_i - x'"
    return [
        Part("weights", (FLOAT if masters else width) * size, own),
        Part("copy", width * size if half else 0, f"{width} P, what the model computes with"),
        Part("common", FLOAT * size, "4 P, x'", away),
        Part("gradient", width * size, f"{width} P"),
        Part("optimizer", round(state * size), f"{state:g} P"),
    ]


def spread(part: Part, count: int) -> Part:
    return part if count == 1 else replace(part, bytes=-(-part.bytes // count), how=f"({part.how}) / {count}")


def frozen_bytes(model: nn.Module, wanted: Model) -> int:
    """Of parameters that are not trained, and buffers. The linear layers but the head may be quantized."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    linear = {layer.weight for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head}
    each = FOUR_BITS if wanted.load_in_4bit else 1.0
    held = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        if not parameter.requires_grad:
            quantized = wanted.quantized and parameter in linear
            held += round(each * parameter.numel()) if quantized else parameter.nbytes
    return held


def half_of(recipe: Recipe, model: nn.Module, gpu: bool) -> torch.dtype | None:
    """What forward passes are computed in, on a CPU or a GPU that knows bfloat16; None: as the weights."""
    half = autocast_dtype(recipe.training, model, torch.device("cpu"))
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if half is None and gpu and recipe.training.bf16 == "auto" and kinds == {torch.float32}:
        return torch.bfloat16
    return half


def with_attention(model: nn.Module, wanted: str) -> nn.Module:
    """With the attention that is asked for; flash attention keeps what sdpa keeps."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft's
        inner = inner.get_base_model()
    if wanted == "eager":
        inner.set_attn_implementation("eager")
    elif wanted != "auto" and getattr(inner, "_supports_sdpa", False):
        inner.set_attn_implementation("sdpa")
    return model


def on_host(compression: Compression, size: int, machine: Machine, frozen: int) -> bool:
    """Whether x' lies beside the GPU. `auto`: where the GPU is short of room."""
    chosen = compression.state_device
    short = machine.bytes - frozen < ROOMY * size
    return machine.gpu and (chosen == "cpu" or (chosen == "auto" and short))


def block_of(model: nn.Module) -> int:
    """Parameters of the largest block that ranks gather: a layer, or what is in none."""
    named = set(getattr(model, "_no_split_modules", None) or ())
    layers = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if type(module).__name__ in named
    ]
    return max([sum(p.numel() for p in model.parameters()) - sum(layers), *layers])


def exchange_part(compression: Compression, size: int, beside: int, step: int = 0) -> Part:
    """Encoding runs beside the compute, taking in what came follows it: the activations are gone by then.

    encoding    4 m + 12 k: the difference, and what is chosen of it; of chunks 8 m + 20 k
    sent        13 k: what was sent waits, decoded, and its packet
    taking in   28 k: what came, and where that lies in the vector; 8 k less where all of it is visited
                4 m more where what stays decays
    """
    whole = compression.uncompressed_steps > 0  # to begin with
    m = size if whole else int(size * compression.random_ratio)
    k = size if whole else int(m * compression.topk_ratio)
    encoding = 2 * FLOAT * m + 20 * k if compression.topk_chunk and k < m else FLOAT * m + ENCODING * k
    taking_in = (28 if m < size else 20) * k + FINGERPRINT * min(k, FINGERPRINT_AT_ONCE)
    stays = FLOAT * m if compression.error_decay < 1 else 0
    most = max(encoding, DECODING * k + stays)
    after = SENT * k + max(taking_in, step) + stays - beside
    return Part("exchange", max(most, after), "4 m + 12 k, or 41 k after the compute")
