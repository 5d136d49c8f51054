"""A model's trainable parameters as one vector.

CocktailSGD knows no layers: x, x' and everything that is sent are vectors of P numbers. `Flat` makes the
parameters of a model views into such a vector, or into a copy of it in half precision. Needs torch and
nothing else.
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
from torch.optim import Optimizer

from recipes.errors import ModelError

GRADIENT_CHUNK = 1 << 26  # elements whose gradients are made FP32 at a time: 256 MiB


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

    def check(self, vector: Tensor) -> None:
        if vector.shape != (self.size,):
            raise ModelError(f"vector of shape {tuple(vector.shape)}, the model has {self.size} parameters")

    def views(self, vector: Tensor) -> list[Tensor]:
        """(P,) -> one view for each parameter, in order."""
        self.check(vector)
        bounds = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [vector[start:end].view(shape) for start, end, shape in bounds]


def layout_of(model: nn.Module) -> Layout:
    """Errors: ModelError where nothing is trainable."""
    trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ModelError("the model has no trainable parameter")
    return Layout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


class FlatParameters:
    """The trained parameters of `model` as one vector in FP32, and their gradients as another.

    A model that computes in FP32 uses the vector as it is: what the algorithm writes is what the model
    computes with. One that computes in `kind`, half precision, uses a copy, made anew by `refresh`; the
    vector holds its master weights, and the gradients are of that kind too.

    Move the model to its device first: `model.to` afterwards would tear the parameters off.
    """

    def __init__(self, model: nn.Module, kind: torch.dtype = torch.float32) -> None:
        self.model = model
        self.layout = layout_of(model)
        self._parameters = [
            p for p in model.parameters() if p.requires_grad
        ]  # parameters(): tied weights once
        kinds = {p.dtype for p in self._parameters}
        devices = {p.device for p in self._parameters}
        if kinds != {torch.float32} or len(devices) != 1:
            raise ModelError(f"parameters of {kinds} on {devices}, expected float32 on one device")
        with torch.no_grad():
            self.vector = torch.cat([p.detach().reshape(-1) for p in self._parameters])  # (P,) float32
            self.copy = None if kind == torch.float32 else self.vector.to(kind)  # (P,)
        self.grad = torch.zeros(self.layout.size, dtype=kind, device=devices.pop())  # (P,)
        self._point_at(self.vector if self.copy is None else self.copy)
        for p, g in zip(self._parameters, self.layout.views(self.grad), strict=True):
            p.grad = g  # autograd adds into a gradient that is there, so backward() fills the vector

    @cached_property
    def masters(self) -> list[Tensor]:
        """What an optimizer changes, parameter by parameter: views of the vector."""
        if self.copy is None:
            return [*self._parameters]
        return [view.detach().requires_grad_() for view in self.layout.views(self.vector)]

    def step(self, optimizer: Optimizer) -> None:
        """x_i <- x_i - optimizer(g_i). Of gradients in half precision so many at a time become FP32."""
        if self.copy is None:
            optimizer.step()
            return
        for part in self._parts:
            for master, grad in part:
                master.grad = grad.float()
            optimizer.step()  # passes over the parameters without a gradient
            for master, _ in part:
                master.grad = None

    @cached_property
    def _parts(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Masters with their gradients, in parts of about AT_ONCE elements."""
        parts: list[list[tuple[Tensor, Tensor]]] = []
        room = 0
        for pair in zip(self.masters, self.layout.views(self.grad), strict=True):
            if room <= 0:
                parts.append([])
                room = GRADIENT_CHUNK
            parts[-1].append(pair)
            room -= pair[0].numel()
        return parts

    def take(self, x: Tensor) -> None:
        """x_i <- x."""
        self.vector.copy_(x)

    def clip(self, limit: float) -> float:
        """Scale the gradient down to the norm `limit` (0: leave it); the norm it had."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in self.layout.views(self.grad)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if limit > 0:
            self.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def refresh(self) -> None:
        """The model computes with what is in the vector now."""
        if self.copy is not None:
            self.copy.copy_(self.vector)

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Inside, the model computes with `vector` (P,) in place of its own. Afterwards a copy waits for its
        `refresh`.
        """
        self.layout.check(vector)
        if self.copy is not None:
            self.copy.copy_(vector)
            yield self.model
            return
        self._point_at(vector.to(self.vector.device))  # itself, where it lies there already
        try:
            yield self.model
        finally:
            self._point_at(self.vector)

    def _point_at(self, vector: Tensor) -> None:
        for p, view in zip(self._parameters, self.layout.views(vector), strict=True):
            p.data = view
