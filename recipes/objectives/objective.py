"""An objective: a mean over terms, whose sum and number add up over micro-batches and peers.

f(x) = sum of losses / terms        terms: trained tokens, or preference pairs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor, nn

from recipes.data import Sample, batches


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a micro-batch, with its graph."""

    sum: Tensor  # () over the terms, in nats
    terms: int
    rewards: Tensor | None = None  # (3,) of pairs: see `Measured`


@dataclass(frozen=True)
class Measured:
    """The losses of samples, and of preference pairs the rewards, as sums."""

    loss_sum: float = 0.0
    terms: int = 0
    rewards: tuple[float, ...] = ()  # of the chosen and of the rejected answers; pairs whose chosen has more
    notes: Mapping[str, str] = field(default_factory=dict)  # of extensions on each sample, in hex

    @property
    def mean(self) -> float:
        """Mean loss of a term; 0 where there is none."""
        return self.loss_sum / max(self.terms, 1)

    def __add__(self, other: Measured) -> Measured:
        rewards = (a + b for a, b in zip_longest(self.rewards, other.rewards, fillvalue=0.0))
        sums = self.loss_sum + other.loss_sum, self.terms + other.terms, tuple(rewards)
        names = self.notes.keys() | other.notes.keys()
        return Measured(*sums, {name: self.notes.get(name, "") + other.notes.get(name, "") for name in names})


class Objective(Protocol):
    """A run minimizes it."""

    def bounds(self, vocabulary: int) -> tuple[float, float]:
        """Return what the loss of a term lies between, of any model that still is one. A hub drops what a
        peer reports beyond. `vocabulary`: tokens that the model knows; 0: not known."""

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
    rewards = () if loss.rewards is None else tuple(loss.rewards.tolist())
    return Measured(float(loss.sum.detach()), loss.terms, rewards)
