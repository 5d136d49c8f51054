"""x_i where it lies, as the worker's half of the algorithm asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from compress import Sample, Shard

if TYPE_CHECKING:
    from .cocktail_sgd import ShardUpdate

WINDOW = 1 << 26  # elements brought from one device to another at a time


class LocalModel(Protocol):
    """x_i where it lies: in this process (`Here`), or spread over several (recipes/spread.py)."""

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        """(m,): x_i - other, where the shard's sample is."""

    def add_(self, piece: ShardUpdate, alpha: int = 1) -> None:
        """x_i += alpha * what the piece says."""

    def distance(self, other: Tensor) -> float:
        """The length of x_i - other."""


def fetched_difference(sample: Sample, x: Tensor, y: Tensor) -> Tensor:
    """(m,) on the device of x: x - y on the sample. Of y nothing else is brought there; the same bits."""
    return sample.take(x).sub_(sample.take(y).to(x.device))


@dataclass(frozen=True)
class LocalVector:
    """A vector that is a tensor. x' is on its device, or in the host's memory."""

    x: Tensor  # (P,)

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        x, y = shard.of(self.x), shard.of(other)
        if x.device == y.device:
            return sample.difference(x, y)
        return fetched_difference(sample, x, y)

    def add_(self, piece: ShardUpdate, alpha: int = 1) -> None:
        piece.add_(self.x, alpha)

    def distance(self, other: Tensor) -> float:
        if self.x.device == other.device:
            return float(torch.dist(self.x, other))
        parts = zip(self.x.split(WINDOW), other.split(WINDOW), strict=True)
        return float(sum(torch.dist(x, y.to(x.device)) ** 2 for x, y in parts)) ** 0.5
