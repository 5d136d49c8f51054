"""Divides a model's layers among machines, consecutive ones each, and plans what that takes.

vectors, base     by the largest share of the parameters that a machine has
activations       of its layers, for all micro-batches in flight; logits on the first machine, of one
lines             of each micro-batch a machine sends its output, and the gradient of its input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import ceil, inf
from pathlib import Path

from torch import nn

from recipes.config import Recipe
from recipes.errors import ModelError
from recipes.models import meta_trained_model, width_of
from recipes.planning import MemoryPart, MemoryPlan
from recipes.weight_files import layout_of

from .stage_machine import bits_of
from .stage_model import layers_of
from .stage_worker import PER_STAGE


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a model, in any unit: parameters, bytes, seconds."""

    layers: tuple[float, ...]
    ends: float  # embeddings, final norm and head: of the first stage

    @property
    def whole(self) -> float:
        return sum(self.layers) + self.ends

    def of(self, layers: range, first: bool) -> float:
        """Return the cost of a stage with these layers."""
        return sum(self.layers[layers.start : layers.stop]) + (self.ends if first else 0)


def parameter_costs(model: nn.Module) -> Costs:
    """Count the parameters of each layer and of the ends, on any device. Errors: ModelError."""
    layers = tuple(float(sum(p.numel() for p in layer.parameters())) for layer in layers_of(model))
    return Costs(layers, sum(p.numel() for p in model.parameters()) - sum(layers))


def partition_layers(costs: Costs, capacities: Sequence[float], first: int = 0) -> tuple[range, ...]:
    """Divide the layers among stages of these capacities, the largest cost over capacity as low as can be.

    Each stage has at least one layer; the first, which has the ends, at least `first`: beside adapters, which
    layers alone have, 1. Of equal partitions the one whose first stages have fewest layers is taken, so all
    machines find the same.

    Errors: ValueError where there are more stages than that allows.
    """
    count, stages = len(costs.layers), len(capacities)
    if not 1 <= stages <= count + 1 - first or min(capacities) <= 0:
        raise ValueError(f"{stages} stages of {count} layers, of capacities {list(capacities)}")
    before = list(accumulate(costs.layers, initial=0.0))  # cost of the first i layers
    # of the first i layers on the stages so far: the largest load, and where each stage begins
    best: list[tuple[float, tuple[int, ...]]]
    best = [
        ((costs.ends + before[stop]) / capacities[0] if stop >= first else inf, (0,))
        for stop in range(count + 1)
    ]
    for capacity in capacities[1:]:
        longer: list[tuple[float, tuple[int, ...]]] = [(inf, ())]  # one more stage needs a layer
        for stop in range(1, count + 1):
            options = []
            for start in range(stop):
                load, starts = best[start]
                options.append((max(load, (before[stop] - before[start]) / capacity), (*starts, start)))
            longer.append(min(options))
        best = longer
    return tuple(range(start, stop) for start, stop in pairwise((*best[count][1], count)))


def layer_ends(model: nn.Module) -> tuple[int, ...]:
    """Find where each layer ends in the vector, and what stands before, between and behind the layers.

    Errors: ModelError where the model cannot be cut into stages.
    """
    layer_at = {id(p): number for number, layer in enumerate(layers_of(model)) for p in layer.parameters()}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    ends, stop = list[int](), 0
    for _, parameters in groupby(trained, lambda parameter: layer_at.get(id(parameter))):
        stop += sum(parameter.numel() for parameter in parameters)
        ends.append(stop)
    assert stop == layout_of(model).size
    return tuple(ends)


def cut_at_layers(recipe: Recipe, base: Path) -> Recipe:
    """Write into a recipe where the shards of its model end, at layers. Errors: ModelError."""
    ends = layer_ends(meta_trained_model(recipe, base))
    return recipe.model_copy(update={"compression": recipe.compression.model_copy(update={"shards": ends})})


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
    most = max(costs.of(layers, not number) for number, layers in enumerate(cut))
    return StagePlan(stages, most / costs.whole, sum(sent_bytes(recipe, folder)))


def sent_bytes(recipe: Recipe, folder: Path) -> tuple[float, float]:
    """Return the bytes of a token's activations, and of their gradients, on a line between two stages.

    Errors: ModelError: the model's config does not say how wide it is.
    """
    if (width := width_of(folder)) is None:
        raise ModelError("the model's config does not say how wide it is")
    activation, gradient = (bits * CODED * width / 8 for bits in bits_of(recipe))
    return activation, gradient


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
        folder: of the model.
        whole: memory of an ordinary peer.

    Errors: ModelError: the model cannot be cut, or its config does not say how wide it is.
    """

    def __init__(self, recipe: Recipe, folder: Path, whole: MemoryPlan) -> None:
        self.costs = parameter_costs(meta_trained_model(recipe, folder))
        self.layers = len(self.costs.layers)
        self.first = int(recipe.lora is not None)  # layers that the first machine has at least
        asked = recipe.training.per_device_train_batch_size
        size = 1 if asked == "auto" else asked
        activation, gradient = sent_bytes(recipe, folder)
        tokens = size * recipe.data.max_length
        self.activation, self.gradient = tokens * activation, tokens * gradient  # bytes of a micro-batch
        self.micro_batches = ceil(recipe.training.global_batch_size / size)  # of a step, of one replica alone
        self._activations, self._logits = whole.part("activations"), sum(map(whole.part, WHOLE))
        self._vectors = whole.bytes - self._activations - self._logits

    def memory(self, stages: int, number: int, layers: range) -> int:
        """Return the bytes that these layers take on one of so many machines."""
        return ceil(self._bytes(stages).of(layers, number == 0))

    def divide(self, memories: Sequence[int]) -> tuple[range, ...] | None:
        """Divide all layers among machines with so many bytes; None: they do not hold the model."""
        stages = len(memories)
        costs = self._bytes(stages)
        if sum(memories) < costs.whole:
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
        each = (self._vectors + flight * self._activations) / self.costs.whole
        layers = tuple(each * layer for layer in self.costs.layers)
        return Costs(layers, each * self.costs.ends + self._logits)
