"""The usual objective: cross-entropy of the trained tokens. An extension may have another."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
import torch
from torch import nn

from recipes.config import Recipe
from recipes.data import Sample, collate
from recipes.models import loss_sum

from .objective import BatchLoss, Bounds, Objective

CHANCE = 100.0  # times the loss of a guess: more than any model has that learns
LARGEST = 2**24  # tokens of a vocabulary that is not known


class NextTokens:
    """The mean loss of a trained token."""

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        return ((0.0, CHANCE * log(max(2, vocabulary or LARGEST))),)

    def terms(self, samples: Sequence[Sample]) -> int:
        return sum(sample.count for sample in samples)

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        batch = {name: tensor.to(device) for name, tensor in collate(part).items()}
        return BatchLoss(*loss_sum(model, batch))

    def longest(self, length: int) -> Sample:
        return Sample(np.zeros(length, np.int32), np.arange(length) > 0)

    def uncounted(self, like: Sample) -> Sample:
        return Sample(like.tokens[:2], np.zeros(2, bool))


def objective_of(recipe: Recipe) -> Objective:
    """Return what this recipe minimizes."""
    return recipe.objective.objective() or NextTokens()
