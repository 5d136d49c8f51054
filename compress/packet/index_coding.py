"""Where the k survivors stand among m: four ways to say it, and a rule for the smallest.

gaps        how many are skipped before each survivor, the low `shift` bits apart, the rest as bytes
            (255 = 255 skipped and more to come), through zstd. 1-2 % over the entropy up to K = 0.22.
mask        one bit an element, through zstd. As good from K = 0.2 on, better where survivors crowd.
Elias-Fano  7-18 % over the entropy but needs no coder: smallest where a coder's tables would outweigh the
data.
plain       32 or 64 bits each: a handful of survivors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from compress.bit_packing import pack, unpack
from compress.errors import PacketError

from .entropy_coding import Section, shrink

ALL, GAPS, MASK, ELIAS_FANO, PLAIN = range(5)
FEW = 4096  # up to here all four ways are tried
CROWDED = 0.22  # from this density on a mask is coded better than gaps
CHUNK = 1 << 16  # positions or bytes of gaps at a time; a multiple of 8, so that low bits end with a byte
FINE = 40  # mean of the gap's upper part, at most


@dataclass(frozen=True)
class Places:
    """Positions as they travel."""

    kind: int
    shift: int  # low bits that stand apart (gaps, Elias-Fano)
    main: Section  # gap bytes, mask, upper bits or plain numbers
    low: Section  # low bits

    def size(self) -> int:
        """Bytes on the wire."""
        return len(self.main.data) + len(self.low.data)


def store(positions: np.ndarray, m: int, fast: ModuleType | None = None) -> Places:
    """positions: (k,) int64, ascending, each once, below m. The smallest form, or what is likely to be.
    `fast`: `compress.compiled`, same bytes.
    """
    k = len(positions)
    if k == m:
        return Places(ALL, 0, shrink(b""), shrink(b""))
    if k == 0:
        return _plain(positions, m)  # nothing is worth sending: no gap, no bit
    if k <= FEW:
        ways = [_gaps(positions, m), _elias_fano(positions, m), _plain(positions, m)]
        if m <= FEW * 64:
            ways.append(_mask(positions, m))
        return min(ways, key=Places.size)
    return _mask(positions, m) if k > CROWDED * m else _gaps(positions, m, fast)


def small_steps(step: np.ndarray) -> Places:
    """From each survivor to the next, (k,) uint8, at least 1; the first counts from -1. Overwrites `step`."""
    step -= 1
    return Places(GAPS, 0, shrink(step.data), shrink(b""))


def load(
    kind: int,
    shift: int,
    main: np.ndarray,
    low: np.ndarray,
    m: int,
    k: int,
    fast: ModuleType | None = None,
) -> np.ndarray:
    """The inverse: (k,) int64, ascending, each once, below m; PacketError where the bytes do not say that.

    main, low: (bytes,) uint8, of the lengths that `sizes` allows. `fast`: `compress.compiled`, same numbers.
    """
    if kind == ALL:
        return np.arange(m, dtype=np.int64)
    if kind == GAPS:
        positions = _load_gaps(shift, main, low, m, k, fast)
    elif kind == MASK:
        positions = np.flatnonzero(np.unpackbits(main, bitorder="little"))
    elif kind == ELIAS_FANO:
        upper = np.flatnonzero(np.unpackbits(main, bitorder="little"))
        if len(upper) != k:
            raise PacketError(f"Elias-Fano marks {len(upper):,} survivors, the header says {k:,}")
        positions = (upper - np.arange(k) << shift) + unpack(low, shift, k)
    else:
        positions = main.view("<u4" if m <= 1 << 32 else "<u8").astype(np.int64)
    if len(positions) != k:
        raise PacketError(f"positions of {len(positions):,} survivors, the header says {k:,}")
    if k and (positions[-1] >= m or positions[0] < 0):
        raise PacketError(f"a position {positions[-1]:,} in a vector of {m:,}")
    if kind in (ELIAS_FANO, PLAIN) and (positions[1:] <= positions[:-1]).any():
        raise PacketError("positions that do not ascend")
    return positions


def sizes(kind: int, shift: int, m: int, k: int) -> tuple[range, int]:
    """How long `main` may be and `low` must be, in bytes, so that it is known before anything is allocated.

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


def _gaps(positions: np.ndarray, m: int, fast: ModuleType | None = None) -> Places:
    k = len(positions)
    shift = 0
    while m > (k * FINE) << shift:
        shift += 2
    if shift == 0:
        # from one to the next, modulo 256: no remainder was lost if they add up to the last position
        step = np.empty(k, np.uint8)
        if fast and fast.gaps(positions, step) < 255:
            return Places(GAPS, 0, shrink(step.data), shrink(b""))
        step[:1] = positions[0] + 1
        np.subtract(positions[1:], positions[:-1], out=step[1:], casting="unsafe")
        if int(step.sum(dtype=np.int64)) == int(positions[-1]) + 1:
            return small_steps(step)
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
    return Places(GAPS, shift, shrink(np.concatenate(main).data), shrink(np.concatenate(low).data))


def _load_gaps(
    shift: int, main: np.ndarray, low: np.ndarray, m: int, k: int, fast: ModuleType | None = None
) -> np.ndarray:
    if fast and shift == 0 and len(main) == k:
        positions = np.empty(k, np.int64)
        if fast.places(main, positions):
            return positions
    ends = int(np.count_nonzero(main != 255))  # the byte that ends each gap
    if ends != k:
        raise PacketError(f"gaps of {ends:,} survivors, the header says {k:,}")
    if len(main) and main[-1] == 255:
        raise PacketError("gaps that end in an escape")
    positions = np.empty(k, np.int64)
    done = passed = 0  # survivors so far, and what all gaps up to there add up to
    for start in range(0, len(main), CHUNK):
        window = main[start : start + CHUNK]
        total = np.cumsum(window, dtype=np.int64) + passed
        here = total[window != 255]
        positions[done : done + len(here)] = (here << shift) + np.arange(done, done + len(here))
        done, passed = done + len(here), int(total[-1])
    if passed << shift > m:
        raise PacketError(f"gaps that lead out of a vector of {m:,}")
    if shift:
        positions += np.cumsum(unpack(low, shift, k), dtype=np.int64)
    return positions


def _mask(positions: np.ndarray, m: int) -> Places:
    mask = np.zeros(m, bool)
    mask[positions] = True
    return Places(MASK, 0, shrink(np.packbits(mask, bitorder="little").data), shrink(b""))


def _elias_fano(positions: np.ndarray, m: int) -> Places:
    k = len(positions)
    shift = (m // max(k, 1)).bit_length() - 1
    upper = np.zeros(k + (m >> shift) + 1, bool)
    upper[(positions >> shift) + np.arange(k)] = True
    low = pack(positions & ((1 << shift) - 1), shift)
    return Places(ELIAS_FANO, shift, shrink(np.packbits(upper, bitorder="little").data), shrink(low.data))


def _plain(positions: np.ndarray, m: int) -> Places:
    return Places(
        PLAIN, 0, shrink(positions.astype("<u4" if m <= 1 << 32 else "<u8").data.cast("B")), shrink(b"")
    )


def _low_bytes(k: int, shift: int) -> int:
    return -(-k * shift // 8)


def _just(n: int) -> range:
    return range(n, n + 1)
