"""Which coordinates a round visits: known to everybody from (seed, round), so no position of it is ever sent.

The n coordinates are cut into units: blocks of `block` neighbours, or single elements. The units stand in a
seeded order, and the rounds walk along it as along a ring, p * units at a time:

    order:  | round 0 | round 1 | round 2 | rou|nd 3 | round 4 ...        p = 0.3: round 3 goes round the end
             ------------- one epoch ----------
With p = a / b in lowest terms, the walk is back at its start after b rounds (a epochs), and a new order is
drawn. Inside those b rounds every window of 1/p rounds visits every coordinate exactly once. For p = 1/n
that is: every n rounds, each coordinate once, in a new order each time. Fragments (`ordered`) are units that
stand as they lie in the vector: every n rounds each n-th of it once, from its first layers to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch

from compress.backends import compiled, usable
from compress.sparse_update import Update

from .permutation import permute
from .schedule import walk

CHUNK = 1 << 15  # elements gathered at a time: two such pieces stay in a core's L2


@dataclass(frozen=True)
class Sample:
    """The `m` of `n` coordinates that one round visits, in ascending order."""

    n: int  # length of the full vector
    block: int  # neighbours that are visited together
    units: torch.Tensor = field(compare=False, repr=False)  # (u,) int64, ascending: the blocks visited
    m: int  # how many coordinates that makes

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n,) -> (m,), a copy. Reads only what is sampled."""
        self._check(x, self.n, "the full vector", (torch.float32, torch.bfloat16))
        out = torch.empty(self.m, dtype=x.dtype, device=x.device)
        torch.index_select(self._rows(x), 0, self._whole(x.device), out=self._rows(out))
        self._rest(out).copy_(self._rest(x))
        return out

    def difference(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x, y: (n,) -> (m,): x - y on the sample, each element of both read once."""
        self._check(x, self.n, "the full vector")
        self._check(y, self.n, "the full vector")
        out = torch.empty(self.m, device=x.device)
        if usable(x):
            from compress.backends.triton import (
                vector_kernels,  # imports triton: only where a tensor is on a GPU
            )

            vector_kernels.difference(x, y, self.units.to(x.device), self.block, out)
            return out
        if x.device.type == "cpu":
            fast = compiled(self.m)
            if fast:
                fast.subtract(x.numpy(), y.numpy(), self.units.numpy(), self._shift, 0, out.numpy())
                return out
            parts = self._rows(x), self._rows(y), self._whole(x.device), self._rows(out)
            _subtract_rows(*(part.numpy() for part in parts))
        else:
            torch.index_select(self._rows(x), 0, self._whole(x.device), out=self._rows(out))
            self._rows(out).sub_(self._rows(y).index_select(0, self._whole(x.device)))
        torch.sub(self._rest(x), self._rest(y), out=self._rest(out))
        return out

    def put_(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """x[sample] = v, in place. x: (n,), v: (m,)."""
        self._check(x, self.n, "the full vector")
        self._check(v, self.m, "the sampled vector")
        self._rows(x).index_copy_(0, self._whole(x.device), self._rows(v))
        self._rest(x).copy_(self._rest(v))
        return x

    def add_(self, x: torch.Tensor, update: Update, alpha: int = 1) -> torch.Tensor:
        """x[coordinates] += alpha * values, in place; alpha is 1 or -1. One rounding an element: the same
        bits anywhere.
        """
        self._check(x, self.n, "the full vector")
        if alpha not in (1, -1):
            raise ValueError(f"alpha {alpha}: only 1 and -1 give the same bits on every device")
        if update.size != self.m:
            raise ValueError(f"an update of {update.size:,} sampled elements for a sample of {self.m:,}")
        if not len(update.positions):
            return x
        fast = compiled(self.m) if x.device.type == "cpu" else None
        if fast:
            self._add_fast(x, update, alpha, fast)
            return x
        where = self.coordinates(update.positions.to(x.device))
        if usable(x):
            from compress.backends.triton import vector_kernels

            vector_kernels.add(x, where, update.values.to(x.device), alpha)
            return x
        return x.index_add_(0, where, update.values.to(x.device), alpha=alpha)

    def coordinates(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions in the sampled vector -> coordinates in the full one, both (k,) int64."""
        if self.m == self.n:
            return positions
        shift = self._shift
        units = self.units.to(positions.device)
        jump = (units - torch.arange(len(units), device=units.device)) << shift
        if positions.device.type == "cpu":
            at = positions.numpy()
            return torch.from_numpy(jump.numpy().take(at >> shift) + at)
        return positions + jump[positions >> shift]

    def namer(self, names: Sequence[str], offsets: Sequence[int]) -> Callable[[int], str]:
        """Position in the sampled vector -> name of the parameter it belongs to.

        offsets: where each named parameter starts in the full vector, ascending.
        """

        def name(position: int) -> str:
            at = int(self.coordinates(torch.tensor([position]))[0])
            which = int(np.searchsorted(np.asarray(offsets), at, side="right")) - 1
            return f"{names[which]}, element {at - offsets[which]:,}"

        return name

    def _add_fast(self, x: torch.Tensor, update: Update, alpha: int, fast: ModuleType) -> None:
        positions, values = update.positions.cpu().numpy(), update.values.cpu().numpy()
        if not 0 <= positions.min() <= positions.max() < self.m:  # the loop does not look
            raise IndexError(f"positions from {positions.min():,} to {positions.max():,}, {self.m:,} sampled")
        fast.add(x.numpy(), self.units.cpu().numpy(), self._shift, positions, values, alpha < 0)

    @property
    def _shift(self) -> int:
        return self.block.bit_length() - 1

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The whole blocks of a full or a sampled vector, one a row."""
        return x[: len(x) - len(x) % self.block].view(-1, self.block)

    def _whole(self, device: torch.device) -> torch.Tensor:
        """Which rows of the full vector are rows of the sample."""
        return self.units[: self.m // self.block].to(device)

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        """The short last block of a full or a sampled vector, empty where the sample lacks it."""
        return x[len(x) - self.m % self.block :]

    def _check(
        self, x: torch.Tensor, length: int, what: str, kinds: tuple[torch.dtype, ...] = (torch.float32,)
    ) -> None:
        if x.dtype not in kinds or x.shape != (length,) or not x.is_contiguous():
            raise ValueError(
                f"{what} is a contiguous float32 vector of {length:,}, this is {x.dtype} of {tuple(x.shape)}"
            )


def draw(
    n: int,
    p: float,
    block: int,
    seed: int,
    round: int,
    device: torch.device | str = "cpu",
    ordered: bool = False,
) -> Sample:
    """The sample of one round: a share p of the n coordinates, in blocks of `block` (a power of two; 1:
    elements); `ordered`: in one range, as `walk` has it.
    """
    at = walk(n, p, block, seed, round, ordered)
    spots = torch.arange(at.first, at.last, device=device) % at.count
    if at.key:
        units = _standing(spots, at.count, list(at.key))
    else:  # a range that goes round the end begins behind where it stops
        units = spots.sort().values if len(spots) and spots[0] > spots[-1] else spots
    missing = -n % at.block if len(units) and int(units[-1]) == at.count - 1 else 0
    return Sample(n, at.block, units, len(units) * at.block - missing)


def _standing(places: torch.Tensor, count: int, key: list[int]) -> torch.Tensor:
    """(u,) places -> (u,) the units that stand there, ascending."""
    if places.device.type != "cpu":
        return permute(places, count, key).sort().values
    units = np.empty(len(places), np.int64)
    for start in range(
        0, len(units), CHUNK
    ):  # NumPy, in pieces that stay in the cache: a quarter of the time
        units[start : start + CHUNK] = permute(places[start : start + CHUNK].numpy(), count, key)
    units.sort()
    return torch.from_numpy(units)


def _subtract_rows(x: np.ndarray, y: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out = x[rows] - y[rows]; x, y: (r, block), rows: (u,), out: (u, block). In pieces that stay in the
    cache.
    """
    # NumPy: its take is twice as fast here as torch's index_select; the memory is the same
    step = max(CHUNK // x.shape[1], 1)
    scratch = np.empty((min(step, len(rows)), x.shape[1]), np.float32)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        a, b = out[start : start + step], scratch[: len(piece)]
        x.take(piece, axis=0, out=a, mode="clip")
        y.take(piece, axis=0, out=b, mode="clip")
        np.subtract(a, b, out=a)
