"""LoRA on the study's model (Hu et al., 2021): a vector of adapters, and the model that it makes of the base.

Adapters stand beside all linear layers but the head, with alpha twice their rank, as the recipes have them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.training import FlatParameters
from recipes.weight_files import Layout

SCALE = 2.0  # alpha / r
SEED = 78


class Adapters:
    """A (r, in) and B (out, r) of each linear layer; the layer's weight is W + 2 B A.

    Args:
        layout, start: the base's, (P,).
        rank: r.
    """

    def __init__(self, layout: Layout, start: Tensor, rank: int) -> None:
        self.base, self.start = layout, start
        places = enumerate(zip(layout.names, layout.shapes, strict=True))
        self.numbers = [i for i, (name, shape) in places if ".layers." in name and len(shape) == 2]
        generator, parts = torch.Generator().manual_seed(SEED), list[nn.Parameter]()
        for out, columns in (layout.shapes[i] for i in self.numbers):
            drawn = torch.rand(rank, columns, generator=generator) * 2 - 1
            parts += [nn.Parameter(drawn / columns**0.5), nn.Parameter(torch.zeros(out, rank))]
        self.first = torch.cat([part.detach().flatten() for part in parts])  # (A,) x_0
        self.shapes = [part.shape for part in parts]

    def new_flat(self) -> FlatParameters:
        """Make adapters of a peer's own, as parameters in a vector. There is no model to run."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = zip(self.first.split(sizes), self.shapes, strict=True)
        return FlatParameters(nn.ParameterList([part.clone().view(shape) for part, shape in parts]))

    def whole(self, x: Tensor) -> Tensor:
        """Compute the models (N, P) of the vectors x (N, A)."""
        parts = iter(x.split([shape.numel() for shape in self.shapes], 1))
        shapes, added = iter(self.shapes), dict[int, Tensor]()
        for i in self.numbers:
            a, b = (next(parts).unflatten(1, next(shapes)) for _ in range(2))
            added[i] = SCALE * torch.bmm(b, a).flatten(1)
        columns = list[Tensor]()
        for i, weight in enumerate(self.base.views(self.start)):
            flat = weight.reshape(1, -1).expand(len(x), -1)
            columns.append(flat + added[i] if i in added else flat)
        return torch.cat(columns, 1)
