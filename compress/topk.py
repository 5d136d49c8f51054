"""Select the K largest magnitudes of a vector in one read of it: never fewer than K, at most 1 % more.

A magnitude is compared as an integer: the FP32 pattern without its sign. For finite numbers that is the same
order, denormals are not flushed, and NaN and infinity stand above everything, so they cannot hide from the
selection.

    a sample of the vector -> a threshold a little below the exact one -> one pass: which elements reach it?
    -> if over 1 % too many, partition out the smallest: exactly k, ties by position
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from compress.errors import NonFiniteError

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
TINY = 27 << 23  # 2**-100: what is smaller is never sent, it stays in the sender's residual
CHUNK = 1 << 16  # elements at a time: stays in L2
SAMPLED = 1 << 19
LINE = 16  # elements sampled together: a cache line
SIGMAS = (5.0, 25.0, math.inf)  # how careful the first, the second, the last look is
TOLERANCE = 0.01  # k may be missed by this share


@dataclass(frozen=True)
class Survivors:
    """The result of top-k: values[j] stands at positions[j]."""

    positions: np.ndarray  # (k,) int64 or int32, ascending
    values: np.ndarray  # (k,) float32


class Source(Protocol):
    """A vector that can be searched: by NumPy (`Plain`) or by compiled loops."""

    @property
    def size(self) -> int:
        """Length of the vector, m."""

    def magnitudes(self, line: int, step: int) -> np.ndarray:
        """Gather the patterns without signs of every `step`-th line of `line` elements: (seen,) int32."""

    def reaching(self, low: int, expected: int) -> Survivors:
        """Collect all elements whose magnitude has a pattern of at least `low`, about `expected` of them."""


def largest(v: np.ndarray | Source, k: int) -> Survivors:
    """Select the k largest magnitudes of v, (m,) float32: exactly k up to 2**19 elements, up to 1 % more
    beyond.

    Fewer only where fewer elements have a magnitude of 2**-100 or more. Of equal magnitudes at the border
    the first are taken. NonFiniteError if v holds NaN or infinity.
    """
    source = Plain(v) if isinstance(v, np.ndarray) else v
    for sigmas in SIGMAS:
        low = _guess(source, k, sigmas)
        found = source.reaching(low, k)
        if len(found.positions) >= k or low <= TINY:
            break
    patterns = found.values.view(np.uint32)
    positive, negative = int(patterns.view(np.int32).max(initial=0)), int(patterns.max(initial=0)) & MAGNITUDE
    if max(positive, negative) >= INFINITY:
        worst = int(np.argmax(~np.isfinite(found.values)))
        raise NonFiniteError(float(found.values[worst]), int(found.positions[worst]))
    surplus = len(patterns) - k
    return found if surplus <= spare(source.size, k) else fewer(found, k)


def fewer(found: Survivors, k: int) -> Survivors:
    """Keep the k largest of more, in place: no more than their magnitudes are allocated."""
    magnitudes, surplus = found.values.view(np.int32) & MAGNITUDE, len(found.values) - k
    magnitudes.partition(surplus)
    border = magnitudes[surplus]
    ties = k - int(np.count_nonzero(magnitudes[surplus:] > border))  # that stay: the first
    count = 0
    for start in range(0, len(magnitudes), CHUNK):
        positions, values = (a[start : start + CHUNK] for a in (found.positions, found.values))
        here = values.view(np.int32) & MAGNITUDE
        equal = np.flatnonzero(here == border)[:ties]
        ties -= len(equal)
        keep = here > border
        keep[equal] = True
        kept = np.flatnonzero(keep)
        stop = count + len(kept)
        found.positions[count:stop], found.values[count:stop] = positions.take(kept), values.take(kept)
        count = stop
    return Survivors(found.positions[:count], found.values[:count])


def everything(v: np.ndarray) -> Survivors:
    """Select all of v, zeros and denormals too. NonFiniteError if it holds NaN or infinity."""
    finite = np.isfinite(v)
    if not finite.all():
        wrong = int(finite.argmin())
        raise NonFiniteError(float(v[wrong]), wrong)
    return Survivors(np.arange(len(v), dtype=index_type(len(v))), v)


def none_tiny(v: np.ndarray) -> bool:
    """Tell whether all magnitudes of v, (m,) float32, are at least 2**-100: K = 1 then selects everything."""
    chunks = (np.abs(v[start : start + CHUNK]) for start in range(0, len(v), CHUNK))
    return all(bool((chunk >= 2.0**-100).all()) for chunk in chunks)


def in_chunks(v: torch.Tensor, topk_chunk: int, topk_ratio: float) -> torch.Tensor:
    """Select a share of each chunk of v, (m,) float32, the largest; of a short last one as well. Returns
    positions, (k,) int64, on the device of v."""
    whole = len(v) - len(v) % topk_chunk
    found = [
        _of_rows(v[:whole].view(-1, topk_chunk), topk_ratio),
        whole + _of_rows(v[whole:].view(1, -1), topk_ratio),
    ]
    return torch.cat(found)


def sendable(at: np.ndarray, kept: np.ndarray, m: int) -> Survivors:
    """Leave out what of a selection has a magnitude below 2**-100. at, kept: the bytes of positions in a
    vector of m, and of its values there. NonFiniteError if one is NaN or infinity."""
    values, positions = kept.view(np.float32), at.view(np.int64).astype(index_type(m))
    wrong = np.flatnonzero(~np.isfinite(values))  # NaN and infinity rank first, so they were selected
    if len(wrong):
        raise NonFiniteError(float(values[wrong[0]]), int(positions[wrong[0]]))
    there = np.flatnonzero((values.view(np.int32) & MAGNITUDE) >= TINY)
    return Survivors(positions.take(there), values.take(there))


def _of_rows(rows: torch.Tensor, topk_ratio: float) -> torch.Tensor:
    """Find the largest of each row of (r, c), a share of it: flat positions, ascending, int64."""
    count, long = rows.shape
    if not count * long:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    inside = rows.abs().topk(share_of(long, topk_ratio), sorted=False).indices.sort().values
    return (inside + long * torch.arange(count, device=rows.device)[:, None]).view(-1)


def share_of(m: int, topk_ratio: float) -> int:
    """Return how many of m are kept."""
    return max(round(topk_ratio * m), 1)


def most_kept(m: int, topk_ratio: float, topk_chunk: int = 0) -> int:
    """Return the most values that a selection of this share keeps, of at most m values."""
    if not m:
        return 0
    if topk_chunk and topk_ratio < 1:
        chunks, rest = divmod(m, topk_chunk)
        return chunks * share_of(topk_chunk, topk_ratio) + (share_of(rest, topk_ratio) if rest else 0)
    k = share_of(m, topk_ratio)
    return min(m, k + spare(m, k))


def spare(m: int, k: int) -> int:
    """Return how many over k may stay: none where an exact count is cheap."""
    return int(TOLERANCE * k) if m > SAMPLED else 0


def stride(m: int) -> int:
    """Return the distance of the sampled cache lines: odd, so as not to be in step with blocks or rows."""
    return (m // SAMPLED) | 1 if m > SAMPLED else 1


def wanted(m: int, seen: int, k: int, sigmas: float) -> int:
    """Return the rank in a sample of `seen` elements that enough of all m reach, but for so many sigmas.

    Where two sigmas are well below the tolerance, two will do: then there is seldom anything to cut off.
    """
    if seen == m:
        return k
    share = k / m
    sigma = math.sqrt((1 - share) / (share * seen))  # of the count, relative
    if sigmas == SIGMAS[0] and 3.5 * sigma < TOLERANCE:
        sigmas = 2
    return int(share * seen * (1 + sigma * sigmas) + 1)


def _guess(source: Source, k: int, sigmas: float) -> int:
    """Guess a magnitude that at least k elements reach; TINY where a sample cannot tell."""
    m = source.size
    if k >= m or sigmas == math.inf:
        return TINY
    step = stride(m)
    line = 1 if step == 1 else LINE
    rank = wanted(m, seen(m, line, step), k, sigmas)
    if rank >= seen(m, line, step):
        return TINY
    magnitudes = source.magnitudes(line, step)
    magnitudes.partition(len(magnitudes) - rank)
    return max(int(magnitudes[len(magnitudes) - rank]), TINY)


def seen(m: int, line: int, step: int) -> int:
    """Return how many elements every `step`-th whole line of `line` holds."""
    return -(-(m // line) // step) * line


@dataclass(frozen=True)
class Plain:
    """A vector, searched by NumPy: the reference."""

    v: np.ndarray  # (m,) float32

    @property
    def size(self) -> int:
        return len(self.v)

    def magnitudes(self, line: int, step: int) -> np.ndarray:
        lines = self.v.view(np.int32)[: self.size // line * line].reshape(-1, line)[::step]
        return lines.reshape(-1) & MAGNITUDE

    def reaching(self, low: int, expected: int) -> Survivors:
        """Compare, count and gather each chunk while it is in the cache."""
        v = self.v
        room = min(expected + expected // 8 + CHUNK, len(v))
        positions = np.empty(room, index_type(len(v)))
        values = np.empty(room, np.float32)
        count = 0
        for start in range(0, len(v), CHUNK):
            chunk = v[start : start + CHUNK]
            here = np.flatnonzero((chunk.view(np.int32) & MAGNITUDE) >= low)
            stop = count + len(here)
            if stop > len(values):  # more than the sample promised
                positions, values = (np.resize(a, min(2 * stop, len(v))) for a in (positions, values))
            np.add(here, start, out=positions[count:stop], casting="unsafe")
            chunk.take(here, out=values[count:stop], mode="clip")
            count = stop
        return Survivors(positions[:count], values[:count])


def index_type(m: int) -> type[np.signedinteger]:
    return np.int32 if m < 1 << 31 else np.int64
