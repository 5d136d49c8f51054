"""Objectives, which a run minimizes: a mean over terms, whose sum and number add up over micro-batches and
peers.

    f(x) = sum of losses / terms        terms: trained tokens, or samples

The usual one is the cross-entropy of the trained tokens; an extension may have another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import log
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recipes.config import Recipe
from recipes.data import Sample, batches, collate
from recipes.models import loss_sum

Bounds = tuple[float, float]  # least and greatest mean of a term


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a micro-batch, with its graph."""

    sum: Tensor  # () over the terms, in nats
    terms: int
    figures: Tensor | None = None  # (n,) sums of figures beside the loss


@dataclass(frozen=True)
class Measured:
    """The losses of samples, and further figures of the objective, as sums."""

    loss_sum: float = 0.0
    terms: int = 0
    figures: tuple[float, ...] = ()  # as many as the objective bounds
    notes: Mapping[str, str] = field(default_factory=dict)  # of extensions on each sample, in hex

    @property
    def mean(self) -> float:
        """Mean loss of a term; 0 where there is none."""
        return self.loss_sum / max(self.terms, 1)

    def __add__(self, other: Measured) -> Measured:
        figures = (a + b for a, b in zip_longest(self.figures, other.figures, fillvalue=0.0))
        sums = self.loss_sum + other.loss_sum, self.terms + other.terms, tuple(figures)
        names = self.notes.keys() | other.notes.keys()
        return Measured(*sums, {name: self.notes.get(name, "") + other.notes.get(name, "") for name in names})


class Objective(Protocol):
    """A run minimizes it."""

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        """Return what the loss of a term lies between, of any model that still is one, then each of its
        further figures. A hub drops what a peer reports beyond. `vocabulary`: tokens that the model knows; 0:
        not known."""

    def terms(self, samples: Sequence[Sample]) -> int:
        """Count the terms of the mean."""

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        """Compute the loss of a micro-batch."""

    def longest(self, length: int) -> Sample:
        """Make the largest sample of a recipe whose sequences have up to `length` tokens."""

    def uncounted(self, like: Sample) -> Sample:
        """Make a small sample that adds nothing to loss and terms."""


@torch.no_grad()
def evaluate(objective: Objective, model: nn.Module, samples: Sequence[Sample], size: int) -> Measured:
    """Measure samples in micro-batches of `size`, with the model in evaluation mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    found = Measured()
    try:
        for part in batches(samples, size):
            found += measured(objective.loss(model, part, device))
    finally:
        model.train(training)
    return found


def measured(loss: BatchLoss) -> Measured:
    """Read a loss as numbers."""
    figures = () if loss.figures is None else tuple(loss.figures.tolist())
    return Measured(float(loss.sum.detach()), loss.terms, figures)


# ---- the usual objective -----------------------------------------------------------------------------------

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
