"""Encode the positions of the k values sent among m: four codings, and a rule for the smallest.

gaps        the number of positions skipped before each value; the low `shift` bits apart, the rest as bytes
            (255 = 255 skipped and more to come), through zstd. 1-2 % over the entropy up to K = 0.22.
mask        one bit an element, through zstd. As good from K = 0.2 on, better where values crowd.
Elias-Fano  7-18 % over the entropy but needs no coder: smallest where a coder's tables would outweigh the
data.
plain       32 or 64 bits each: for a handful of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from compress.bit_packing import pack, unpack
from compress.errors import PacketError

from .entropy_coding import Section, shrink
from .section_streams import Stream

ALL, GAPS, MASK, ELIAS_FANO, PLAIN = range(5)
FEW = 4096  # up to here all four ways are tried
CROWDED = 0.22  # from this density on a mask is coded better than gaps
CHUNK = 1 << 16  # positions or bytes of gaps at a time; a multiple of 8, so that low bits end with a byte
FINE = 40  # mean of the gap's upper part, at most


@dataclass(frozen=True)
class EncodedPositions:
    """Positions as a packet holds them."""

    kind: int
    shift: int  # low bits that stand apart (gaps, Elias-Fano)
    main: Section  # gap bytes, mask, upper bits or plain numbers
    low: Section  # low bits

    def size(self) -> int:
        """Return the bytes on the wire."""
        return len(self.main.data) + len(self.low.data)


def encode_positions(positions: np.ndarray, m: int, loops: ModuleType | None = None) -> EncodedPositions:
    """Encode positions, (k,) int64, ascending, each once, below m, to the form that is likely the smallest.

    loops: the compiled loops, which give the same bytes.
    """
    k = len(positions)
    if k == m:
        return EncodedPositions(ALL, 0, shrink(b""), shrink(b""))
    if k == 0:
        return _plain(positions, m)  # nothing is worth sending: no gap, no bit
    if k <= FEW:
        ways = [_gaps(positions, m), _elias_fano(positions, m), _plain(positions, m)]
        if m <= FEW * 64:
            ways.append(_mask(positions, m))
        return min(ways, key=EncodedPositions.size)
    return _mask(positions, m) if k > CROWDED * m else _gaps(positions, m, loops)


def in_gap_bytes(k: int, m: int) -> bool:
    """Tell whether k positions below m are coded as whole gaps in bytes: only bytes then leave a device."""
    return FEW < k <= CROWDED * m and m <= k * FINE


def encode_gap_bytes(gaps: np.ndarray) -> EncodedPositions:
    """Encode the bytes of gaps, (b,) uint8, with their escapes."""
    return EncodedPositions(GAPS, 0, shrink(gaps.data), shrink(b""))


def bytes_and_escapes(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Separate the escapes of gap bytes, (b,) uint8, from the bytes that end a gap.

    Returns these bytes, (k,); the values, ascending, with escapes before them, and what those skip, both (j,)
    int64.
    """
    escapes = np.flatnonzero(raw == 255)
    if not len(escapes):
        return raw, np.empty(0, np.int64), np.empty(0, np.int64)
    far, times = np.unique(escapes - np.arange(len(escapes)), return_counts=True)
    return raw[raw != 255], far, times * 255


