"""Changes of the algorithm that others have published, to be tried on a language model.

None of them is in the product: one that gains .1 % in three seeds would be. They work on vectors, so cells
with them exchange vectors on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LEAST = 2.0**-40  # spacing below which every change counts as seen


@dataclass(frozen=True)
class Part:
    """Positions of a vector, exchanged as a sample is."""

    at: Tensor  # (m,) int64

    def take(self, v: Tensor) -> Tensor:
        return v[self.at]

    def put_(self, v: Tensor, values: Tensor) -> None:
        v[self.at] = values

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        return x[self.at] - y[self.at]


def in_turn(offsets: Sequence[int], device: torch.device) -> tuple[Part, Part]:
    """Divide adapters into all A and all B, which stand in turn: one of them is trained and sent in each
    step (LA-LoRA, arXiv 2602.19926)."""
    every = [torch.arange(start, stop, device=device) for start, stop in pairwise(offsets)]
    return Part(torch.cat(every[0::2])), Part(torch.cat(every[1::2]))


def seen_in_bf16(values: Tensor, x: Tensor) -> Tensor:
    """Measure changes `values` of x in the distance of two BF16 numbers there: below 1/2 a forward pass in
    BF16 does not see them (PULSE, arXiv 2602.03839)."""
    exponents = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    return values.abs() / (exponents * 2.0**-7).clamp(min=LEAST)


def draws_of(deltas: Tensor, round: int) -> Tensor:
    """Draw thresholds (N, m), each uniform in [0, 1), that fill it evenly over the peers: what they round
    up and down nearly cancels in the sum (Suresh et al., arXiv 2203.04925)."""
    generator = torch.Generator(deltas.device).manual_seed(round)
    order = torch.rand(deltas.shape, device=deltas.device, generator=generator).argsort(0)
    return (order + torch.rand(deltas.shape[1], device=deltas.device, generator=generator)) / len(deltas)


def rounded(signed: Tensor, at: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Round `signed` at random to one of the two levels around it, so that it is right in the mean.

    Args:
        at: the levels' magnitudes, ascending.
        thresholds: uniform in [0, 1), in the shape of `signed`.

    Returns: number of the level, and +1 or -1.
    """
    levels = torch.cat([-at.flip(0), at])
    above = torch.searchsorted(levels, signed.contiguous()).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    chosen = torch.where((signed - low) / (high - low) > thresholds, above, above - 1)
    positive = chosen >= len(at)
    number = torch.where(positive, chosen - len(at), len(at) - 1 - chosen)
    return number, torch.where(positive, 1.0, -1.0)
