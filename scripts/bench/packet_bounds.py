"""Bounds of a packet: the entropy of its contents, and the packet of the reference implementation.

The reference is DS3Lab/CocktailSGD: every 10th element, torch.topk, a bitmask, a grid scaled by the largest.
"""

from __future__ import annotations

import numpy as np
import torch

from compress import entropy
from compress.coding import unpack
from compress.packet import read_header


def entropy_bound(packet: bytes, m: int) -> float:
    """Bound the bits of each of m sampled elements: H(K) + K (H(codes) + 16 / bucket), of what was sent."""
    codes = read_header(memoryview(packet), m).expanded().codes()
    bits, density = codes.quant_bits, codes.count / m
    if bits == 3:
        levels = unpack(codes.packed[-(-codes.count // 8) :], 2, codes.count)
        each = 1 + entropy(np.bincount(levels) / codes.count)
    elif bits <= 8:
        each = entropy(np.bincount(unpack(codes.packed, bits, codes.count)) / codes.count)
    else:
        each = float(bits)
    return entropy(np.array([density, 1 - density])) + density * (each + 16 / codes.quant_bucket_size)


def reference_packet(delta: torch.Tensor, topk_ratio: float, bits: int) -> list[np.ndarray]:
    """Encode a sampled delta, (m,), as the reference does: bitmask, codes, FP16 scales.

    There: compress/sparsification.py and compress/fixpoint.py.
    """
    k = max(int(topk_ratio * len(delta)), 1)
    _, at = torch.topk(delta.abs(), k, sorted=False)
    mask = torch.zeros(len(delta), dtype=torch.bool, device=delta.device)
    mask[at] = True
    codes, scale = _grid(delta[mask], bits)
    half = 1 << (bits - 1) if bits > 1 else 0
    numbers = (codes.view(-1) + half).to(torch.uint8).cpu().numpy()
    packed = np.unpackbits(numbers[:, None], axis=1, count=min(bits, 8), bitorder="little")
    return [np.packbits(mask.cpu().numpy()), np.packbits(packed), scale.to(torch.float16).cpu().numpy()]


def reference_values(delta: torch.Tensor, topk_ratio: float, bits: int) -> torch.Tensor:
    """Return what the reference's receiver decodes, (m,): exact top-k on a grid -2**(q-1) .. 2**(q-1) - 1,
    scaled by the largest of 128 values; with one bit, the sign times the root mean square."""
    k = max(round(topk_ratio * len(delta)), 1)
    at = delta.abs().topk(k).indices.sort().values
    codes, scale = _grid(delta[at], bits)
    values = codes * scale / (1 << (bits - 1)) if bits > 1 else (2 * codes - 1) * scale
    return torch.zeros_like(delta).index_copy_(0, at, values.view(-1)[:k])


def _grid(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, 128) codes and (rows, 1) scales."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
    if bits == 1:
        return (rows > 0).float(), rows.square().mean(1, keepdim=True).sqrt()
    half = 1 << (bits - 1)
    scale = rows.abs().amax(1, keepdim=True)
    return (rows / scale * half).nan_to_num_().round_().clamp_(-half, half - 1), scale