def decode_positions(
    coded: EncodedPositions, m: int, k: int, window: int, loops: ModuleType | None = None
) -> Iterator[np.ndarray]:
    """Decode k positions, `window` (a multiple of 8) at a time: int64, ascending, each once, below m.

    PacketError where the sections, of the lengths that `section_sizes` allows, do not hold that.
    """
    main, low, shift = Stream(coded.main), Stream(coded.low), coded.shift
    gaps, every = coded.kind == GAPS, None
    if loops and gaps and not shift and main.left == k:
        every = _compiled_gaps(main, k, window, loops)
    done, before, passed = 0, -1, 0  # positions so far; the last one; the low bits of all gaps
    for upper in every or _grouped(_upper(coded, m, main, window), window):
        count = len(upper)
        if done + count > k:  # and there are low bits for no more
            raise PacketError(f"positions of more survivors than the {k:,} that the header says")
        positions = upper
        if not every and (gaps or coded.kind == ELIAS_FANO):
            order = np.arange(done, done + count)
            lower = unpack(low.read(-(-count * shift // 8)), shift, count)
            if gaps:
                lower = np.cumsum(lower) + passed
                positions, passed = (upper << shift) + order + lower, int(lower[-1])
            else:
                positions = (upper - order << shift) + lower
        in_order = coded.kind not in (ELIAS_FANO, PLAIN) or bool((positions[1:] > positions[:-1]).all())
        if positions[0] <= before or not in_order:
            raise PacketError("positions that do not ascend")
        done, before = done + count, int(positions[-1])
        if before >= m:
            raise PacketError(f"a position {before:,} in a vector of {m:,}")
        yield positions
    if done != k:
        raise PacketError(f"positions of {done:,} survivors, the header says {k:,}")
    main.end()
    low.end()


def _upper(coded: EncodedPositions, m: int, main: Stream, window: int) -> Iterator[np.ndarray]:
    """Read section 0: positions, or what lies above their low bits; of gaps, their running sum. int64"""
    if coded.kind == ALL:
        for start in range(0, m, window):
            yield np.arange(start, min(start + window, m), dtype=np.int64)
    elif coded.kind == GAPS:
        yield from _sums(coded.shift, m, main, window)
    elif coded.kind in (MASK, ELIAS_FANO):
        start = 0
        while main.left:
            bits = np.unpackbits(main.read(window // 8), bitorder="little")
            yield np.flatnonzero(bits) + start
            start += len(bits)
    else:
        width = 4 if m <= 1 << 32 else 8
        while main.left:
            yield main.read(window * width).view(f"<u{width}").astype(np.int64)


def _sums(shift: int, m: int, main: Stream, window: int) -> Iterator[np.ndarray]:
    """Sum up the bytes of gaps; a byte that is not 255 ends a gap."""
    total = 0
    while main.left:
        part = main.read(window)
        sums = np.cumsum(part, dtype=np.int64)
        sums += total
        total = int(sums[-1])
        if total << shift > m:  # before a sum could overflow
            raise PacketError(f"gaps that lead out of a vector of {m:,}")
        escapes = part == 255
        yield sums[~escapes] if escapes.any() else sums
        if escapes[-1] and not main.left:
            raise PacketError("gaps that end in an escape")


def _compiled_gaps(main: Stream, k: int, window: int, loops: ModuleType) -> Iterator[np.ndarray]:
    """Read k gaps of a byte each, the usual case, in one compiled loop."""
    before = -1
    while main.left:
        part = main.read(window)
        positions = np.empty(len(part), np.int64)
        if not loops.positions(part, before, positions):
            raise PacketError(f"gaps of fewer survivors than the {k:,} that the header says")
        before = int(positions[-1])
        yield positions


def _grouped(parts: Iterable[np.ndarray], window: int) -> Iterator[np.ndarray]:
    """Regroup the numbers to `window` at a time: the packed low bits of so many end with a byte."""
    waiting = np.empty(0, np.int64)
    for part in parts:
        waiting = np.concatenate([waiting, part]) if len(waiting) else part
        while len(waiting) >= window:
            yield waiting[:window]
            waiting = waiting[window:]
    if len(waiting):
        yield waiting


def section_sizes(kind: int, shift: int, m: int, k: int) -> tuple[range, int]:
    """Return how long section 0 may be and section 1 must be, in bytes, before anything is allocated.

    PacketError where the numbers do not go together.
    """
    if kind > PLAIN:
        raise PacketError(f"position kind {kind}, known are 0 to {PLAIN}")
    if kind == ALL and k != m:
        raise PacketError(f"all positions of {m:,}, yet {k:,} values")
    if k << shift > m and shift:
        raise PacketError(f"{shift} low bits apart for {k:,} positions of {m:,}")
    if kind == ALL:
        return _just(0), 0
    if kind == GAPS:
        return range(k, k + (m >> shift) // 255 + 1), _low_bytes(k, shift)
    if kind == MASK:
        return _just(-(-m // 8)), 0
    if kind == ELIAS_FANO:
        return _just(-(-(k + (m >> shift) + 1) // 8)), _low_bytes(k, shift)
    return _just(k * (4 if m <= 1 << 32 else 8)), 0


def longest_positions(m: int, k: int) -> int:
    """Return the most bytes that `encode_positions` makes of k positions below m."""
    if k in (0, m):
        return 0
    if k <= FEW:  # the shorter of two, of whatever is tried
        shift = (m // k).bit_length() - 1
        return min(k * (4 if m <= 1 << 32 else 8), -(-(k + (m >> shift) + 1) // 8) + _low_bytes(k, shift))
    if k > CROWDED * m:
        return -(-m // 8)
    shift = _gap_shift(m, k)
    return k + (m >> shift) // 255 + _low_bytes(k, shift)


def borders(m: int) -> Iterator[int]:
    """Yield the numbers of positions, below m, from which on one more changes the coding: between two of
    them more positions take more bytes."""
    yield from (m - 1, int(CROWDED * m), FEW)
    for shift in range(m.bit_length()):
        yield m >> shift
        yield -(-m // (FINE << shift)) - 1


def _gap_shift(m: int, k: int) -> int:
    """Return how many low bits of k gaps stand apart."""
    shift = 0
    while m > (k * FINE) << shift:
        shift += 2
    return shift


def _gaps(positions: np.ndarray, m: int, loops: ModuleType | None = None) -> EncodedPositions:
    k = len(positions)
    shift = _gap_shift(m, k)
    if shift == 0:
        # from one to the next, modulo 256: no remainder was lost if they add up to the last position
        step = np.empty(k, np.uint8)
        if loops and loops.gaps(positions, step) < 255:
            return EncodedPositions(GAPS, 0, shrink(step.data), shrink(b""))
        step[:1] = positions[0] + 1
        np.subtract(positions[1:], positions[:-1], out=step[1:], casting="unsafe")
        if int(step.sum(dtype=np.int64)) == int(positions[-1]) + 1:
            step -= 1
            return encode_gap_bytes(step)
    main, low = list[np.ndarray](), list[np.ndarray]()
    for start in range(0, k, CHUNK):
        before = positions[start - 1] if start else positions.dtype.type(-1)
        gap = np.diff(positions[start : start + CHUNK], prepend=before) - 1
        low.append(pack(gap & ((1 << shift) - 1), shift))
        upper = gap >> shift
        far = np.flatnonzero(upper >= 255)
        escapes = np.repeat(far, upper[far] // 255)
        upper[far] %= 255
        main.append(np.insert(upper.astype(np.uint8), escapes, 255))
    return EncodedPositions(GAPS, shift, shrink(np.concatenate(main).data), shrink(np.concatenate(low).data))


def _mask(positions: np.ndarray, m: int) -> EncodedPositions:
    mask = np.zeros(m, bool)
    mask[positions] = True
    return EncodedPositions(MASK, 0, shrink(np.packbits(mask, bitorder="little").data), shrink(b""))


def _elias_fano(positions: np.ndarray, m: int) -> EncodedPositions:
    k = len(positions)
    shift = (m // max(k, 1)).bit_length() - 1
    upper = np.zeros(k + (m >> shift) + 1, bool)
    upper[(positions >> shift) + np.arange(k)] = True
    low = pack(positions & ((1 << shift) - 1), shift)
    main = np.packbits(upper, bitorder="little")
    return EncodedPositions(ELIAS_FANO, shift, shrink(main.data), shrink(low.data))


def _plain(positions: np.ndarray, m: int) -> EncodedPositions:
    main = positions.astype("<u4" if m <= 1 << 32 else "<u8")
    return EncodedPositions(PLAIN, 0, shrink(main.data.cast("B")), shrink(b""))


def _low_bytes(k: int, shift: int) -> int:
    return -(-k * shift // 8)


def _just(n: int) -> range:
    return range(n, n + 1)
