"""The local model x_i, as the worker's half of the algorithm asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress import Sample, Shard, brought

from .global_model import ShardUpdate

WINDOW = 1 << 24  # elements of a long vector that are worked on at a time: 64 MiB


class LocalModel(Protocol):
    """x_i, in this process (`LocalVector`) or spread over several."""

    @property
    def from_global_model(self) -> bool:
        """Tell whether x_i is stored as its difference from x': then x' may not move during the compute."""

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        """Compute x_i - other, (m,), on the shard's sample; other: (P,)."""

    def bring(self, update: ShardUpdate) -> None:
        """Do what of a later `add_` can be done beside the compute; x_i stays."""

    def add_(self, update: ShardUpdate, alpha: int = 1) -> None:
        """x_i += alpha * update."""

    def distance(self, other: Tensor) -> float:
        """Compute the Euclidean norm of x_i - other; other: (P,)."""


def fetched_difference(sample: Sample, x: Tensor, y: Tensor) -> Tensor:
    """Compute x - y, (m,), on the device of x, to which only the sample of y is brought: the same bits. It is
    brought in windows of pinned memory, and nobody waits for the device."""
    out = sample.take(x)
    for start, window in sample.windows(WINDOW // 4):  # pinned memory is taken in small pieces
        out[start : start + window.m].sub_(brought(window.take(y), x.device))
    return out


@dataclass(frozen=True)
class LocalVector:
    """x_i as one tensor. x' is on its device, or in the host's memory."""

    x: Tensor  # (P,)
    from_global_model = False

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        x, y = shard.of(self.x), shard.of(other)
        if x.device == y.device:
            return sample.difference(x, y)
        return fetched_difference(sample, x, y)

    def bring(self, update: ShardUpdate) -> None:
        """Pass: windows of an update are decoded on the device itself, at the join."""

    def add_(self, update: ShardUpdate, alpha: int = 1) -> None:
        update.add_(self.x, alpha)

    def distance(self, other: Tensor) -> float:
        windows = zip(torch.split(self.x, WINDOW), torch.split(other, WINDOW), strict=True)
        square = float(sum(torch.dist(x, y.to(x.device)) ** 2 for x, y in windows))
        return float(square**0.5)
