"""The trainable parameters of a model as one vector.

CocktailSGD knows no layers: x, x' and every packet are vectors of P numbers. `FlatParameters` makes the
parameters of a model views into such a vector, or into a half-precision copy of it.
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

from compress import brought
from recipes.errors import ModelError

GRADIENT_CHUNK = 1 << 26  # gradient elements converted to FP32 at a time: 256 MiB


@dataclass(frozen=True)
class Layout:
    """Places of the parameters in the vector: `named_parameters` order, tied weights once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter, and P at the end: len(names) + 1 numbers."""
        return tuple(accumulate((prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return self.offsets[-1]

    def name_at(self, index: int) -> str:
        """Name of the parameter at coordinate `index`."""
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
    """Lay out the trainable parameters of `model`. Errors: ModelError where there are none."""
    trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ModelError(
            "the model has no trainable parameter", "no section `lora`, or modules that the model has"
        )
    return Layout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


def fill(to: Tensor, vector: Tensor) -> None:
    """Copy a vector to another of any device and dtype, window by window."""
    for start in range(0, len(vector), GRADIENT_CHUNK):
        window = vector[start : start + GRADIENT_CHUNK]
        to[start : start + len(window)] = brought(window, to.device)


class FlatParameters:
    """The trained parameters of `model` as one vector in FP32, and their gradients as another.

    In FP32 the model's parameters are views of the vector itself. With a half-precision `dtype` they are
    views of a copy, which `refresh` updates; the vector has the master weights, and gradients are of that
    dtype too.

    The vector is filled parameter by parameter, and each parameter's former memory is freed: a device is
    never given more of a model in the host's memory than what stays there.

    Args:
        device: of model, copy and gradients; None: the model's own. A frozen part moves there as well.
        vector_on: device of the vector, if another.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        vector_on: torch.device | None = None,
    ) -> None:
        self.model = model
        self.layout = layout_of(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # tied weights once
        dtypes = {p.dtype for p in self._parameters}
        devices = {p.device for p in self._parameters}
        if dtypes != {torch.float32} or len(devices) != 1:
            raise ModelError(f"parameters of {dtypes} on {devices}, expected float32 on one device")
        size, own = self.layout.size, devices.pop()
        there = device or own
        self.vector = torch.empty(size, device=vector_on or there)  # (P,) float32
        self.copy = None if dtype == torch.float32 else torch.empty(size, dtype=dtype, device=there)  # (P,)
        with torch.no_grad():
            for p, start, stop in zip(
                self._parameters, self.layout.offsets, self.layout.offsets[1:], strict=False
            ):
                self.vector[start:stop] = p.reshape(-1)
                if self.copy is not None:
                    self.copy[start:stop] = p.reshape(-1).to(dtype)
                p.data = (self.vector if self.copy is None else self.copy)[start:stop].view(p.shape)
        if there != own:
            model.to(there)  # buffers; the parameters are there
        self.grad = torch.zeros(size, dtype=dtype, device=there)  # (P,)
        for p, g in zip(self._parameters, self.layout.views(self.grad), strict=True):
            p.grad = g  # autograd adds to an existing gradient, so backward() fills the vector

    @cached_property
    def masters(self) -> list[Tensor]:
        """Parameters for the optimizer: views of the vector."""
        if self.copy is None:
            return [*self._parameters]
        return [view.detach().requires_grad_() for view in self.layout.views(self.vector)]

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer: x_i <- x_i - optimizer(g_i). Half-precision gradients become FP32 in chunks."""
        if self.copy is None:
            optimizer.step()
            return
        for part in self._parts:
            for master, grad in part:
                master.grad = grad.float()
            optimizer.step()  # skips parameters without a gradient
            for master, _ in part:
                master.grad = None

    @cached_property
    def _parts(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Masters with their gradients, in parts of about GRADIENT_CHUNK elements."""
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
        """Copy x into the vector."""
        self.vector.copy_(x)

    def clip(self, limit: float) -> float:
        """Clip the gradient to the norm `limit` (0: no clipping); returns its norm before."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in self.layout.views(self.grad)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if limit > 0:
            self.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def refresh(self) -> None:
        """Update the half-precision copy from the vector."""
        if self.copy is not None:
            self.copy.copy_(self.vector)

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Let the model compute with `vector` (P,) meanwhile; a half-precision copy needs `refresh` after.

        Where `vector` is in the host's memory, that of this model waits there as well: a device has no room
        for both. Nobody may read or move it meanwhile.
        """
        self.layout.check(vector)
        if self.copy is not None:
            fill(self.copy, vector)
            yield self.model
            return
        if vector.device == self.vector.device:
            self._point_at(vector)
            try:
                yield self.model
            finally:
                self._point_at(self.vector)
            return
        aside = self.vector.cpu()
        try:
            fill(self.vector, vector)
            yield self.model
        finally:
            fill(self.vector, aside)

    def _point_at(self, vector: Tensor) -> None:
        for p, view in zip(self._parameters, self.layout.views(vector), strict=True):
            p.data = view
