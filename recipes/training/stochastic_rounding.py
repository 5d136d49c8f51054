"""Training without float32 master weights: x_i = x' + d_i, of which d_i alone is stored, in bfloat16, rounded
at random.

Were x_i itself in bfloat16, its rounding, up to 2^-9 |x_i|, would be larger than most steps; it would stand
in d_i = x_i - x', and peers would send it to each other for ever. d_i is small, and so is what rounding does
to it. Rounded at random, with the right mean, small steps are not lost but rare.

    refresh    the model's copy <- x' + d_i
    step       x_i <- x' + d_i in float32, for some parameters at a time; the optimizer; d_i <- x_i - x'
    C[D]       moves x' and x_i alike: d_i stays                      C[d_i]    d_i <- d_i - C[d_i]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compress import Sample, Shard, Update, brought
from recipes.algorithm import ShardUpdate, each_window
from recipes.weight_files import GRADIENT_CHUNK, FlatParameters

LOW = 0xFFFF  # the bits of a float32 that bfloat16 has not


def rounded(x: Tensor, noise: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, to one of the two neighbours at random, so that the mean is x."""
    bits = x.contiguous().view(torch.int32)
    drawn = torch.randint(0, LOW + 1, bits.shape, dtype=torch.int32, device=x.device, generator=noise)
    return drawn.add_(bits).bitwise_and_(~LOW).view(torch.float32).to(torch.bfloat16)


class RoundedLocalModel:
    """Stands in for FlatParameters, and is x_i for a Worker (`recipes.algorithm.LocalModel`).

    Args:
        seed: of the noise, this peer's own.
        device: of d_i and the model; None: the model's own.
        global_model_on: device of x'; None: the same.
    """

    from_global_model = True

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device | None = None,
        global_model_on: torch.device | None = None,
    ) -> None:
        self._flat = FlatParameters(model, torch.bfloat16, device, global_model_on)
        assert self._flat.copy is not None
        self.model, self.layout = model, self._flat.layout
        self.grad, self.copy = self._flat.grad, self._flat.copy
        self.global_model = self._flat.vector  # x', (P,) float32
        self.residual = torch.zeros_like(self.copy)  # d_i   (P,) bfloat16
        self.noise = torch.Generator(self.copy.device).manual_seed(seed)
        empty = torch.zeros((), device=self.copy.device)
        # of a shape, and without memory
        self._nothing = [empty.expand(shape) for shape in self.layout.shapes]
        self.masters: list[Tensor] = [nn.Parameter(nothing) for nothing in self._nothing]

    def bring_global_model(self) -> None:
        """Bring x' from the host's memory beside d_i."""
        self.global_model = self._flat.vector = self.global_model.to(self.residual.device)

    @property
    def vector(self) -> Tensor:
        """x_i (P,), computed anew in the host's memory: a device has no room for it."""
        x = torch.empty(self.layout.size)
        for start, stop in self._windows():
            x[start:stop] = self._x(start, stop)
        return x

    def take(self, x: Tensor) -> None:
        """x_i <- x."""
        for start, stop in self._windows():
            there = brought(x[start:stop], self.residual.device)
            self.residual[start:stop] = there - self._global_model(start, stop)

    def step(self, optimizer: Optimizer) -> None:
        grads = self.layout.views(self.grad)
        for part in self._parts():
            for i in part:
                self.masters[i].data = self._x(*self._place(i)).view(self.layout.shapes[i])
                self.masters[i].grad = grads[i].float()
            optimizer.step()  # passes over the parameters without a gradient
            for i in part:
                start, stop = self._place(i)
                d = self.masters[i].data.view(-1).sub_(self._global_model(start, stop))
                self.residual[start:stop] = rounded(d, self.noise)
                self.masters[i].data, self.masters[i].grad = self._nothing[i], None

    def clip(self, limit: float) -> float:
        return self._flat.clip(limit)

    def refresh(self) -> None:
        for start, stop in self._windows():
            self.copy[start:stop] = self._x(start, stop)

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Compute with `vector` like FlatParameters; the model's copy waits for its `refresh` afterwards."""
        with self._flat.use(vector) as model:
            yield model

    # ---- x_i for a Worker ----------------------------------------------------------------------------------

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        assert other is self.global_model
        return sample.take(shard.of(self.residual)).float()

    def bring(self, piece: ShardUpdate) -> None:
        """Pass, like `LocalVector`."""

    def add_(self, piece: ShardUpdate, alpha: int = 1) -> None:
        """Leave d_i at + C[D], since x' has moved as far; shrink it at - C[d_i]."""
        if alpha == 1:
            return
        here = piece.shard.of(self.residual)

        def shrink(window: Update) -> None:
            where = piece.sample.coordinates(window.positions)
            here[where] = rounded(here[where].float() - window.values, self.noise)

        each_window(piece.update, here.device, shrink)

    def distance(self, other: Tensor) -> float:
        assert other is self.global_model
        return float(torch.linalg.vector_norm(self.residual, dtype=torch.float32))

    # ---- small ---------------------------------------------------------------------------------------------

    def _x(self, start: int, stop: int) -> Tensor:
        return self.residual[start:stop].float().add_(self._global_model(start, stop))

    def _global_model(self, start: int, stop: int) -> Tensor:
        """Bring coordinates of x' beside d_i."""
        return brought(self.global_model[start:stop], self.residual.device)

    def _windows(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.layout.size, GRADIENT_CHUNK):
            yield start, min(start + GRADIENT_CHUNK, self.layout.size)

    def _place(self, i: int) -> tuple[int, int]:
        return self.layout.offsets[i], self.layout.offsets[i + 1]

    def _parts(self) -> Iterator[range]:
        """Yield parameters by number, about AT_ONCE elements at a time."""
        first, room = 0, GRADIENT_CHUNK
        for i, (start, stop) in enumerate(pairwise(self.layout.offsets)):
            if room <= 0:
                yield range(first, i)
                first, room = i, GRADIENT_CHUNK
            room -= stop - start
        yield range(first, len(self.layout.names))
