"""The sampling schedule: the coordinates of a round, which every peer derives from (seed, round) alone.

A long vector is cut into shards: ranges that are sampled, compressed and aggregated each on its own.

The n coordinates of a shard form units: blocks of `block_size` neighbours, or single elements. A seeded
permutation puts the units on a ring, and each round visits the next p of it:

    ring:   | round 0 | round 1 | round 2 | rou|nd 3 | round 4 ...        p = 0.3: round 3 wraps around
             ------------- one epoch ----------
With p = a / b in lowest terms the ring is back at its start after b rounds (a epochs), and a new permutation
is drawn. Within those b rounds every window of 1/p rounds visits every coordinate exactly once. For p = 1/n
that is: every n rounds, each coordinate once, in a new order each time. Fragments are units in vector order:
every n rounds each n-th of the vector once, from its first layers to its last.

`Schedule` says which units a round visits without listing them: the permutation can be inverted, so a reader
that goes through the vector window by window asks for the place of each unit. `Sample` lists the units.

The permutation is evaluated at any index: no table of n numbers is ever made. A Feistel network over the
domain a x b, a = ceil(sqrt(n)), b = ceil(n / a), with additions modulo a and b in turn (Black and Rogaway
2002, "generalized Feistel"), repeated where it lands outside 0 .. n-1. Only 64-bit integer arithmetic,
written with operators alone: NumPy on the host and torch on a device give the same order, on any platform and
in any version, because no library's random numbers are involved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from compress.backends import compiled, in_threads, usable
from compress.fingerprint import fingerprint_change, fingerprint_tables
from compress.packet import PackedUpdate, Update
from compress.pinned_copy import brought

# ---- the permutation ---------------------------------------------------------------------------------------

WORD = 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF
STEPS = 6  # three per half: beyond that the pair statistics in the tests no longer change


def mix64(x: int) -> int:
    """Apply splitmix64's finalizer (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    x = (x + 0x9E3779B97F4A7C15) & LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & LONG
    return x ^ (x >> 31)


def keys(*numbers: int) -> list[int]:
    """Derive `STEPS` 32-bit keys from numbers (a seed, a round), each taken modulo 2**64."""
    state = 0
    for number in numbers:
        state = mix64(state ^ (number & LONG))
    return [mix64(state + step) & WORD for step in range(STEPS)]


