"""Quantize and dequantize on the GPU. Dequantizing is exact: the bits of `quantizer.dequantize`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from compress.pinned_copy import array_brought
from compress.quantization import levels as fitted
from compress.quantization import quantizer as host

from .launching import launch

AT_ONCE = 1024  # values of a program, where buckets are no longer
LONGEST = 4096  # bucket: beyond, a program would need more registers than there are
BLOCK = 1024


def takes(bits: int, bucket: int) -> bool:
    """Tell whether the device quantizes this; the host does the rest."""
    return bits <= 8 and bucket <= LONGEST and not bucket & (bucket - 1)


def quantize(values: torch.Tensor, bits: int, bucket: int, rows: np.ndarray, step: float = 0.0) -> OnDevice:
    """Quantize (k,) values as the host does, to 1 to 8 bits, without noise, in buckets of a power of two.

    rows: some of the values, one bucket each, to which levels are fitted by the host's code. Codes at the
    border of two levels may differ from the host's, because sums are added up in another order.
    """
    k = len(values)
    plan = host.plan(rows, bits, step=step)
    buckets = triton.cdiv(k, bucket)
    codes = torch.empty(k, dtype=torch.uint8, device=values.device)
    scales = torch.empty(buckets, dtype=torch.int32, device=values.device)
    by_bin = array_brought(plan.levels.by_bin, values.device)
    at = array_brought(plan.levels.at.astype(np.float32), values.device)
    together = max(AT_ONCE // bucket, 1)
    launch(
        _quantize, triton.cdiv(buckets, together), values, k, buckets, by_bin, at, codes, scales,
        bits, bucket, together, plan.by_largest, bits > 1 and not plan.by_largest,
        fitted.LOWEST, fitted.SHIFT, fitted.BINS, fitted.BEYOND.get(bits, 1.0),
        num_warps=max(4, bucket // 512),
    )  # fmt: skip
    return OnDevice(bits, bucket, k, plan, _join(codes, bits), scales)


@dataclass(frozen=True)
class OnDevice:
    """Codes and scales that have not been read yet."""

    bits: int
    bucket: int
    count: int
    plan: host.Plan
    packed: torch.Tensor  # (bytes,) uint8
    scales: torch.Tensor  # (buckets,) int32: the patterns of float32

    def codes(self, packed: np.ndarray, scales: np.ndarray) -> host.Codes:
        """Make the codes of what was read of `packed` and of the bytes of `scales`."""
        patterns = self.plan.patterns(scales.view(np.float32))
        return host.Codes(self.bits, self.bucket, self.count, packed, self.plan.table, patterns)


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


def _join(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, (k,) uint8 with the sign on top, as the host does."""
    if bits == 3:
        return torch.cat([_pack(codes >> 2, 1), _pack(codes & 3, 2)])
    return _pack(codes, bits)


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
    values, k, buckets, by_bin, at, codes, scales,
    BITS: tl.constexpr, BUCKET: tl.constexpr, ROWS: tl.constexpr, BY_LARGEST: tl.constexpr, STRETCH:
    tl.constexpr, LOWEST: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    x = tl.load(values + i, mask=i < k, other=0.0)
    magnitude = tl.abs(x)
    if BY_LARGEST:
        pattern = tl.max(magnitude, 1).to(tl.int32, bitcast=True) + 0xFFFF
    else:
        real = tl.maximum(tl.minimum(k - row * BUCKET, BUCKET), 1).to(tl.float32)
        pattern = tl.sum(magnitude / real[:, None], 1).to(tl.int32, bitcast=True) + 0x8000
    scale = tl.minimum(pattern & -65536, 0x7F7F0000).to(tl.float32, bitcast=True)
    inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    y = magnitude * inverse[:, None]
    if STRETCH:
        top = tl.load(at + (1 << (BITS - 1)) - 1)
        worst = tl.max(y, 1) / top
        far = worst > BEYOND
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
