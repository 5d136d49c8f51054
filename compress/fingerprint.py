"""One 64-bit number for a vector, so that peers can prove they hold the same one.

F(x) = sum_i a(i) * bits(x_i) mod 2**64, where bits() reads the FP32 pattern as an unsigned integer and
a(i) = A[i mod 65536] * B[i div 65536] is a product of odd pseudo-random 64-bit numbers. a(i) is odd, so one
changed element always changes F; several changes cancel with probability about 2**-33 at worst (sign bits
alone), 2**-64 for low mantissa bits. It is linear: after an update only the changed elements are read. It
proves that peers agree; it is no defence against somebody who searches for a collision.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

ROW = 1 << 16
ROWS_AT_ONCE = 64  # on a device: 64 x 65536 elements as int64 = 32 MiB of scratch
AT_ONCE = 1 << 17  # changed elements, some 50 bytes of scratch each


def fingerprint(x: torch.Tensor, start: int = 0) -> int:
    """Compute the 64-bit fingerprint of a flat FP32 vector: the same value on every device.

    start: offset of x in a longer vector. The fingerprints of the parts of a vector add up, modulo 2**64,
    to that of the whole.
    """
    bits = _bits(x)
    head = min(-start % ROW, len(bits))  # what is left of the row that it starts in
    first = (start + head) // ROW
    full = (len(bits) - head) // ROW
    across, down = fingerprint_tables((first + full + 1) * ROW, bits.device)
    total = _within(bits[:head], start, across, down)
    if full:
        rows = bits[head : head + full * ROW].view(full, ROW)
        total += int((_inner(rows, across) * down[first : first + full]).sum())
    total += _within(bits[head + full * ROW :], (first + full) * ROW, across, down)
    return total & 0xFFFFFFFFFFFFFFFF


def _within(bits: torch.Tensor, start: int, across: torch.Tensor, down: torch.Tensor) -> int:
    """Sum a part of one row."""
    row, at = divmod(start, ROW)
    return int((_long(bits) * across[at : at + len(bits)]).sum()) * int(down[row])


def _inner(rows: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Multiply each row with A: (r, 65536) int32 -> (r,) int64, in blocks: no int64 copy of all."""
    out = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    if rows.device.type == "cpu":
        weights, pattern = across.numpy(), rows.numpy().view(np.uint32)
        for i in range(len(rows)):
            out[i] = int(np.dot(pattern[i].astype(np.int64), weights))  # wraps modulo 2**64, as C does
        return out
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = rows[start : start + ROWS_AT_ONCE]
        out[start : start + len(block)] = _long(block).mul_(across).sum(1)
    return out


def fingerprint_change(
    coordinates: torch.Tensor,  # (k,) int64, each at most once
    old: torch.Tensor,  # (k,) float32
    new: torch.Tensor,  # (k,) float32
    n: int,  # length of the vector
) -> torch.Tensor:
    """Compute how the fingerprint changes where a vector changes at `coordinates` from `old` to `new`.

    Returns () int64, to be added modulo 2**64, on the device of `old`, which nobody waits for.
    """
    was, now = _bits(old), _bits(new)
    device = was.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    across, down = fingerprint_tables(n, device)
    for start in range(0, len(coordinates), AT_ONCE):
        here = slice(start, start + AT_ONCE)
        where = coordinates[here].to(device, torch.int64)
        weight = across[where & (ROW - 1)] * down[where >> 16]
        change = _long(now[here]).sub_(_long(was[here]))
        total += weight.mul_(change).sum()
    return total


def fingerprint_tables(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B for a vector of n numbers."""
    rows = -(-n // ROW)
    whole = 1 << max(rows - 1, 1).bit_length()  # powers of two: few in the cache
    return _odd(ROW, 0x636F636B7461696C, device), _odd(whole, 0x7368616B656E2121, device)[:rows]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """View the FP32 patterns of a flat vector as int32, where they can be summed up."""
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ValueError(
            f"a fingerprint is of a flat float32 vector, this is {x.dtype} of shape {tuple(x.shape)}"
        )
    # on the host where it is not verified that int64 products wrap as they should, as on Apple's GPUs
    there = x if x.device.type in ("cpu", "cuda") else x.cpu()
    return there.detach().contiguous().view(torch.int32)


def _long(bits: torch.Tensor) -> torch.Tensor:
    """Widen int32 patterns to unsigned numbers in int64."""
    return bits.to(torch.int64).bitwise_and_(0xFFFFFFFF)


@lru_cache(maxsize=16)
def _odd(n: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return (n,) int64: splitmix64 of seed + 0 .. n-1, made odd."""
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
