"""Layers divided among the stages of a pipeline: consecutive ones each, the slowest stage at its fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from torch import nn

from .stage_model import layers_of


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a model, in any unit: parameters, bytes, seconds."""

    layers: tuple[float, ...]
    ends: float  # embeddings, final norm and head: of the first stage


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
