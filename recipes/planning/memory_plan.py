"""Plan the memory of a peer, part by part, from the model's config alone.

No weight is read or made. The vectors follow from P, the number of trained parameters; a micro-batch is
traced on fake tensors (activations.py). Every part names its formula. `scripts/bench_memory` measures the
same on real processes; LOG.md has how far off it was.

    m = p P     sampled coordinates of a round
    k = K m     of them that are sent, with the largest K of the adaptive rate
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.fingerprint import AT_ONCE as FINGERPRINT_AT_ONCE
from recipes.algorithm import ON_GPU, encoding_bytes, most_sent
from recipes.config import Compression, Model, Recipe
from recipes.hardware import HalfPrecision
from recipes.models import autocast_dtype, meta_trained_model, trained_dtype
from recipes.objectives import causal_model
from recipes.training import GRADIENT_CHUNK, LEAVE, SCRATCH, embeddings_of, optimizer_bytes, step_flops
from recipes.weight_files import Layout, layout_of

from .activations import trace

FLOAT = 4  # bytes
SENT = 13  # bytes of a sent value: position, int64; number, float32; its share of the packet
DECODING = 18  # bytes of a value while it is decoded
BROUGHT = 16  # bytes of a sent value: its place and number in the aggregate, and in the own update
ROUNDING = 6  # bytes of a value of a parameter that is rounded at random
FINGERPRINT = 50  # bytes of a value while the fingerprint is updated, FINGERPRINT_AT_ONCE values at a time
FOUR_BITS = 0.5 + FLOAT / 64  # bytes of a quantized weight, with one scale for 64
DOUBLE = 0.5 + 1 / 64 + FLOAT / (64 * 256)  # the same where scales take one byte, with one scale for 256


def count_text(parameters: int) -> str:
    """Format a number of parameters: `1.32 B`, `125.0 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


@dataclass(frozen=True)
class MemoryPart:
    """One use of memory."""

    name: str
    bytes: int
    how: str  # the formula, with its numbers
    host: bool = False  # in host memory, whatever the device


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of a peer, apart from Python and its libraries."""

    parts: tuple[MemoryPart, ...]
    parameters: int  # P
    flops: int  # of one micro-batch
    step_flops: float = 0.0  # of the optimizer's step

    @property
    def bytes(self) -> int:
        """Bytes on the device; on a CPU that is all of them."""
        return sum(part.bytes for part in self.parts if not part.host)

    def part(self, name: str) -> int:
        return sum(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Machine:
    """The devices of one peer."""

    bytes: int  # available to a program
    gpu: bool = False
    count: int = 1  # devices that the peer is sharded over
    bf16: bool = True  # they compute in bfloat16; False: they only emulate it

    @property
    def half(self) -> HalfPrecision:
        return HalfPrecision(torch.bfloat16 if self.bf16 else torch.float16, pays=self.gpu)


def plan_memory(recipe: Recipe, folder: Path, micro_batch: int, machine: Machine) -> MemoryPlan:
    """Plan the memory of a peer with the model in `folder` (a config suffices); per device where it is
    sharded.

    Errors: ModelError.
    """
    model = with_attention(meta_trained_model(recipe, folder), recipe.model.attn_implementation)
    layout, kind = layout_of(model), trained_dtype(recipe)
    size = layout.size
    frozen = frozen_bytes(model, recipe.model)
    optimizer = recipe.training.optim, layout.shapes, embeddings_of(model)
    state = optimizer_bytes(*optimizer)
    gathered = block_of(model) if machine.count > 1 else 0
    sequences = micro_batch * len(recipe.objective.sequences)
    rows = f"{sequences} x {recipe.data.max_length} tokens"
    half = autocast_dtype(recipe.training, model, machine.half)
    traced = trace(model, sequences, recipe.data.max_length, half)
    flops = traced.flops + recipe.objective.forwards * traced.forward
    step = step_bytes(recipe, layout, kind)
    one = traced.most // micro_batch
    beside = vectors(recipe, size, kind.itemsize, away=False)
    exchange = exchange_part(recipe.compression, size, one, step, machine.gpu).bytes
    least = frozen + state + one + exchange + sum(part.bytes for part in beside)
    away = machine.gpu and is_away(recipe.compression, least, machine)
    parts = [
        MemoryPart("base", frozen, "frozen weights as they are stored, and buffers"),
        *(vectors(recipe, size, kind.itemsize, away) if away else beside),
        MemoryPart("optimizer", state, f"{state / size:.3g} P"),
    ]
    parts = [part if part.host else spread(part, machine.count) for part in parts]
    parts += [
        MemoryPart("gathered", 2 * kind.itemsize * gathered, "the largest block, whole, and its gradient"),
        MemoryPart("activations", traced.kept, f"activations that the layers keep for {rows}"),
        MemoryPart("logits", traced.most - traced.kept, f"logits, loss and temporaries of {rows}"),
    ]
    if machine.count > 1:  # their process encodes, in host memory, where workers keep what they will add
        part = exchange_part(recipe.compression, size, 0)
        brought = BROUGHT * most_sent(recipe.compression, size)[1]
        parts.append(replace(part, bytes=part.bytes + brought, host=machine.gpu))
    else:
        parts.append(exchange_part(recipe.compression, size, traced.most, step, machine.gpu))
    if machine.gpu and machine.count == 1:
        loaded, how = (FLOAT * size, "4 P, the model") if recipe.lora is None else (frozen, "the base")
        if not recipe.model.quantized:
            parts.append(MemoryPart("loading", loaded, f"{how} on its way to the device", host=True))
    return MemoryPlan(tuple(part for part in parts if part.bytes), size, flops, step_flops(*optimizer))


def vectors(recipe: Recipe, size: int, width: int, away: bool) -> list[MemoryPart]:
    """Parts that are as long as the vector. `width`: bytes of a parameter in the model's compute dtype."""
    half = width < FLOAT
    masters = recipe.training.fp32_master_weights or not half
    own = "4 P, x_i" if masters else "2 P, x_i - x'"
    return [
        MemoryPart("weights", (FLOAT if masters else width) * size, own),
        MemoryPart("copy", width * size if half else 0, f"{width} P, the model's compute copy"),
        MemoryPart("common", FLOAT * size, "4 P, x'", away),
        MemoryPart("gradient", width * size, f"{width} P"),
    ]


def is_away(compression: Compression, least: int, machine: Machine) -> bool:
    """True where x' is in host memory beside a GPU. `auto`: where the GPU is short of memory for `least`
    bytes, those of a peer with x' on the GPU and one sequence at a time; a peer tries that (`build_peer`)."""
    chosen = compression.state_device
    return machine.count > 1 or chosen == "cpu" or (chosen == "auto" and least > LEAVE * machine.bytes)


def spread(part: MemoryPart, count: int) -> MemoryPart:
    return part if count == 1 else replace(part, bytes=-(-part.bytes // count), how=f"({part.how}) / {count}")


def frozen_bytes(model: nn.Module, wanted: Model) -> int:
    """Bytes of frozen parameters and buffers; the linear layers but the head may be quantized."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    linear = {layer.weight for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head}
    four = DOUBLE if wanted.bnb_4bit_use_double_quant else FOUR_BITS
    each = four if wanted.load_in_4bit else 1.0
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        if not parameter.requires_grad:
            quantized = wanted.quantized and parameter in linear
            total += round(each * parameter.numel()) if quantized else parameter.nbytes
    return total


def with_attention(model: nn.Module, wanted: str) -> nn.Module:
    """Set the attention that is wanted; flash attention keeps the same activations as sdpa."""
    inner = causal_model(model)
    if wanted == "eager":
        inner.set_attn_implementation("eager")
    elif wanted != "auto" and getattr(inner, "_supports_sdpa", False):
        inner.set_attn_implementation("sdpa")
    return model


def block_of(model: nn.Module) -> int:
    """Parameters of the largest block that FSDP gathers: a layer, or all outside the layers."""
    named = set(getattr(model, "_no_split_modules", None) or ())
    layers = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if type(module).__name__ in named
    ]
    return max([sum(p.numel() for p in model.parameters()) - sum(layers), *layers])


def step_bytes(recipe: Recipe, layout: Layout, kind: torch.dtype) -> int:
    """Count the temporaries of an optimizer's step, which follows when the activations are freed.

    Gradients in half precision become float32 in chunks, and without masters so do the parameters, which are
    then rounded one after the other.
    """
    largest = max(map(prod, layout.shapes))
    scratch, chunk = SCRATCH.get(recipe.training.optim, 0.0), min(layout.size, GRADIENT_CHUNK + largest)
    if kind == torch.float32:
        return round(scratch * largest)
    if recipe.training.fp32_master_weights:
        return FLOAT * chunk + round(scratch * largest)
    return 2 * FLOAT * chunk + round(max(scratch, ROUNDING) * largest)


def exchange_part(
    compression: Compression, size: int, beside: int, step: int = 0, gpu: bool = False
) -> MemoryPart:
    """Memory of an exchange: encoding overlaps with the compute, applying the aggregate follows it.

    encoding    4 m + 12 k: the delta, and the values selected from it; with chunks 8 m + 20 k
                on a GPU 4 m + 37 k, or 4 m + 21 k where all is sent
    sent        13 k: the sent update waits, decoded, with its packet; in host memory beside a GPU
    applying    28 k: the aggregate and its positions in the vector; 8 k less where p is 1
                on a GPU 36 k, for no more values than a window
                4 m more where the residual decays, and there 24 m at the join, for no more than a window
    """
    m, k = most_sent(compression, size)
    encoding = encoding_bytes(compression, size, gpu)
    decaying = FLOAT * m if compression.error_decay < 1 else 0
    fingerprint = FINGERPRINT * min(k, FINGERPRINT_AT_ONCE)
    if gpu:
        where = 8 if m < size else 0  # coordinates of the vector
        window = (28 + where) * min(k, ON_GPU)
        joining = max(window, (8 + 2 * where) * min(m, ON_GPU) if decaying else 0)
        most = max(encoding, window + fingerprint + decaying)
        after = max(joining, step) + decaying - beside
        return MemoryPart("exchange", max(most, after), "4 m + 37 k, or the optimizer's temporaries")
    applying = (28 if m < size else 20) * k + fingerprint
    most = max(encoding, DECODING * k + decaying)
    after = SENT * k + max(applying, step) + decaying - beside
    return MemoryPart("exchange", max(most, after), "4 m + 12 k, or 41 k after the compute")
