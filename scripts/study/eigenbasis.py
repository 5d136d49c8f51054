"""A fixed eigenbasis of a model's gradients: the optimizer works in it, models and packets don't.

SOAP (Vyas et al., 2024) runs Adam in the eigenvectors of G G^T and G^T G and refreshes them as it trains,
each peer its own. Here they are found once, at the pre-trained model, and are the same for all peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.training.optimizers import rotated
from recipes.weight_files import Layout


class FixedEigenbasis:
    """Orthonormal bases of rows and columns, Q_L (m, m) and Q_R (n, n), for each matrix of the layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        matrices = {i: shape for i, shape in enumerate(layout.shapes) if len(shape) == 2}
        self.bases = {i: (torch.zeros(m, m), torch.zeros(n, n)) for i, (m, n) in matrices.items()}

    def add(self, gradients: Tensor) -> None:
        """Add gradients (S, P), one a sample, to the covariances of rows and columns."""
        samples = [self.layout.views(gradient) for gradient in gradients]
        for i, (rows, columns) in self.bases.items():
            each = torch.stack([views[i] for views in samples])  # (S, m, n)
            rows.add_(torch.einsum("sij,skj->ik", each, each))
            columns.add_(torch.einsum("sij,sik->jk", each, each))

    def close(self) -> None:
        """Replace the covariances by their eigenvectors."""
        for i, pair in self.bases.items():
            self.bases[i] = (torch.linalg.eigh(pair[0])[1], torch.linalg.eigh(pair[1])[1])

    def rotate(self, x: Tensor, back: bool = False) -> Tensor:
        """Compute Q_L^T X Q_R of each matrix of a vector (P,), or with `back` Q_L X Q_R^T; all else stays."""
        parts = enumerate(self.layout.views(x))
        turned = (rotated(part, *self.bases[i], back) if i in self.bases else part for i, part in parts)
        return torch.cat([part.flatten() for part in turned])


class TurnedUpdate:
    """A peer's update in the eigenbasis: parameters that are zero before each step, for any optimizer."""

    def __init__(self, basis: FixedEigenbasis) -> None:
        self.basis, layout = basis, basis.layout
        self.update, self.grad = torch.zeros(layout.size), torch.zeros(layout.size)
        self.parameters = layout.views(self.update)
        for parameter, grad in zip(self.parameters, layout.views(self.grad), strict=True):
            parameter.grad = grad

    def take(self, grad: Tensor) -> None:
        """Set the gradient (P,), given in the model's own coordinates."""
        self.grad.copy_(self.basis.rotate(grad))
        self.update.zero_()

    def add_to(self, vector: Tensor) -> None:
        """Add the step that was made to the model (P,)."""
        vector.add_(self.basis.rotate(self.update, back=True))
