"""Top-k on the GPU: a threshold from a sample, then two passes, to count per block and to gather.

The host is waited for once, for the count and whatever it needs of the values: see `Selected`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from compress.coding import GAPS, EncodedPositions, bytes_and_escapes, in_gap_bytes, index_coding
from compress.errors import NonFiniteError, PacketError
from compress.pinned_copy import array_brought
from compress.quantization import quantizer
from compress.selection import topk

from .launching import launch

BLOCK = 4096
SPARE = 1 << 16  # elements of room beyond an eighth more than are wanted


@dataclass(frozen=True)
class Selected:
    """The result of top-k, on the device: values[j] stands at positions[j]."""

    positions: torch.Tensor  # (k,) int64, ascending
    values: torch.Tensor  # (k,) float32
    rows: np.ndarray  # some of the values, a bucket each, on the host: what levels are fitted to


def largest(v: torch.Tensor, k: int, bucket: int = 1) -> Selected:
    """Select the k largest magnitudes of v, (m,) float32: those of `topk.largest` where that is exact.

    Never more than `topk.spare` allows: of equal magnitudes at the border the first are taken. The device is
    waited for once, seldom more often.
    """
    bits = v.view(torch.int32)
    for sigmas in topk.SIGMAS:
        threshold = _guess(bits, k, sigmas)
        found, counts, sampled = _reaching(bits, threshold, k, bucket)
        if counts.above + counts.equal >= k or counts.threshold <= topk.TINY:
            break
    if counts.largest >= topk.INFINITY:
        worst = int(((bits & topk.MAGNITUDE) >= topk.INFINITY).nonzero()[0])
        raise NonFiniteError(float(v[worst]), worst)
    if counts.kept > len(found[0]):  # a sample that misled: the room did not do
        found = _gather_all(bits, counts.threshold, counts.kept)
    positions, values = (part[: counts.kept] for part in found)
    if counts.kept < k:  # there is no more, and the sample of the values goes beyond them
        sampled = quantizer.seen(values.view(torch.float32), bucket).cpu().numpy()
    if counts.above > k + topk.spare(len(v), k):
        positions, values = _fewer(positions, values, k)
    return Selected(positions, values.view(torch.float32), sampled)


def _fewer(positions: torch.Tensor, values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the k largest of more; of equal ones the first. Nobody waits for the device."""
    magnitudes = values & topk.MAGNITUDE
    border = magnitudes.sort(descending=True).values[k - 1].clone()  # a view would keep all of them
    keep = magnitudes > border
    equal = magnitudes == border
    del magnitudes
    keep |= equal & (equal.cumsum(0) <= k - keep.sum())
    to = keep.cumsum(0).sub_(1).masked_fill_(~keep, k)
    return tuple(part.new_empty(k + 1).scatter_(0, to, part)[:k] for part in (positions, values))  # type: ignore[return-value]


@dataclass(frozen=True)
class CodedPositions:
    """Positions in a sampled vector of m as they leave the device."""

    m: int
    parts: tuple[torch.Tensor, ...]  # (1,) int64 and gap bytes, (b,) uint8; or positions, (k,) int64

    def read(self, *parts: np.ndarray) -> EncodedPositions:
        """Encode them from the bytes of the parts, as the host does."""
        if len(parts) == 1:
            return index_coding.encode_positions(parts[0].view(np.int64), self.m)
        return index_coding.encode_gap_bytes(parts[1][: int(parts[0].view(np.int64)[0])])


