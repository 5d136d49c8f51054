"""Kernels over the full vector: the difference on a sample, and the update added to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

BLOCK = 1024


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
