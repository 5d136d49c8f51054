"""Plan a peer that is several machines: the memory of the one that needs most, and what its lines carry.

vectors, base     by the largest share of the parameters that a machine has
activations       of its layers, for all micro-batches in flight; logits on the first machine, of one
lines             of each micro-batch a machine sends its output, and the gradient of its input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from recipes.config import Recipe
from recipes.errors import ModelError
from recipes.models import meta_trained_model, width_of
from recipes.planning import MemoryPart, MemoryPlan

from .layer_partition import Costs, parameter_costs, partition_layers
from .stage_schedule import PER_STAGE

WHOLE = ("logits",)  # parts that one machine has alone, for one micro-batch
CODED = 1.05  # bytes of a coded message over those of its codes: scales and heads


@dataclass(frozen=True)
class StagePlan:
    """The machines of a peer."""

    stages: int
    share: float  # of the parameters, on the machine that has most
    sent: float  # bytes that each machine sends to its neighbours for a token

    def memory(self, whole: MemoryPlan) -> MemoryPlan:
        """Return the memory of the machine that needs most, where one alone would need `whole`."""
        parts = tuple(self._part(part) for part in whole.parts if part.name != "loading")
        return replace(whole, parts=parts)

    def _part(self, part: MemoryPart) -> MemoryPart:
        if part.name in WHOLE:
            return part
        if part.name != "activations":
            return replace(part, bytes=round(self.share * part.bytes), how=f"({part.how}) x {self.share:.3f}")
        flight = PER_STAGE * self.stages
        size, how = round(flight * self.share * part.bytes), f"{flight} micro-batches in flight"
        return replace(part, bytes=size, how=f"({part.how}) x {self.share:.3f}, {how}")


def plan_stages(recipe: Recipe, folder: Path, stages: int) -> StagePlan:
    """Plan the machines of a peer with the model in `folder` (a config suffices).

    Errors: ModelError: the model cannot be cut, or not into so many.
    """
    costs = parameter_costs(meta_trained_model(recipe, folder))
    cut = cut_of(costs, stages, recipe)
    loads = [sum(costs.layers[layers.start : layers.stop]) for layers in cut]
    loads[0] += costs.ends
    return StagePlan(stages, max(loads) / (sum(costs.layers) + costs.ends), sum(sent_bytes(recipe, folder)))


def sent_bytes(recipe: Recipe, folder: Path) -> tuple[float, float]:
    """Return the bytes of a token's activations, and of their gradients, on a line between two stages.

    Errors: ModelError: the model's config does not say how wide it is.
    """
    if (width := width_of(folder)) is None:
        raise ModelError("the model's config does not say how wide it is")
    compression, value = recipe.compression, CODED * width / 8
    return value * compression.activation_bits, value * compression.activation_gradient_bits


def cut_of(costs: Costs, stages: int, recipe: Recipe) -> tuple[range, ...]:
    """Divide the layers among equal machines. Errors: ModelError: there are too few."""
    try:
        return partition_layers(costs, [1.0] * stages, first=int(recipe.lora is not None))
    except ValueError:
        raise ModelError(
            f"{stages} machines are more than this model has layers for", "fewer machines"
        ) from None


class StageMemory:
    """The bytes that layers take on a machine of a ring, their division among machines by that, and what the
    lines between them carry.

    Args:
        costs: parameters of the layers and of the ends.
        whole: memory of an ordinary peer.

    Errors: ModelError: the model's config does not say how wide it is.
    """

    def __init__(self, costs: Costs, whole: MemoryPlan, recipe: Recipe, folder: Path) -> None:
        self.costs = costs
        self.first = int(recipe.lora is not None)  # layers that the first machine has at least
        asked = recipe.training.per_device_train_batch_size
        size = 1 if asked == "auto" else asked
        activation, gradient = sent_bytes(recipe, folder)
        tokens = size * recipe.data.max_length
        self.activation, self.gradient = tokens * activation, tokens * gradient  # bytes of a micro-batch
        self.micro_batches = ceil(recipe.training.global_batch_size / size)  # of a step, of one replica alone
        self._activations, self._logits = whole.part("activations"), sum(map(whole.part, WHOLE))
        self._vectors = whole.bytes - self._activations - self._logits
        self._all = sum(costs.layers) + costs.ends

    @property
    def layers(self) -> int:
        """Count the model's layers."""
        return len(self.costs.layers)

    def memory(self, stages: int, number: int, layers: range) -> int:
        """Return the bytes that these layers take on one of so many machines."""
        costs = self._bytes(stages)
        return ceil(sum(costs.layers[layers.start : layers.stop]) + (costs.ends if number == 0 else 0))

    def divide(self, memories: Sequence[int]) -> tuple[range, ...] | None:
        """Divide all layers among machines with so many bytes; None: they do not hold the model."""
        stages = len(memories)
        costs = self._bytes(stages)
        if sum(memories) < sum(costs.layers) + costs.ends:
            return None
        try:
            found = partition_layers(costs, memories, self.first)
        except ValueError:  # more machines than layers
            return None
        fits = all(self.memory(stages, n, layers) <= memories[n] for n, layers in enumerate(found))
        return found if fits else None

    def _bytes(self, stages: int) -> Costs:
        """Return the bytes of each layer, and of the ends, where there are so many machines."""
        flight = PER_STAGE * stages if stages > 1 else 1
        each = (self._vectors + flight * self._activations) / self._all
        layers = tuple(each * layer for layer in self.costs.layers)
        return Costs(layers, each * self.costs.ends + self._logits)


def stage_memory(recipe: Recipe, folder: Path, whole: MemoryPlan) -> StageMemory:
    """Describe the memory of stages of the model in `folder`, where one machine would need `whole`.

    Errors: ModelError: the model cannot be cut.
    """
    return StageMemory(parameter_costs(meta_trained_model(recipe, folder)), whole, recipe, folder)