def coded(positions: torch.Tensor, m: int) -> CodedPositions:
    """Prepare positions (k,) int64 for the host: where gaps are coded as bytes, only bytes leave the device.

    255 is for 255 skipped and more to come. How many bytes there are is in front of them; the rest of them
    has no meaning.
    """
    if not in_gap_bytes(len(positions), m):
        return CodedPositions(m, (positions,))
    k, blocks = len(positions), triton.cdiv(len(positions), BLOCK)
    counts = torch.empty(blocks, dtype=torch.int64, device=positions.device)
    launch(_escapes, blocks, positions, k, counts, BLOCK)
    ends = counts.cumsum(0)
    out = torch.full((k + m // 255 + 1,), 255, dtype=torch.uint8, device=positions.device)
    launch(_gap_bytes, blocks, positions, k, ends - counts, out, BLOCK)
    return CodedPositions(m, (ends[-1:] + k, out))


def decode_positions(coded: EncodedPositions, m: int, k: int, device: torch.device) -> torch.Tensor:
    """Decode positions on the device, from sections in memory. Gaps in bytes, which long packets hold, are
    added up there; every other kind is decoded on the host."""
    if coded.kind != GAPS or coded.shift or k == 0:
        windows = list(index_coding.decode_positions(coded, m, k, 1 << 16))
        return array_brought(np.concatenate([np.empty(0, np.int64), *windows]), device)
    raw = np.frombuffer(coded.main.data, np.uint8)  # checked here: nobody waits for the device
    gaps, *far = bytes_and_escapes(raw)
    if len(gaps) != k or raw[-1] == 255 or int(raw.sum(dtype=np.int64)) + k > m:
        raise PacketError(f"gaps that end in an escape, or lead out of a vector of {m:,}")
    return positions_behind(gaps, -1, (far[0], far[1]), device)


def positions_behind(
    gaps: np.ndarray, before: int, far: tuple[np.ndarray, np.ndarray], device: torch.device
) -> torch.Tensor:
    """Add up gap bytes (k,) to the positions (k,) int64 behind the position `before`.

    far: values, and how much longer the gap before each of them is.
    """
    steps = array_brought(gaps, device).to(torch.int64).add_(1)
    if len(far[0]):
        at, more = (array_brought(part, device) for part in far)
        steps.index_add_(0, at, more)
    return steps.cumsum(0).add_(before)


def _guess(bits: torch.Tensor, k: int, sigmas: float) -> torch.Tensor:
    """Guess a magnitude that at least k elements reach: () int32 on the device, which nobody waits for."""
    least = torch.full((), topk.TINY, dtype=torch.int32, device=bits.device)
    if k >= len(bits) or sigmas == math.inf:
        return least
    step, line = topk.stride(len(bits)), topk.LINE
    seen = bits if step == 1 else bits[: len(bits) // line * line].view(-1, line)[::step].reshape(-1)
    rank = topk.wanted(len(bits), len(seen), k, sigmas)
    if rank >= len(seen):
        return least
    return torch.maximum((seen & topk.MAGNITUDE).sort().values[len(seen) - rank], least)


@dataclass(frozen=True)
class Counts:
    """Elements around a threshold."""

    above: int
    equal: int
    kept: int  # above it, and so many of those equal as there is use for
    threshold: int
    largest: int  # magnitude of all


def _reaching(
    bits: torch.Tensor, threshold: torch.Tensor, k: int, bucket: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], Counts, np.ndarray]:
    """Gather positions and patterns of the elements above the threshold, and of as many of the equal ones as
    make k, or all where that is hardly more. At most a room for an eighth more than k is filled.

    Also returns the counts, and a sample of the values; they come to the host together.
    """
    blocks, device = triton.cdiv(len(bits), BLOCK), bits.device
    counts = torch.empty(3, blocks, dtype=torch.int64, device=device)
    launch(_count, blocks, bits, len(bits), threshold, counts, blocks, BLOCK)
    ends = counts[:2].cumsum(1)
    above, equal = ends[0, -1], ends[1, -1]
    enough = above + equal <= k + topk.spare(len(bits), k)
    quota = torch.where(enough, equal, (k - above).clamp(min=0))
    room = min(len(bits), k + k // 8 + SPARE)
    found = _gathered(bits, threshold, ends - counts[:2], quota, room)
    rows = quantizer.seen(found[1][:k], bucket)
    numbers = torch.stack([above, equal, quota, threshold.to(torch.int64), counts[2].max()])
    read = torch.cat([numbers.view(torch.int32), rows.reshape(-1)]).cpu().numpy()
    above, equal, quota, low, most = read[:10].view(np.int64).tolist()
    seen = read[10:].view(np.float32).reshape(rows.shape)
    return found, Counts(above, equal, above + min(equal, quota), low, most), seen


def _gathered(
    bits: torch.Tensor, threshold: torch.Tensor, starts: torch.Tensor, quota: torch.Tensor, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.zeros(room, dtype=torch.int64, device=bits.device)
    patterns = torch.zeros(room, dtype=torch.int32, device=bits.device)
    blocks = starts.shape[1]
    launch(
        _gather, blocks, bits, len(bits), threshold, starts, blocks, quota, positions, patterns, room, BLOCK
    )
    return positions, patterns


def _gather_all(bits: torch.Tensor, low: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather all `count` elements above the threshold `low`."""
    found = ((bits & topk.MAGNITUDE) > low).nonzero().view(-1)[:count]
    return found, bits[found]


@triton.jit
def _count(bits, m, threshold, counts, blocks, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.load(bits + i, mask=i < m, other=0) & 0x7FFFFFFF
    low = tl.load(threshold)
    here = counts + tl.program_id(0)
    tl.store(here, tl.sum((magnitude > low).to(tl.int64), 0))
    tl.store(here + blocks, tl.sum((magnitude == low).to(tl.int64), 0))
    tl.store(here + 2 * blocks, tl.max(magnitude, 0).to(tl.int64))


@triton.jit
def _gather(
    bits, m, threshold, starts, blocks, quota, positions, patterns, room, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = tl.load(bits + i, mask=i < m, other=0)
    magnitude = pattern & 0x7FFFFFFF
    low = tl.load(threshold)  # at least 2**-100: the zeros past the end are not kept
    most = tl.load(quota)
    above = tl.load(starts + tl.program_id(0))
    equal = tl.load(starts + blocks + tl.program_id(0))
    same = magnitude == low
    rank = equal + tl.cumsum(same.to(tl.int32), 0)  # 32 bits within a block: half the registers
    keep = (magnitude > low) | (same & (rank <= most))
    to = above + tl.minimum(equal, most) + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(positions + to, i, mask=keep & (to < room))
    tl.store(patterns + to, pattern, mask=keep & (to < room))


@triton.jit
def _escapes(positions, k, counts, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(positions + j, mask=j < k, other=0)
    before = tl.load(positions + j - 1, mask=(j < k) & (j > 0), other=-1)
    gap = tl.where(j < k, here - before - 1, 0)
    tl.store(counts + tl.program_id(0), tl.sum(gap // 255, 0))


@triton.jit
def _gap_bytes(positions, k, starts, out, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(positions + j, mask=j < k, other=0)
    before = tl.load(positions + j - 1, mask=(j < k) & (j > 0), other=-1)
    gap = tl.where(j < k, here - before - 1, 0)
    to = j + tl.load(starts + tl.program_id(0)) + tl.cumsum((gap // 255).to(tl.int32), 0)
    tl.store(out + to, (gap % 255).to(tl.uint8), mask=j < k)