def mix32(x: Any, key: int) -> Any:
    """Apply Chris Wellons' lowbias32 to x XOR key. x: int64 array or tensor with values in [0, 2**32)."""
    x = x ^ key
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD  # the product may wrap at 2**63: its low 32 bits are right all the same
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def permute(places: Any, n: int, key: list[int], sign: int = 1) -> Any:
    """Return the unit at each place: a bijection for a fixed n and key. It walks on from each number until it
    lands inside 0 .. n - 1; sign -1: back, so units give their places.

    places: int64 array or tensor with values in [0, n); n < 2**60.
    """
    rows, steps = math.isqrt(n - 1) + 1 if n > 1 else 1, [*enumerate(key)][::sign]
    columns = -(-n // rows)
    there = _walk(places, rows, columns, steps, sign)
    out = there >= n
    while out.any():  # a x b exceeds n by less than 2 sqrt(n): few walk twice
        there[out] = _walk(there[out], rows, columns, steps, sign)
        out = there >= n
    return there


def place_of(units: Any, n: int, key: list[int]) -> Any:
    """Invert `permute`: return the place of each unit. units: int64 array or tensor, in [0, n)."""
    return permute(units, n, key, -1)


def _walk(at: Any, rows: int, columns: int, steps: list[tuple[int, int]], sign: int) -> Any:
    left, right = at // columns, at % columns
    for step, k in steps:
        if step % 2 == 0:
            left = _turned(left, (mix32(right, k) * rows) >> 32, rows, sign)
        else:
            right = _turned(right, (mix32(left, k) * columns) >> 32, columns, sign)
    return left * columns + right


def _turned(at: Any, by: Any, size: int, sign: int) -> Any:
    """Turn places on a ring of this size, forwards or (-1) back; at and by: in [0, size)."""
    if sign > 0:
        at = at + by  # in [0, 2 size)
        return at - size * (at >= size)
    at = at - by  # in (-size, size)
    return at + size * (at < 0)


# ---- shards ------------------------------------------------------------------------------------------------

MOST_SHARDS = 1024  # of a vector


@dataclass(frozen=True)
class Shard:
    """A range of the vector: the coordinates start .. stop - 1."""

    number: int
    start: int
    stop: int
    seed: int  # of its samples
    offset: int = 0  # of `within`: start + offset is its place in the whole vector

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """View the shard of x: (n,) -> (size,)."""
        return x[self.start : self.stop]


def cut(n: int, shards: int | Sequence[int], seed: int) -> tuple[Shard, ...]:
    """Cut n coordinates into so many shards, in sizes that differ by at most 1; or where each ends.

    The first has the seed itself, below 2^32, so that a vector of one shard is sampled with it.
    """
    count = shards if isinstance(shards, int) else len(shards)
    if not 1 <= count <= n:
        raise ValueError(f"{count:,} shards of {n:,} coordinates: from 1 to as many as those")
    places = [i * n // count for i in range(count + 1)] if isinstance(shards, int) else [0, *shards]
    if places[-1] != n:
        raise ValueError(f"the last shard ends at {places[-1]:,} of {n:,} coordinates")
    return tuple(Shard(i, places[i], places[i + 1], i << 32 | seed) for i in range(count))


def rises(ends: Sequence[int]) -> bool:
    """Tell whether these can be the ends of shards: none is empty."""
    return all(start < end for start, end in pairwise((0, *ends)))


def within(shards: Sequence[Shard], ranges: Sequence[range]) -> tuple[Shard, ...]:
    """Find the shards of ranges of a vector, in the vector that these ranges make one behind the other.

    Errors: ValueError where a range begins or ends inside a shard.
    """
    found, size = list[Shard](), 0
    for part in ranges:
        offset = part.start - size
        inside = [s for s in shards if part.start <= s.start and s.stop <= part.stop]
        if sum(shard.size for shard in inside) != len(part):
            raise ValueError(f"coordinates {part.start:,} to {part.stop:,} are not a union of shards")
        found += [replace(s, start=s.start - offset, stop=s.stop - offset, offset=offset) for s in inside]
        size += len(part)
    return tuple(found)


# ---- the schedule ------------------------------------------------------------------------------------------

UNITS_PER_ROUND = 16  # small vectors get smaller blocks, so that rounds stay even in size
RANGE = 1 << 12  # elements of a unit, where a sample is one range
TAKEN = 1 << 20  # elements that a thread copies
CHUNK = 1 << 15  # units at a time: two such arrays stay in a core's L2
NO_TABLES = 0, np.empty(0, np.int64), np.empty(0, np.int64)  # no fingerprint is counted


@dataclass(frozen=True)
class Schedule:
    """One round: the places first .. last - 1 of the ring, modulo the number of units."""

    n: int  # length of the full vector
    block_size: int  # neighbours that are visited together
    first: int
    last: int
    key: tuple[int, ...]  # of the permutation; empty: vector order

    @property
    def count(self) -> int:
        """Units of the full vector."""
        return -(-self.n // self.block_size)

    @cached_property
    def m(self) -> int:
        """Length of the sampled vector."""
        size = (self.last - self.first) * self.block_size
        missing = -self.n % self.block_size  # of the last unit
        if missing and self.visited(self.places(self.count - 1, self.count)).size:
            size -= missing
        return size

    def places(self, start: int, stop: int) -> np.ndarray:
        """Return the places of the units start .. stop - 1, (stop - start,) int64; one key, one answer."""
        units = np.arange(start, stop, dtype=np.int64)
        if self.key:
            for at in range(0, len(units), CHUNK):
                units[at : at + CHUNK] = place_of(units[at : at + CHUNK], self.count, list(self.key))
        return units

    def visited(self, places: np.ndarray) -> np.ndarray:
        """Return the indices, ascending, of the places that this round visits."""
        if self.last - self.first == self.count:
            return np.arange(len(places))
        first = self.first % self.count
        last = first + self.last - self.first  # beyond `count`: the round wraps around
        inside = (places >= first) & (places < last)
        return np.flatnonzero(inside | (places < last - self.count))

    def sample(self, device: torch.device | str = "cpu") -> Sample:
        """List the units of the round."""
        places = torch.arange(self.first, self.last, device=device) % self.count
        if not self.key:  # a range that wraps around begins behind where it stops
            units = places.sort().values if len(places) and places[0] > places[-1] else places
        elif places.device.type != "cpu":
            units = permute(places, self.count, list(self.key)).sort().values
        else:  # NumPy, in windows that stay in the cache: a quarter of the time
            units, there = places, places.numpy()
            for at in range(0, len(there), CHUNK):
                there[at : at + CHUNK] = permute(there[at : at + CHUNK], self.count, list(self.key))
            there.sort()
        missing = -self.n % self.block_size if len(units) and int(units[-1]) == self.count - 1 else 0
        return Sample(self.n, self.block_size, units, len(units) * self.block_size - missing)


def one_range(n: int, start: int, stop: int, block_size: int = RANGE) -> Sample:
    """Return the sample of all coordinates start .. stop - 1 of n; start is a multiple of the block size, and
    stop as well, but at the end of the vector."""
    units = torch.arange(start // block_size, -(-stop // block_size))
    return Sample(n, block_size, units, stop - start)


@lru_cache(maxsize=256)
def schedule(
    n: int, random_ratio: float, block_size: int, seed: int, round: int, in_order: bool = False
) -> Schedule:
    """Schedule one round: a share of the n coordinates, in blocks of `block_size` (a power of two).

    in_order: units in vector order, so that a round is one range of the vector.
    """
    share, block_size = _units(n, random_ratio, block_size)
    count = -(-n // block_size)
    cycle, phase = divmod(round, share.denominator)
    first, last = ((phase + i) * share.numerator * count // share.denominator for i in (0, 1))
    return Schedule(n, block_size, first, last, () if share == 1 or in_order else tuple(keys(seed, cycle)))


def most_sampled(n: int, random_ratio: float, block_size: int) -> int:
    """Return the most of n coordinates that a round visits, whatever its number."""
    share, block_size = _units(n, random_ratio, block_size)
    return min(n, math.ceil(share * -(-n // block_size)) * block_size)


def _units(n: int, random_ratio: float, block_size: int) -> tuple[Fraction, int]:
    """Return the share that a round visits, and the coordinates of a unit."""
    share = Fraction(random_ratio).limit_denominator(10**9)
    while block_size > 1 and n * share < UNITS_PER_ROUND * block_size:
        block_size //= 2
    return share, block_size


@dataclass(frozen=True)
class Sample:
    """The `m` of `n` coordinates that one round visits, in ascending order."""

    n: int  # length of the full vector
    block_size: int  # neighbours that are visited together
    units: torch.Tensor = field(compare=False, repr=False)  # (u,) int64, ascending: the blocks visited
    m: int  # how many coordinates that makes
    _placed: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def units_on(self, device: torch.device) -> torch.Tensor:
        """Return the units on a device, to which they travel once."""
        if device not in self._placed:
            self._placed[device] = brought(self.units, device)
        return self._placed[device]

    def windows(self, at_most: int) -> Iterator[tuple[int, Sample]]:
        """Divide the sample: yield where each part begins, and the part, of about `at_most` elements."""
        step = max(at_most // self.block_size, 1)
        for first in range(0, len(self.units), step):
            start = first * self.block_size
            size = min(step * self.block_size, self.m - start)
            yield start, Sample(self.n, self.block_size, self.units[first : first + step], size)

    def take(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the sample of x, (n,) -> (m,), to `out` or a new tensor. Only that is read, and on the host by
        as many threads as torch has."""
        self._check(x, self.n, "the full vector", (torch.float32, torch.bfloat16))
        out = torch.empty(self.m, dtype=x.dtype, device=x.device) if out is None else out
        if x.device.type == "cpu":
            kind = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
            rows, to = (self._rows(part.view(kind)).numpy() for part in (x, out))
            which, step = self._whole(x.device).numpy(), max(TAKEN // self.block_size, 1)
            # NumPy's take keeps no lock of the interpreter, and is a third faster than torch's index_select
            in_threads(
                lambda at: rows.take(which[at : at + step], axis=0, out=to[at : at + step], mode="clip"),
                range(0, len(which), step),
            )
        else:
            torch.index_select(self._rows(x), 0, self._whole(x.device), out=self._rows(out))
        self._short_block(out).copy_(self._short_block(x))
        return out

    def difference(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute x - y on the sample, (n,), (n,) -> (m,); each element of both is read once."""
        self._check(x, self.n, "the full vector")
        self._check(y, self.n, "the full vector")
        if x.device.type == "cpu" and (loops := compiled(self.m)):
            found = np.empty(self.m, np.float32)  # NumPy's lie in huge pages: a quarter of the time
            loops.subtract(x.numpy(), y.numpy(), self.units.numpy(), self._shift, 0, found)
            return torch.from_numpy(found)
        out = torch.empty(self.m, device=x.device)
        if usable(x.device):
            from compress import triton_kernels  # imports triton, so only for a GPU

            triton_kernels.difference(x, y, self.units_on(x.device), self.block_size, out)
            return out
        torch.index_select(self._rows(x), 0, self._whole(x.device), out=self._rows(out))
        self._rows(out).sub_(self._rows(y).index_select(0, self._whole(x.device)))
        torch.sub(self._short_block(x), self._short_block(y), out=self._short_block(out))
        return out

    def put_(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write v, (m,), to the sample of x, (n,), in place."""
        self._check(x, self.n, "the full vector")
        self._check(v, self.m, "the sampled vector")
        self._rows(x).index_copy_(0, self._whole(x.device), self._rows(v))
        self._short_block(x).copy_(self._short_block(v))
        return x

    def add_(self, x: torch.Tensor, update: PackedUpdate | Update, alpha: int = 1) -> torch.Tensor:
        """Add alpha * values at their coordinates of x, (n,), in place; alpha is 1 or -1.

        Each element is rounded once: the same bits on every device. A packed update is for the host alone.
        """
        self._check(x, self.n, "the full vector")
        if alpha not in (1, -1):
            raise ValueError(f"alpha {alpha}: only 1 and -1 give the same bits on every device")
        if update.size != self.m:
            raise ValueError(f"an update of {update.size:,} sampled elements for a sample of {self.m:,}")
        if isinstance(update, PackedUpdate):
            update.add_sampled(x.numpy(), self._blocks(), NO_TABLES, slice(None), alpha)
            return x
        where = self.coordinates(update.positions.to(x.device))
        if usable(x.device):
            from compress import triton_kernels

            triton_kernels.add(x, where, update.values.to(x.device), alpha)
            return x
        return x.index_add_(0, where, update.values.to(x.device), alpha=alpha)

    def add_counted_(
        self, x: torch.Tensor, update: PackedUpdate | Update, start: int, n: int, values: slice = slice(None)
    ) -> torch.Tensor:
        """Add an update to x like `add_`, of a packed one some values, from a multiple of STRIDE on; where
        memory runs out, x is unchanged.

        Returns the change of the fingerprint of the vector of n numbers that has x from `start` on: () int64,
        on the device of x, which nobody waits for.
        """
        self._check(x, self.n, "the full vector")
        if isinstance(update, PackedUpdate):
            tables = start, *(table.numpy() for table in fingerprint_tables(n, x.device))
            return torch.tensor(update.add_sampled(x.numpy(), self._blocks(), tables, values, 1))
        where = self.coordinates(update.positions.to(x.device))
        old = x[where]
        new = old + update.values.to(x.device)
        change = fingerprint_change(where + start, old, new, n)
        x[where] = new
        return change

    def _blocks(self) -> tuple[np.ndarray, int]:
        """Return the blocks, and log2 of their length."""
        return self.units.numpy().view(np.uint64), self._shift

    def coordinates(self, positions: torch.Tensor) -> torch.Tensor:
        """Map positions in the sampled vector to coordinates in the full one, both (k,) int64."""
        if self.m == self.n:
            return positions
        shift = self._shift
        if positions.device.type == "cpu":
            at = positions.numpy()
            block = at >> shift
            return torch.from_numpy((self.units.cpu().numpy().take(block) - block << shift) + at)
        unit = positions >> shift
        moved = self.units_on(positions.device)[unit].sub_(unit)  # in place: a device is short of memory
        return moved.bitwise_left_shift_(shift).add_(positions)

    def positions(self, coordinates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map coordinates, (k,) int64, to positions in the sampled vector: those of the coordinates that it
        visits, (v,) int64, and which these are, (k,) bool."""
        if self.m == self.n:
            return coordinates, torch.ones_like(coordinates, dtype=torch.bool)
        units, wanted = self.units_on(coordinates.device), coordinates >> self._shift
        at = torch.searchsorted(units, wanted).clamp_(max=len(units) - 1)
        visited = units[at] == wanted
        return (at - wanted << self._shift).add_(coordinates)[visited], visited

    @property
    def _shift(self) -> int:
        return self.block_size.bit_length() - 1

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """View the whole blocks of a full or a sampled vector, one a row."""
        return x[: len(x) - len(x) % self.block_size].view(-1, self.block_size)

    def _whole(self, device: torch.device) -> torch.Tensor:
        """Return which rows of the full vector are rows of the sample."""
        return self.units_on(device)[: self.m // self.block_size]

    def _short_block(self, x: torch.Tensor) -> torch.Tensor:
        """View the short last block of a full or a sampled vector; empty where the sample lacks it."""
        return x[len(x) - self.m % self.block_size :]

    def _check(
        self, x: torch.Tensor, length: int, what: str, kinds: tuple[torch.dtype, ...] = (torch.float32,)
    ) -> None:
        if x.dtype not in kinds or x.shape != (length,) or not x.is_contiguous():
            raise ValueError(
                f"{what} is a contiguous float32 vector of {length:,}, this is {x.dtype} of {tuple(x.shape)}"
            )
