"""A decoded packet: which positions of the sampled vector change, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Update:
    """Sparse vector over the sample: `values[j]` at `positions[j]`, zero elsewhere. The same bits on every
    device.
    """

    size: int  # m, length of the sampled vector
    positions: torch.Tensor  # (k,) int64, ascending, each once
    values: torch.Tensor  # (k,) float32, finite

    def dense(self, m: int | None = None) -> torch.Tensor:
        """(m,) float32 with zeros where nothing was sent."""
        if m is not None and m != self.size:
            raise ValueError(f"an update of {self.size:,} sampled elements, asked for {m:,}")
        out = torch.zeros(self.size, device=self.values.device)
        out[self.positions] = self.values
        return out
