"""A packet kept for its sum: expanded and checked like a decoded one, its numbers not made yet.

An update takes 12 bytes a value, and most of a sum's time goes into writing and reading them. Here 1.5 are
kept, and each number is made where it is added, by a compiled loop, to the bit what `decode` makes of it.

That is done for what peers send as a rule: gaps of a byte each, codes of 1, 2, 4 or 8 bits in whole bytes a
bucket, a long vector, on a machine with numba. Of every other packet `expanded` gives the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType

import numpy as np
import torch

from compress.backends import compiled
from compress.bit_packing import lookup
from compress.errors import PacketError
from compress.quantization import Codes, dequantize, signed_table, widen
from compress.sparse_update import Update

from .entropy_coding import expand
from .format import decode, read_codes, read_head
from .index_coding import GAPS

STRIDE = 1 << 10  # values from one whose position is at hand to the next


@dataclass(frozen=True)
class Expanded:
    """What an `Update` of k values is, for who adds it up."""

    size: int  # m, length of the sampled vector
    gaps: np.ndarray  # (k,) uint8: how many are skipped before each
    before: np.ndarray  # (ceil(k / STRIDE) + 1,) int64: the position before each STRIDE-th value; the last
    codes: Codes
    levels: np.ndarray  # (2**bits,) float32: what a code says
    scales: np.ndarray  # (ceil(k / bucket),) float32
    fast: ModuleType = field(compare=False, repr=False)  # `compress.compiled`

    @property
    def count(self) -> int:
        return self.codes.count

    @property
    def nbytes(self) -> int:
        parts = self.gaps, self.before, self.codes.packed, self.codes.scales, self.scales
        return sum(part.nbytes for part in parts)

    def norm(self) -> float:
        """The Euclidean norm: of integers within a bucket, in float64 over the buckets."""
        codes, squared = self.codes, np.square(self.levels.astype(np.int64))
        by_byte = lookup(squared, np.arange(256, dtype=np.uint8), codes.bits).reshape(256, -1).sum(1)
        packed = codes.packed, codes.count, codes.bits, codes.bucket
        return float(np.sqrt(self.fast.squares(*packed, squared, by_byte, self.scales)))

    def add_to(self, out: torch.Tensor, start: int, stop: int, factor: float) -> None:
        """out[start:stop] += factor * what stands there; out: (m,)."""
        begin, end = (int(np.searchsorted(self.before, at)) for at in (start, stop))
        row = begin - 1
        walk = self.gaps, row * STRIDE, int(self.before[row]), begin * STRIDE, (end - 1) * STRIDE
        codes = self.codes.packed, self.codes.bits, self.codes.bucket
        self.fast.add_codes(
            out.numpy(), start, stop, *walk, *codes, self.levels, self.scales, np.float32(factor)
        )

    def decoded(self) -> Update:
        positions = np.empty(self.count, np.int64)
        self.fast.places(self.gaps, positions)
        return Update(self.size, torch.from_numpy(positions), torch.from_numpy(dequantize(self.codes)))


def expanded(packet: bytes, m: int) -> Expanded | Update:
    """What `decode` gives, in the smallest form that can be added up. PacketError as from `decode`."""
    head, fast = read_head(memoryview(packet), m), compiled(m)
    plain = head.kind == GAPS and head.shift == 0 and head.sections[0].raw == head.k
    if fast is None or not plain or head.bits not in (1, 2, 4, 8) or head.bucket * head.bits % 8:
        return decode(packet, m)
    gaps, _ = (in_words(np.frombuffer(expand(section), np.uint8)) for section in head.sections[:2])
    before = np.empty(-(-head.k // STRIDE) + 1, np.int64)
    if not fast.strides(gaps, STRIDE, before):
        return decode(packet, m)  # an escape among them
    if before[-1] >= m:
        raise PacketError(f"a position {before[-1]:,} in a vector of {m:,}")
    codes = read_codes(head)
    codes = replace(codes, packed=in_words(codes.packed))
    return Expanded(m, gaps, before, codes, signed_table(codes.levels), widen(codes.scales), fast)


def in_words(part: np.ndarray) -> np.ndarray:
    """The same bytes where they can be read eight at once: what was stored begins anywhere in its packet."""
    return part if part.ctypes.data % 8 == 0 else part.copy()
