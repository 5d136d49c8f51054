"""The delta d_i computed window by window, where a device has no room for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress import Sample, Shard, one_range, topk

from .local_vector import WINDOW, LocalModel


@dataclass(frozen=True)
class WindowedDelta:
    """A `topk.Source`: d_i = x_i - x' of one shard. Only what is asked for comes to the host."""

    local_model: LocalModel
    shard: Shard
    global_model: Tensor  # (P,) x'

    @property
    def size(self) -> int:
        return self.shard.size

    def magnitudes(self, line: int, step: int) -> np.ndarray:
        """Gather the patterns without signs of every `step`-th line of `line` elements: (seen,) int32."""
        parts = [np.empty(0, np.int32)]
        for start, bits in self._windows():
            whole = len(bits) // line * line
            lines = bits[:whole].view(-1, line)[-(start // line) % step :: step]
            parts.append((lines & topk.MAGNITUDE).reshape(-1).cpu().numpy())
        return np.concatenate(parts)

    def reaching(self, low: int, expected: int) -> topk.Survivors:
        """Collect all elements whose magnitude has a pattern of at least `low`."""
        positions, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for start, bits in self._windows():
            here = ((bits & topk.MAGNITUDE) >= low).nonzero().view(-1)
            positions.append(here.cpu().numpy() + start)
            values.append(bits[here].view(torch.float32).cpu().numpy())
        return topk.Survivors(np.concatenate(positions), np.concatenate(values))

    def _windows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the start and the patterns (w,) int32 of each window."""
        for start in range(0, self.size, WINDOW):
            window = one_range(self.size, start, min(start + WINDOW, self.size))
            d = self.local_model.difference(self.shard, window, self.global_model)
            yield start, d.view(torch.int32)


def delta_on_host(local_model: LocalModel, shard: Shard, sample: Sample, global_model: Tensor) -> Tensor:
    """Compute d_i on a round's sample, (m,), in the host's memory: a device gets no more than a window."""
    out = torch.empty(sample.m)
    for start, window in sample.windows(WINDOW // 4):  # this is done where memory is short
        out[start : start + window.m] = local_model.difference(shard, window, global_model)
    return out
