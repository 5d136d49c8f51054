"""What a peer will take of its machine's memory, by part, from the model's config alone.

Arithmetic: no weight is read or made. The vectors follow from P, the number of trained parameters; what a
micro-batch takes is counted on tensors without memory (activations.py). Every part says its formula.
`scripts/bench_memory` measures the same on real processes; LOG.md has how far off it was.

    m = p P     coordinates that a round visits
    k = K m     of them that are sent
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.activations import trace
from recipes.flat import layout_of
from recipes.schema import Compression, Recipe
from recipes.weights import blueprint

FLOAT = 4  # bytes
OPTIMIZER = {"adamw_torch_fused": 8, "adamw_torch": 8, "sgd": 0}  # bytes a trained parameter
UPDATE = 12  # bytes of a decoded value: its position, int64, and itself, float32


@dataclass(frozen=True)
class Part:
    """One holder of memory."""

    name: str
    bytes: int
    how: str  # the formula, with its numbers


@dataclass(frozen=True)
class Memory:
    """What a peer holds at its fullest moment, beside Python and its libraries."""

    parts: tuple[Part, ...]
    parameters: int  # P
    flops: int  # of one micro-batch

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def part(self, name: str) -> int:
        return next(part.bytes for part in self.parts if part.name == name)


def memory_of(recipe: Recipe, folder: Path, micro_batch: int) -> Memory:
    """Of a peer with the model in `folder`, where a config is enough. Errors: ModelError."""
    model = blueprint(folder, recipe.model.attn_implementation)
    size = layout_of(model).size
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    passed = trace(model, micro_batch, recipe.data.max_length)
    logits = passed.most - passed.kept
    rows = f"{micro_batch} x {recipe.data.max_length} tokens"
    parts = [
        Part("weights", FLOAT * size + buffers, "4 P, x_i, and the model's buffers"),
        Part("common", FLOAT * size, "4 P, x'"),
        Part("gradient", FLOAT * size, "4 P"),
        Part("optimizer", OPTIMIZER[recipe.training.optim] * size, f"{OPTIMIZER[recipe.training.optim]} P"),
        Part("activations", passed.kept, f"what the layers keep of {rows}"),
        Part("logits", logits, f"logits, loss and what passes through, of {rows}"),
        exchange(recipe.compression, size, passed.most),
    ]
    return Memory(tuple(parts), size, passed.flops)


def exchange(compression: Compression, size: int, beside: int) -> Part:
    """Encoding runs beside the compute, taking in what came follows it: the activations are gone by then.

    encoding    4 m + 12 k: the difference, and what is chosen of it; then what was sent, 12 k, waits
    taking in   36 k or more: what was sent, what came, and where that lies in the vector
    """
    m = int(size * compression.random_ratio)
    k = int(m * compression.topk_ratio)
    encoding = FLOAT * m + UPDATE * k
    taking_in = (4 if m < size else 2) * UPDATE * k
    return Part("exchange", max(encoding, taking_in - beside), "4 m + 12 k, or 48 k after the compute")
