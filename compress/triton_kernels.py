"""Triton kernels: the packets of the host, from tensors on a GPU. Importing this imports triton.

Dequantizing is exact: the bits of `quantization.dequantize`. Top-k takes a threshold from a sample, then two
passes, to count per block and to gather. Nothing here waits for the device: how many values there are stays
there, beside arrays that have room for the most. Whether a `Look` has found them is known with the packet.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from compress import coding, topk
from compress import quantization as host
from compress.coding import ALL, GAPS, MASK, EncodedPositions, bytes_and_escapes
from compress.errors import PacketError
from compress.pinned_copy import array_brought

BLOCK = 1024  # elements of a program
WIDE = 4096  # likewise, in a selection
AT_ONCE = 1024  # values of a program that quantizes, where buckets are no longer
LONGEST = 4096  # bucket: beyond, a program would need more registers than there are
SPARE = 1 << 16  # elements of room beyond an eighth more than are wanted


def launch(kernel: Any, blocks: int, first: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch `blocks` programs of a kernel whose first argument is a tensor, where that tensor is.

    Triton itself launches on the calling thread's current device, and each thread has one of its own.
    """
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[(blocks,)](first, *arguments, **options)


def difference(x: torch.Tensor, y: torch.Tensor, units: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Compute out = x - y on the sample; out: (m,). The last block of the sample may be short."""
    blocks = triton.cdiv(len(out), BLOCK)
    launch(_difference, blocks, x, y, units, out, len(out), block.bit_length() - 1, BLOCK)


def add(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor, alpha: int) -> None:
    """Add alpha * values to x[at]; at: (k,) int64, each at most once. The product is exact, so each element
    is rounded once."""
    launch(_add, triton.cdiv(len(at), BLOCK), x, at, values, len(at), float(alpha), BLOCK)


@triton.jit
def _difference(x, y, units, out, m, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < m
    unit = tl.load(units + (i >> shift), mask=inside, other=0)
    at = (unit << shift) + (i - ((i >> shift) << shift))
    tl.store(out + i, tl.load(x + at, mask=inside) - tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def _add(x, at, values, k, alpha, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = j < k
    where = tl.load(at + j, mask=inside, other=0)
    moved = tl.load(x + where, mask=inside) + alpha * tl.load(values + j, mask=inside)
    tl.store(x + where, moved, mask=inside)


def takes(bits: int, bucket: int) -> bool:
    """Tell whether the device quantizes this; the host does the rest."""
    return bits <= 8 and bucket <= LONGEST and not bucket & (bucket - 1)


@dataclass(frozen=True)
class OnDevice:
    """Codes, scales and levels that have not been read yet."""

    bits: int
    bucket: int
    parts: tuple[torch.Tensor, ...]  # packed codes, (b,) uint8 each; scales; levels, by_largest, settled

    def codes(self, count: int, *parts: np.ndarray) -> host.Codes | None:
        """Make the codes of `count` values from what was read of the parts; None: `host.plan` looks
        further for levels."""
        *packed, scales, at, by_largest, settled = parts
        if not settled.all():
            return None
        levels = host.Levels(at.view(np.float64), np.empty(0, np.uint8), 0.0)
        how = host.Plan(levels, bool(by_largest.any()))
        widths = (1, 2) if self.bits == 3 else (self.bits,)
        whole = [one[: -(-count * width // 8)] for one, width in zip(packed, widths, strict=True)]
        table, patterns = how.packed(scales.view(np.float32)[: -(-count // self.bucket)])
        return host.Codes(self.bits, self.bucket, count, np.concatenate(whole), table, patterns)


def quantize(kept: Selected, bits: int, bucket: int, plans: host.Plans) -> OnDevice:
    """Quantize values as the host does, to 1 to 8 bits, without noise, in buckets of a power of two.

    Codes at the border of two levels may differ from the host's, because sums are added up in another order.
    """
    buckets, device = triton.cdiv(len(kept.values), bucket), kept.values.device
    codes = torch.zeros(len(kept.values), dtype=torch.uint8, device=device)
    scales = torch.zeros(buckets, dtype=torch.int32, device=device)
    together = max(AT_ONCE // bucket, 1)
    launch(
        _quantize, triton.cdiv(buckets, together), kept.values, kept.count, buckets, plans.by_bin[0],
        plans.at[0].float(), plans.by_largest.int(), codes, scales,
        bits, bucket, together, 1 < bits < 8, host.LOWEST, host.SHIFT, host.BINS, host.BEYOND.get(bits, 1.0),
        num_warps=max(4, bucket // 512),
    )  # fmt: skip
    packed = [_pack(codes >> 2, 1), _pack(codes & 3, 2)] if bits == 3 else [_pack(codes, bits)]
    return OnDevice(bits, bucket, (*packed, scales, plans.at[0], plans.by_largest, plans.settled))


def dequantize(codes: host.Codes, device: torch.device, inside: int = 0) -> torch.Tensor:
    """Compute the values, (k,) float32 on the device, from codes of 1 to 16 bits.

    inside: how many values of the first bucket precede these codes, where they are a window of a packet.
    """
    k, bits = codes.count, codes.quant_bits
    out = torch.empty(k, device=device)
    if k == 0:
        return out
    positive = codes.levels.astype(np.float32)
    table = array_brought(np.concatenate([positive, -positive, [0]]).astype(np.float32), device)
    packed, scales = array_brought(codes.packed, device), array_brought(host.widen(codes.scales), device)
    size = codes.quant_bucket_size
    launch(_dequantize, triton.cdiv(k, BLOCK), packed, table, scales, out, k, inside, size, bits, BLOCK)
    return out


def _pack(numbers: torch.Tensor, width: int) -> torch.Tensor:
    each = 8 // width
    padded = torch.zeros(triton.cdiv(len(numbers), each) * each, dtype=torch.uint8, device=numbers.device)
    padded[: len(numbers)] = numbers
    rows = padded.view(-1, each)
    packed = rows[:, 0].clone()
    for i in range(1, each):
        packed |= rows[:, i] << (i * width)
    return packed


@triton.jit
def _nearest(y, by_bin, LOWEST: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr):
    number = (y.to(tl.int32, bitcast=True) >> SHIFT) - LOWEST
    return tl.load(by_bin + tl.minimum(tl.maximum(number, 0), BINS - 1)).to(tl.int32)


@triton.jit
def _quantize(
    values, count, buckets, by_bin, at, by_largest, codes, scales,
    BITS: tl.constexpr, BUCKET: tl.constexpr, ROWS: tl.constexpr, STRETCH: tl.constexpr,
    LOWEST: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    k = tl.load(count)
    largest = tl.load(by_largest)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    x = tl.load(values + i, mask=i < k, other=0.0)
    magnitude = tl.abs(x)
    real = tl.maximum(tl.minimum(k - row * BUCKET, BUCKET), 1).to(tl.float32)
    mean = tl.sum(magnitude / real[:, None], 1).to(tl.int32, bitcast=True) + 0x8000
    pattern = tl.where(largest > 0, tl.max(magnitude, 1).to(tl.int32, bitcast=True) + 0xFFFF, mean)
    scale = tl.minimum(pattern & -65536, 0x7F7F0000).to(tl.float32, bitcast=True)
    inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    y = magnitude * inverse[:, None]
    if STRETCH:
        top = tl.load(at + (1 << (BITS - 1)) - 1)
        worst = tl.max(y, 1) / top
        far = (worst > BEYOND) & (largest == 0)
        worst = tl.where(far, worst, 1.0)
        factor = worst * 0 + 1.0
        least = worst * 0 + float("inf")
        for third in tl.static_range(4):
            wider = tl.exp2(tl.log2(worst) * (third / 3))
            there = tl.load(at + _nearest(y / wider[:, None], by_bin, LOWEST, SHIFT, BINS)) * wider[:, None]
            lost = (y - there) / worst[:, None]
            error = tl.sum(lost * lost, 1)
            factor = tl.where(error < least, wider, factor)
            least = tl.minimum(error, least)
        wide = ((scale * factor).to(tl.int32, bitcast=True) + 0x8000) & -65536
        stretched = tl.minimum(wide, 0x7F7F0000).to(tl.float32, bitcast=True)
        stretched = tl.where(far, stretched, scale)
        y = y * tl.where(scale > 0, scale / tl.where(scale > 0, stretched, 1.0), 0.0)[:, None]
        scale = stretched
    code = _nearest(y, by_bin, LOWEST, SHIFT, BINS) | ((x < 0).to(tl.int32) << (BITS - 1))
    tl.store(codes + i, code.to(tl.uint8), mask=i < k)
    tl.store(scales + row, scale.to(tl.int32, bitcast=True), mask=row < buckets)


@triton.jit
def _dequantize(packed, table, scales, out, k, before, bucket, BITS: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = j < k
    if BITS == 16:
        word = tl.load(packed + j, mask=inside, other=0).to(tl.int32)
        word = word | (tl.load(packed + k + j, mask=inside, other=0).to(tl.int32) << 8)
        level = (word & 0x7FFF).to(tl.float32)
        level = tl.where(word >= 0x8000, -level, level)
    elif BITS == 3:
        sign = (tl.load(packed + j // 8, mask=inside, other=0).to(tl.int32) >> (j % 8).to(tl.int32)) & 1
        low = tl.load(packed + (k + 7) // 8 + j // 4, mask=inside, other=0).to(tl.int32)
        level = tl.load(table + (((low >> ((j % 4) * 2).to(tl.int32)) & 3) | (sign << 2)))
    else:
        byte = tl.load(packed + (j * BITS) // 8, mask=inside, other=0).to(tl.int32)
        level = tl.load(table + ((byte >> ((j * BITS) % 8).to(tl.int32)) & ((1 << BITS) - 1)))
    scale = tl.load(scales + (j + before) // bucket, mask=inside, other=0.0)
    tl.store(out + j, level * scale, mask=inside)


@dataclass(frozen=True)
class Look:
    """One way to look for the k largest magnitudes of a vector of m."""

    m: int
    k: int
    room: int  # for the elements that reach the threshold
    cut: bool  # those too many are cut off, at the cost of a sort
    sigmas: tuple[float, ...] = topk.SIGMAS  # how careful this look is, and the later ones

    @property
    def most(self) -> int:
        """The most values that it keeps."""
        return min(self.k + topk.spare(self.m, self.k), self.room)

    def next(self, found: Found) -> Look | None:
        """Say how to look again, where this look did not find what it was to; None: it did."""
        reached = found.above + found.equal
        if reached < self.k and found.threshold > topk.TINY:
            return replace(self, sigmas=self.sigmas[1:], cut=True)
        if reached < self.k:  # there are no more
            return replace(self, k=reached, room=reached, cut=False, sigmas=topk.SIGMAS[-1:])
        if found.kept <= (self.room if self.cut else self.most):
            return None
        return replace(self, room=max(self.room, found.kept), cut=True)


def first_look(m: int, k: int) -> Look:
    """Say how to look for k of m at first: with a cut where a careful threshold lets more than 1 % too many
    pass."""
    step = topk.stride(m)
    sample = m if step == 1 else topk.seen(m, topk.LINE, step)
    careful = topk.wanted(m, sample, k, topk.SIGMAS[0]) * m > (k + topk.spare(m, k)) * sample
    return Look(m, k, min(m, k + k // 8 + SPARE), careful)


@dataclass(frozen=True)
class Found:
    """Elements around a threshold, as the host reads them."""

    above: int
    equal: int
    kept: int  # above it, and so many of those equal as there is use for
    threshold: int
    largest: int  # magnitude of all
    count: int  # that are left after a cut


@dataclass(frozen=True)
class Selected:
    """The result of top-k, on the device: values[j] stands at positions[j]; from `count` on there is none."""

    positions: torch.Tensor  # (most,) int64, ascending
    values: torch.Tensor  # (most,) float32
    count: torch.Tensor  # () int64
    numbers: torch.Tensor  # (6,) int64, of `Found`


def largest(v: torch.Tensor, look: Look) -> Selected:
    """Select the k largest magnitudes of v, (m,) float32: those of `topk.largest` where that is exact.

    Never more than `topk.spare` allows: of equal magnitudes at the border the first are taken.
    """
    bits, k = v.view(torch.int32), look.k
    threshold, blocks = _guess(bits, k, look.sigmas[0]), triton.cdiv(look.m, WIDE)
    counts = torch.empty(3, blocks, dtype=torch.int64, device=v.device)
    launch(_count, blocks, bits, look.m, threshold, counts, blocks, WIDE)
    ends = counts[:2].cumsum(1)
    above, equal = ends[0, -1], ends[1, -1]
    quota = torch.where(above + equal <= k + topk.spare(look.m, k), equal, (k - above).clamp(min=0))
    positions = torch.full((look.room,), look.m, device=v.device)
    patterns = torch.zeros(look.room, dtype=torch.int32, device=v.device)
    launch(
        _gather, blocks, bits, look.m, threshold, ends - counts[:2], blocks, quota, positions, patterns,
        look.room, WIDE,
    )  # fmt: skip
    count = kept = above + torch.minimum(equal, quota)
    if look.cut:
        positions, patterns, count = _fewer(positions, patterns, kept, look)
    numbers = torch.stack([above, equal, kept, threshold.to(torch.int64), counts[2].max(), count])
    positions, values = positions[: look.most], patterns[: look.most].view(torch.float32)
    return Selected(positions, values, count.clamp(max=look.most), numbers)  # kernels write as many as that


def _fewer(
    positions: torch.Tensor, values: torch.Tensor, count: torch.Tensor, look: Look
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the k largest where there are too many more; of equal ones the first."""
    magnitudes, k, most = values & topk.MAGNITUDE, look.k, look.most
    border = magnitudes.sort(descending=True).values[k - 1].clone()  # a view would keep all of them
    keep = magnitudes > border
    equal = magnitudes == border
    keep |= equal & (equal.cumsum(0) <= k - keep.sum())
    few = count <= most
    keep |= few & (magnitudes > 0)
    del magnitudes
    to = keep.cumsum(0).sub_(1).masked_fill_(~keep, most)
    both = (part.new_full((most + 1,), rest) for part, rest in ((positions, look.m), (values, 0)))
    positions, values = (new.scatter_(0, to, old) for new, old in zip(both, (positions, values), strict=True))
    return positions[:most], values[:most], torch.where(few, count, k)


@dataclass(frozen=True)
class CodedPositions:
    """Positions in a sampled vector of m as they leave the device."""

    kind: int | None  # as `coding.byte_kind`
    m: int
    parts: tuple[torch.Tensor, ...]  # (1,) int64 and bytes, (b,) uint8; None: positions, (k,) int64

    def read(self, count: int, *parts: np.ndarray) -> EncodedPositions:
        """Encode `count` of them from the bytes of the parts, as the host does."""
        if self.kind is None:
            return coding.encode_positions(parts[0].view(np.int64)[:count], self.m)
        return coding.encode_bytes(self.kind, parts[1][: int(parts[0].view(np.int64)[0])])


def coded(positions: torch.Tensor, count: torch.Tensor, m: int, kind: int | None) -> CodedPositions:
    """Prepare the first `count` of positions (k,) int64 for the host: where they are coded as bytes, only
    bytes leave the device. All that follow are m.

    Of gaps 255 is for 255 skipped and more to come. How many bytes there are is in front of them; the rest of
    them has no meaning.
    """
    k, device = len(positions), positions.device
    if kind is None:
        return CodedPositions(kind, m, (positions,))
    if kind == ALL:
        return CodedPositions(kind, m, (positions.new_zeros(1), positions.new_empty(0, dtype=torch.uint8)))
    if kind == MASK:
        mask = torch.zeros((m // 8 + 1) * 8, dtype=torch.uint8, device=device).index_fill_(0, positions, 1)
        mask[m:] = 0
        packed = (mask.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=device)).sum(
            1, dtype=torch.uint8
        )
        return CodedPositions(kind, m, (positions.new_full((1,), -(-m // 8)), packed))
    blocks = triton.cdiv(k, WIDE)
    counts = torch.empty(blocks, dtype=torch.int64, device=device)
    launch(_escapes, blocks, positions, count, counts, WIDE)
    ends = counts.cumsum(0)
    out = torch.full((k + m // 255 + 1,), 255, dtype=torch.uint8, device=device)
    launch(_gap_bytes, blocks, positions, count, ends - counts, out, WIDE)
    return CodedPositions(kind, m, (ends[-1:] + count, out))


def decode_positions(coded: EncodedPositions, m: int, k: int, device: torch.device) -> torch.Tensor:
    """Decode positions on the device, from sections in memory. Gaps in bytes, which long packets hold, are
    added up there, and all positions are made there; every other kind is decoded on the host."""
    if coded.kind == ALL:
        return torch.arange(m, device=device)
    if coded.kind != GAPS or coded.shift or k == 0:
        windows = list(coding.decode_positions(coded, m, k, 1 << 16))
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
def _escapes(positions, count, counts, BLOCK: tl.constexpr):
    k = tl.load(count)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(positions + j, mask=j < k, other=0)
    before = tl.load(positions + j - 1, mask=(j < k) & (j > 0), other=-1)
    gap = tl.where(j < k, here - before - 1, 0)
    tl.store(counts + tl.program_id(0), tl.sum(gap // 255, 0))


@triton.jit
def _gap_bytes(positions, count, starts, out, BLOCK: tl.constexpr):
    k = tl.load(count)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(positions + j, mask=j < k, other=0)
    before = tl.load(positions + j - 1, mask=(j < k) & (j > 0), other=-1)
    gap = tl.where(j < k, here - before - 1, 0)
    to = j + tl.load(starts + tl.program_id(0)) + tl.cumsum((gap // 255).to(tl.int32), 0)
    tl.store(out + to, (gap % 255).to(tl.uint8), mask=j < k)
