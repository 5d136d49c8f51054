"""Top-k on the GPU: a threshold from a sample, then two passes, to count per block and to gather."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from compress.coding import CROWDED, FEW, GAPS, EncodedPositions, encode_steps, index_coding
from compress.errors import NonFiniteError, PacketError
from compress.selection import topk

from .launching import launch

BLOCK = 4096


@dataclass(frozen=True)
class Survivors:
    """The result of top-k, on the device: values[j] stands at positions[j]."""

    positions: torch.Tensor  # (k,) int64, ascending
    values: torch.Tensor  # (k,) float32


def largest(v: torch.Tensor, k: int) -> Survivors:
    """Select the k largest magnitudes of v, (m,) float32: those of `topk.largest` where that is exact."""
    bits = v.view(torch.int32)
    for sigmas in topk.SIGMAS:
        low = _guess(bits, k, sigmas)
        found = _reaching(bits, low)
        if len(found.positions) >= k or low <= topk.TINY:
            break
    magnitudes = found.values.view(torch.int32) & topk.MAGNITUDE
    if len(magnitudes) and int(magnitudes.max()) >= topk.INFINITY:
        worst = int((magnitudes >= topk.INFINITY).nonzero()[0])
        raise NonFiniteError(float(found.values[worst]), int(found.positions[worst]))
    surplus = len(magnitudes) - k
    if surplus <= topk.spare(len(v), k):
        return found
    border = magnitudes.sort().values[surplus]
    keep = magnitudes >= border
    surplus = int(keep.sum()) - k
    if surplus:
        ties = (magnitudes == border).nonzero().flatten()
        keep[ties[len(ties) - surplus :]] = False
    return Survivors(found.positions[keep], found.values[keep])


def encode_positions(positions: torch.Tensor, m: int) -> EncodedPositions:
    """Encode positions as the host does; where every gap fits a byte, only bytes leave the device."""
    k = len(positions)
    if FEW < k <= CROWDED * m:
        step = positions.diff(prepend=positions.new_tensor([-1]))
        if int(step.max()) <= 255:
            return encode_steps(step.to(torch.uint8).cpu().numpy())
    return index_coding.encode_positions(positions.cpu().numpy(), m)


def decode_positions(coded: EncodedPositions, m: int, k: int, device: torch.device) -> torch.Tensor:
    """Decode positions on the device, from sections in memory. Gaps of a byte each, which long packets hold,
    are added up there; every other kind is decoded on the host."""
    if coded.kind != GAPS or coded.shift or coded.main.raw != k or k == 0:
        windows = list(index_coding.decode_positions(coded, m, k, 1 << 16))
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *windows])).to(device)
    gaps = np.frombuffer(coded.main.data, np.uint8)  # checked here: nobody waits for the device
    if gaps.max() == 255 or int(gaps.sum(dtype=np.int64)) + k > m:
        raise PacketError(f"gaps that end in an escape, or lead out of a vector of {m:,}")
    return positions_behind(gaps, -1, device)


def positions_behind(gaps: np.ndarray, before: int, device: torch.device) -> torch.Tensor:
    """Add up gap bytes (k,) without escapes to the positions (k,) int64 behind the position `before`."""
    steps = torch.from_numpy(gaps.copy()).to(device).to(torch.int64).add_(1)
    return steps.cumsum(0).add_(before)


def _guess(bits: torch.Tensor, k: int, sigmas: float) -> int:
    if k >= len(bits) or sigmas == math.inf:
        return topk.TINY
    step, line = topk.stride(len(bits)), topk.LINE
    seen = bits if step == 1 else bits[: len(bits) // line * line].view(-1, line)[::step].reshape(-1)
    rank = topk.wanted(len(bits), len(seen), k, sigmas)
    if rank >= len(seen):
        return topk.TINY
    return max(int((seen & topk.MAGNITUDE).sort().values[len(seen) - rank]), topk.TINY)


def _reaching(bits: torch.Tensor, low: int) -> Survivors:
    blocks = triton.cdiv(len(bits), BLOCK)
    counts = torch.empty(blocks, dtype=torch.int64, device=bits.device)
    launch(_count, blocks, bits, len(bits), low, counts, BLOCK)
    ends = counts.cumsum(0)
    k = int(ends[-1]) if blocks else 0
    positions = torch.empty(k, dtype=torch.int64, device=bits.device)
    values = torch.empty(k, dtype=torch.int32, device=bits.device)
    if k:
        launch(_gather, blocks, bits, len(bits), low, ends - counts, positions, values, BLOCK)
    return Survivors(positions, values.view(torch.float32))


@triton.jit
def _count(bits, m, low, counts, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.load(bits + i, mask=i < m, other=0) & 0x7FFFFFFF
    tl.store(counts + tl.program_id(0), tl.sum((magnitude >= low).to(tl.int64), 0))


@triton.jit
def _gather(bits, m, low, starts, positions, values, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = tl.load(bits + i, mask=i < m, other=0)
    keep = (pattern & 0x7FFFFFFF) >= low  # low is at least 2**-100: the zeros past the end are not kept
    to = tl.load(starts + tl.program_id(0)) + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(positions + to, i, mask=keep)
    tl.store(values + to, pattern, mask=keep)
