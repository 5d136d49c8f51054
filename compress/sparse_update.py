"""An update: the positions of the sampled vector that change, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compress.pinned_copy import brought


@dataclass(frozen=True)
class Update:
    """A sparse vector over the sample: `values[j]` at `positions[j]`, zero elsewhere."""

    size: int  # m, length of the sampled vector
    positions: torch.Tensor  # (k,) int64, ascending, each once
    values: torch.Tensor  # (k,) float32, finite

    def dense(self) -> torch.Tensor:
        """Write the update out, (m,) float32, with zeros where nothing was sent."""
        out = torch.zeros(self.size, device=self.values.device)
        out[self.positions] = self.values
        return out

    # ---- on the host; a `PackedUpdate` has the same methods ------------------------------------------------

    def window(self, start: int, stop: int, device: torch.device) -> Update:
        """Bring the values start .. stop - 1 to a device; positions travel in four bytes where they can."""
        positions, values = self.positions[start:stop], self.values[start:stop]
        if device != positions.device and self.size <= 1 << 31:
            positions = positions.to(torch.int32)
        return Update(self.size, brought(positions, device).to(torch.int64), brought(values, device))

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes

    def norm(self) -> float:
        """Return the Euclidean norm, in float64, where the squares of float32 cannot overflow."""
        return float(np.sqrt(np.square(self.values.numpy(), dtype=np.float64).sum()))

    def add_to(self, out: torch.Tensor, start: int, stop: int, factor: float) -> None:
        """Add factor * the values there to out[start:stop]; out: (m,)."""
        first, last = np.searchsorted(self.positions.numpy(), (start, stop))
        here = slice(int(first), int(last))
        out.index_add_(0, self.positions[here], self.values[here], alpha=factor)

    def decoded(self) -> Update:
        return self
