"""Direct preference optimization (Rafailov et al., 2023) of adapters beside a frozen base.

    r(y) = beta (log p(y | prompt) - log p_ref(y | prompt))     the reward of an answer, equation 5 without Z
    loss = -log sigmoid(r(chosen) - r(rejected))                equation 7: `sigmoid`

p_ref is the base: the same model with its adapters switched off, so no second model is held. The other losses
are `hinge` (Zhao et al., 2023) and `ipo` (Azar et al., 2024), as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from recipes.data import Sample, collate
from recipes.models import token_losses
from recipes.objectives import BatchLoss, Bounds

MOST = 1e4  # nats of a margin: beyond, adapters have left their base for good


class Preferences:
    """The mean loss of a pair. A sample is one: its documents are prompt + chosen and prompt + rejected."""

    def __init__(self, beta: float, loss_type: Literal["sigmoid", "hinge", "ipo"]) -> None:
        self.beta, self.loss_type = beta, loss_type

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        """Bound the loss, of which `ipo` is a square, and the rewards; the last figure counts pairs."""
        most = MOST**2 if self.loss_type == "ipo" else MOST
        return (0.0, most), (-inf, inf), (-inf, inf), (0.0, 1.0)

    def terms(self, samples: Sequence[Sample]) -> int:
        return sum(sample.count > 0 for sample in samples)

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        sequences = [*(halves(sample)[0] for sample in part), *(halves(sample)[1] for sample in part)]
        batch = {name: tensor.to(device) for name, tensor in collate(sequences).items()}
        peft: Any = model
        with torch.no_grad(), peft.disable_adapter():
            reference, _ = sequence_losses(model, batch)
        own, lengths = sequence_losses(model, batch)
        ratios = reference - own  # (2 B,) log p - log p_ref
        counted = lengths[: len(part)] > 0
        losses = torch.where(counted, self.pair_losses(ratios, lengths), 0.0)
        chosen, rejected = (self.beta * ratios.detach()).chunk(2)
        right = (chosen > rejected) & counted
        rewards = torch.stack([chosen.sum(), rejected.sum(), right.sum()])  # those of no pair are 0
        return BatchLoss(losses.sum(), self.terms(part), rewards)

    def pair_losses(self, ratios: Tensor, lengths: Tensor) -> Tensor:
        """Compute the loss of each pair: (B,).

        Args:
            ratios: (2 B,) log p - log p_ref of the chosen answers, then of the rejected ones.
            lengths: (2 B,) trained tokens of the answers.
        """
        beta = self.beta
        chosen, rejected = ratios.chunk(2)
        margin = beta * (chosen - rejected)
        match self.loss_type:
            case "sigmoid":
                return -logsigmoid(margin)
            case "hinge":
                return torch.relu(1 - margin)
            case "ipo":  # by the token, so that long answers weigh no more
                chosen, rejected = (ratios / lengths.clamp(min=1)).chunk(2)
                return (chosen - rejected - 1 / (2 * beta)) ** 2

    def longest(self, length: int) -> Sample:
        return Sample(np.zeros(2 * length, np.int32), np.arange(2 * length) % length > 0, (length, length))

    def uncounted(self, like: Sample) -> Sample:
        return Sample(np.tile(like.tokens[:2], 2), np.zeros(4, bool), (2, 2))


def halves(sample: Sample) -> tuple[Sample, Sample]:
    """Split a pair into its chosen and its rejected sequence."""
    cut = sample.lengths[0]
    tokens, trained = sample.tokens, sample.trained
    return Sample(tokens[:cut], trained[:cut]), Sample(tokens[cut:], trained[cut:])


def sequence_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the losses of each sequence, -log p of its answer, and count its trained tokens: (B,) and (B,)."""
    losses, trained = token_losses(model, batch)
    return losses.sum(dim=1), trained.sum(dim=1)
