"""A fixed eigenbasis of a model's gradients: the optimizer works in it, models and packets don't.

SOAP (Vyas et al., 2024) runs Adam in the eigenvectors of G G^T and G^T G and refreshes them as it trains,
each peer its own. Here they are found once, at the pre-trained model, and are the same for all peers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recipes.weight_files.parameter_layout import Layout


class FixedEigenbasis:
    """Orthonormal bases of rows and columns, Q_L (m, m) and Q_R (n, n), for each matrix of the layout."""

    def __init__(self, layout: Layout) -> None:
        self.shapes = layout.shapes
        self.sizes = [b - a for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
        matrices = {i: shape for i, shape in enumerate(self.shapes) if len(shape) == 2}
        self.bases = {i: (torch.zeros(m, m), torch.zeros(n, n)) for i, (m, n) in matrices.items()}

    def add(self, gradients: Tensor) -> None:
        """Add gradients (S, P), one a sample, to the covariances of rows and columns."""
        parts = gradients.split(self.sizes, 1)
        for i, (rows, columns) in self.bases.items():
            each = parts[i].unflatten(1, self.shapes[i])  # (S, m, n)
            rows.add_(torch.einsum("sij,skj->ik", each, each))
            columns.add_(torch.einsum("sij,sik->jk", each, each))

    def close(self) -> None:
        """Replace the covariances by their eigenvectors."""
        for i, pair in self.bases.items():
            self.bases[i] = (torch.linalg.eigh(pair[0])[1], torch.linalg.eigh(pair[1])[1])

    def rotate(self, x: Tensor) -> Tensor:
        """Compute Q_L^T X Q_R of each matrix of a vector (P,); all else stays."""
        return torch.cat([part.flatten() for part in self._parts(x, back=False)])

    def back(self, y: Tensor) -> Tensor:
        """Compute Q_L Y Q_R^T."""
        return torch.cat([part.flatten() for part in self._parts(y, back=True)])

    def _parts(self, x: Tensor, back: bool) -> Iterator[Tensor]:
        for i, part in enumerate(x.split(self.sizes)):
            if i not in self.bases:
                yield part
                continue
            left, right = self.bases[i]
            matrix = part.view(self.shapes[i])
            yield left @ matrix @ right.T if back else left.T @ matrix @ right


class TurnedUpdate:
    """A peer's update in the eigenbasis: parameters that are zero before each step, for any optimizer."""

    def __init__(self, basis: FixedEigenbasis) -> None:
        self.basis = basis
        self.update, self.grad = torch.zeros(sum(basis.sizes)), torch.zeros(sum(basis.sizes))
        self.parameters = self._views(self.update)
        for parameter, grad in zip(self.parameters, self._views(self.grad), strict=True):
            parameter.grad = grad

    def _views(self, vector: Tensor) -> list[Tensor]:
        shapes = self.basis.shapes
        return [p.view(shape) for p, shape in zip(vector.split(self.basis.sizes), shapes, strict=True)]

    def take(self, grad: Tensor) -> None:
        """Set the gradient (P,), given in the model's own coordinates."""
        self.grad.copy_(self.basis.rotate(grad))
        self.update.zero_()

    def add_to(self, vector: Tensor) -> None:
        """Add the step that was made to the model (P,)."""
        vector.add_(self.basis.back(self.update))
