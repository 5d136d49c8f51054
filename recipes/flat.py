"""A model's trainable parameters as one vector.

CocktailSGD knows no layers: x, x' and everything that is sent are vectors of P numbers. `Flat` makes the
parameters of a model views into such a vector, so that what the algorithm writes is what the model computes
with, and nothing is copied. Needs torch and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from recipes.problems import ModelError


@dataclass(frozen=True)
class Layout:
    """Which parameter lies where in the vector: `named_parameters` order, tied weights once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts, and P at the end: one more than there are names."""
        return tuple(accumulate((prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return self.offsets[-1]

    def name_at(self, index: int) -> str:
        """The parameter that coordinate `index` belongs to."""
        if not 0 <= index < self.size:
            raise IndexError(f"coordinate {index} of {self.size}")
        return self.names[bisect_right(self.offsets, index) - 1]

    def views(self, vector: Tensor) -> list[Tensor]:
        """(P,) -> one view for each parameter, in order."""
        if vector.shape != (self.size,):
            raise ModelError(f"vector of shape {tuple(vector.shape)}, the model has {self.size} parameters")
        bounds = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [vector[start:end].view(shape) for start, end, shape in bounds]


def layout_of(model: nn.Module) -> Layout:
    """Errors: ModelError where nothing is trainable."""
    trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ModelError("the model has no trainable parameter")
    return Layout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


class Flat:
    """The parameters of `model` and their gradients, as two vectors which the model uses as they are.

    Move the model to its device first: `model.to` afterwards would tear the parameters off the vector.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = layout_of(model)
        self._parameters = [
            p for p in model.parameters() if p.requires_grad
        ]  # parameters(): tied weights once
        kinds = {p.dtype for p in self._parameters}
        devices = {p.device for p in self._parameters}
        if kinds != {torch.float32} or len(devices) != 1:
            raise ModelError(f"parameters of {kinds} on {devices}, expected float32 on one device")
        device = devices.pop()
        with torch.no_grad():
            self.vector = torch.cat([p.detach().reshape(-1) for p in self._parameters])  # (P,) float32
        self.grad = torch.zeros(self.layout.size, device=device)  # (P,) float32
        self._point_at(self.vector)
        for p, g in zip(self._parameters, self.layout.views(self.grad), strict=True):
            p.grad = g  # autograd adds into a gradient that is there, so backward() fills the vector

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Inside, the model computes with `vector` (P,) in place of its own; nothing is copied."""
        self._point_at(vector)
        try:
            yield self.model
        finally:
            self._point_at(self.vector)

    def _point_at(self, vector: Tensor) -> None:
        for p, view in zip(self._parameters, self.layout.views(vector), strict=True):
            p.data = view
