"""An update kept as it was packed: checked like a decoded one, its values computed while they are summed.

An update takes 12 bytes a value, and most of a sum's time goes into writing and reading them. Here 1.5 are
kept, and each value is computed where it is added, by a compiled loop, to the bit what `decode` gives. A GPU
is given those 1.5 bytes a value, window by window.

That is done for what peers usually send: gaps of a byte each but for some longer ones, codes of 1, 2, 4 or 8
bits in whole bytes a bucket, a long vector, on a machine with numba. Every other packet is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType

import numpy as np
import torch

from compress.backends import compiled, usable
from compress.bit_packing import lookup
from compress.coding import GAPS, bytes_and_escapes
from compress.errors import PacketError
from compress.quantization import Codes, dequantize, signed_table, widen
from compress.sparse_update import Update

from .decoder import decode_expanded
from .format import read_header

STRIDE = 1 << 10  # values from one whose position is known to the next


@dataclass(frozen=True)
class PackedUpdate:
    """An update of k values that can be added up, measured and decoded, but is not written out."""

    size: int  # m, length of the sampled vector
    gaps: np.ndarray  # (k,) uint8: positions skipped before each value, but for
    far: np.ndarray  # (j,) int64: values, ascending, before which
    longer: np.ndarray  # (j,) int64: so many more are skipped
    before: np.ndarray  # (ceil(k / STRIDE) + 1,) int64: the position before each STRIDE-th value; the last
    codes: Codes
    levels: np.ndarray  # (2**quant_bits,) float32: the value of each code, in scales
    scales: np.ndarray  # (ceil(k / quant_bucket_size),) float32
    loops: ModuleType = field(compare=False, repr=False)  # the compiled loops

    @property
    def count(self) -> int:
        return self.codes.count

    @property
    def nbytes(self) -> int:
        parts = (
            self.gaps,
            self.far,
            self.longer,
            self.before,
            self.codes.packed,
            self.codes.scales,
            self.scales,
        )
        return sum(part.nbytes for part in parts)

    def norm(self) -> float:
        """Return the Euclidean norm: integers within a bucket, float64 over the buckets."""
        codes, squared = self.codes, np.square(self.levels.astype(np.int64))
        by_byte = lookup(squared, np.arange(256, dtype=np.uint8), codes.quant_bits).reshape(256, -1).sum(1)
        packed = codes.packed, codes.count, codes.quant_bits, codes.quant_bucket_size
        return float(np.sqrt(self.loops.squares(*packed, squared, by_byte, self.scales)))

    def add_to(self, out: torch.Tensor, start: int, stop: int, factor: float) -> None:
        """Add to out[start:stop] the values there, times `factor`. out: (m,)"""
        begin, end = (int(np.searchsorted(self.before, at)) for at in (start, stop))
        row = begin - 1
        walk = row * STRIDE, int(self.before[row]), begin * STRIDE, (end - 1) * STRIDE
        codes = self.codes.packed, self.codes.quant_bits, self.codes.quant_bucket_size
        self.loops.add_codes(
            out.numpy(), start, stop, self.gaps, self.far, self.longer, *walk, *codes,
            self.levels, self.scales, np.float32(factor),
        )  # fmt: skip

    def window(self, start: int, stop: int, device: torch.device) -> Update:
        """Decode the values start .. stop - 1 on a device. start: a multiple of STRIDE."""
        bits, bucket, gaps = self.codes.quant_bits, self.codes.quant_bucket_size, self.gaps[start:stop]
        inside, before = start % bucket, int(self.before[start // STRIDE])
        packed = self.codes.packed[start * bits // 8 : -(-stop * bits // 8)]
        scales = self.codes.scales[start // bucket : -(-stop // bucket)]
        codes = replace(self.codes, count=len(gaps), packed=packed, scales=scales)
        if usable(device):
            from compress.backends.triton import code_kernels, selection_kernels  # imports triton

            here = slice(*np.searchsorted(self.far, (start, stop)))
            far = self.far[here] - start, self.longer[here]
            positions = selection_kernels.positions_behind(gaps, before, far, device)
            return Update(self.size, positions, code_kernels.dequantize(codes, device, inside))
        positions, values = self._positions(start, stop), torch.from_numpy(dequantize(codes, inside))
        return Update(self.size, positions.to(device), values.to(device))

    def decoded(self) -> Update:
        """Write the update out."""
        values = torch.from_numpy(dequantize(self.codes))
        return Update(self.size, self._positions(0, self.count), values)

    def _positions(self, start: int, stop: int) -> torch.Tensor:
        """Add up the gaps of the values start .. stop - 1, int64; start: a multiple of STRIDE."""
        found = np.empty(stop - start, np.int64)
        self.loops.positions(self.gaps[start:stop], int(self.before[start // STRIDE]), found)
        here = slice(*np.searchsorted(self.far, (start, stop)))
        if len(self.far[here]):
            more = np.zeros(stop - start, np.int64)
            more[self.far[here] - start] = self.longer[here]
            found += np.cumsum(more)
        return torch.from_numpy(found)


def decode_packed(packet: bytes, m: int, most: int | None = None) -> PackedUpdate | Update:
    """Decode a packet to the smallest form that can be added up. Errors: PacketError, as from `decode`.

    most: values that its sender may send; None: m.
    """
    header, loops = read_header(memoryview(packet), m), compiled(m)
    if most is not None and header.k > most:
        raise PacketError(f"{header.k:,} values of {m:,}, of which at most {most:,} are sent")
    header = header.expanded()
    bits, bucket, main = header.quant_bits, header.quant_bucket_size, header.sections[0]
    plain = header.kind == GAPS and header.shift == 0 and header.k
    if loops is None or not plain or bits not in (1, 2, 4, 8) or bucket * bits % 8:
        return decode_expanded(header, m, loops)
    gaps, far, longer = bytes_and_escapes(np.frombuffer(main.data, np.uint8))
    if len(gaps) != header.k or main.data[-1] == 255:
        return decode_expanded(header, m, loops)  # refuses it
    gaps, before = _in_words(gaps), np.empty(-(-header.k // STRIDE) + 1, np.int64)
    loops.strides(gaps, STRIDE, far, longer, before)
    if before[-1] >= m:
        raise PacketError(f"a position {before[-1]:,} in a vector of {m:,}")
    codes = header.codes()
    codes = replace(codes, packed=_in_words(codes.packed))
    levels, scales = signed_table(codes.levels), widen(codes.scales)
    return PackedUpdate(m, gaps, far, longer, before, codes, levels, scales, loops)


def _in_words(part: np.ndarray) -> np.ndarray:
    """Return the same bytes where they can be read eight at once: a stored section begins anywhere."""
    return part if part.ctypes.data % 8 == 0 else part.copy()
