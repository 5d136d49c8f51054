"""A packet decoded a piece at a time: the bits of `decode`, the checks of `decode`, in bounded memory.

Whoever folds a hundred packets of a large model cannot hold one of them decoded. Each section is read by one
or more streams: bits that lie in planes (the four bytes of an FP32 value) need a stream for each plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from compress.bit_packing import unpack
from compress.errors import PacketError
from compress.quantization import planes, signed_levels, widen
from compress.sparse_update import Update

from .format import Head, check_scales, read_head
from .index_coding import ALL, ELIAS_FANO, GAPS, MASK
from .section_streams import Bytes, Stream, held

VALUES = 1 << 16  # at a time
EACH = 48  # bytes that one of them takes while it is worked on


def pieces(packet: Bytes, m: int, at_most: int = VALUES) -> Iterator[Update]:
    """The update in a packet, in pieces of at most `at_most` values (at least 8), positions ascending.

    packet: a memoryview, or a `streams.InFile`. Put together, the pieces are what `decode` gives, bit for
    bit. PacketError where anything is wrong: of the bytes as a whole with the first piece, else with the
    piece that is wrong or after the last.
    """
    return _updates(read_head(packet, m), m, max(at_most & ~7, 8))


def memory(packet: Bytes, m: int, at_most: int = VALUES) -> int:
    """Bytes of memory that `pieces` takes at once, about. Errors: PacketError."""
    head = read_head(packet, m, whole=False)
    planes = {3: 2, 16: 2, 32: 4}.get(head.bits, 1)
    sections = [*head.sections[:2], *[head.sections[2]] * planes, *head.sections[3:]]
    return EACH * min(at_most, max(head.k, 8)) + sum(held(section) for section in sections)


def _updates(head: Head, m: int, step: int) -> Iterator[Update]:
    values = _values(head, step)
    for where in _positions(head, m, step):
        yield Update(m, torch.from_numpy(where), torch.from_numpy(next(values)))
    for _ in values:  # what is checked after the last one
        raise PacketError(f"more values than the {head.k:,} positions")


# ---- where -----------------------------------------------------------------------------------------------


def _positions(head: Head, m: int, step: int) -> Iterator[np.ndarray]:
    """(step,) int64 each, the last one what is left: ascending, each once, below m."""
    k, shift, done, before = head.k, head.shift, 0, -1
    main, low = Stream(head.sections[0]), Stream(head.sections[1])
    for upper in _grouped(_upper(head, m, main, step), step):
        if done + len(upper) > k:  # and there are low bits for no more
            raise PacketError(f"positions of more survivors than the {k:,} that the header says")
        where = upper
        if head.kind in (GAPS, ELIAS_FANO):
            if head.kind == ELIAS_FANO:
                where = upper - np.arange(done, done + len(upper))
            where = (where << shift) + unpack(low.read(-(-len(upper) * shift // 8)), shift, len(upper))
            if head.kind == GAPS:
                where = np.cumsum(where + 1) + before
        if where[0] <= before or (where[1:] <= where[:-1]).any():
            raise PacketError("positions that do not ascend")
        done, before = done + len(where), int(where[-1])
        if before >= m:
            raise PacketError(f"a position {before:,} in a vector of {m:,}")
        yield where
    if done != k:
        raise PacketError(f"positions of {done:,} survivors, the header says {k:,}")
    main.end()
    low.end()


def _upper(head: Head, m: int, main: Stream, step: int) -> Iterator[np.ndarray]:
    """What section 0 holds of each position: the whole, or what lies above the low bits. (any,) int64."""
    if head.kind == ALL:
        for start in range(0, m, step):
            yield np.arange(start, min(start + step, m), dtype=np.int64)
    elif head.kind == GAPS:
        yield from _gaps(head.shift, m, main, step)
    elif head.kind in (MASK, ELIAS_FANO):
        start = 0
        while main.left:
            bits = np.unpackbits(main.read(step // 8), bitorder="little")
            yield np.flatnonzero(bits) + start
            start += len(bits)
    else:
        width = 4 if m <= 1 << 32 else 8
        while main.left:
            yield main.read(step * width).view(f"<u{width}").astype(np.int64)


def _gaps(shift: int, m: int, main: Stream, step: int) -> Iterator[np.ndarray]:
    """The upper parts of the gaps: bytes up to one that is not 255 add up to one of them."""
    total = told = 0  # of all bytes; of those of the gaps that are told
    while main.left:
        part = main.read(step)
        sums = np.cumsum(part, dtype=np.int64) + total
        total = int(sums[-1])
        if total << shift > m:  # before a sum could overflow
            raise PacketError(f"gaps that lead out of a vector of {m:,}")
        ends = sums[part != 255]
        if len(ends):
            yield np.diff(ends, prepend=told)
            told = int(ends[-1])
        open_ended = part[-1] == 255
        if open_ended and not main.left:
            raise PacketError("gaps that end in an escape")


def _grouped(parts: Iterable[np.ndarray], step: int) -> Iterator[np.ndarray]:
    """The same numbers, `step` at a time: packed bits of so many begin and end with a byte."""
    waiting = np.empty(0, np.int64)
    for part in parts:
        waiting = np.concatenate([waiting, part]) if len(waiting) else part
        while len(waiting) >= step:
            yield waiting[:step]
            waiting = waiting[step:]
    if len(waiting):
        yield waiting


# ---- how much --------------------------------------------------------------------------------------------


def _values(head: Head, step: int) -> Iterator[np.ndarray]:
    """(step,) float32 each, the last one what is left: only the arithmetic of `quantize.dequantize`."""
    bits, k, codes = head.bits, head.k, head.sections[2]
    width = {16: 1, 32: 1}.get(bits, 0)  # whole bytes in planes, or packed bits
    skips = [i * k for i in range(bits // 8)] if width else [0]
    if bits == 3:
        skips = [0, -(-k // 8)]
    streams = [Stream(codes, skip) for skip in skips]
    shares = [1, 2] if bits == 3 else [8] * len(streams) if width else [bits]  # bits of each value in each
    scales = _Scales(head)
    for start in range(0, k, step):
        count = min(step, k - start)
        packed = [s.read(-(-count * share // 8)) for s, share in zip(streams, shares, strict=True)]
        together = packed[0] if len(packed) == 1 else np.concatenate(packed)
        if bits == 32:
            values = planes(together, -4).view(np.float32)
            if not np.isfinite(values).all():
                raise PacketError("a value that is not finite")
        else:
            values = signed_levels(together, head.levels, bits, count)
            values = values * scales.of(start, count)
        yield values
    streams[-1].end()
    scales.end()


class _Scales:
    """The scales of a packet, in order; each is read once and kept as long as values may need it."""

    def __init__(self, head: Head) -> None:
        self.head, self.read = head, 0  # buckets read so far
        self.low, self.high = (Stream(section) for section in head.sections[3:])
        self.here = np.empty(0, np.float32)  # of the newest buckets

    def of(self, start: int, count: int) -> np.ndarray:
        """(count,) float32: of the values start .. start + count - 1, whose start never goes back."""
        bucket = self.head.bucket
        first, last = start // bucket, (start + count - 1) // bucket
        more = last + 1 - self.read
        if more > 0:
            patterns = planes(np.concatenate([self.low.read(more), self.high.read(more)]), -2).view("<u2")
            check_scales(patterns, self.head.levels, self.head.bits)
            kept = self.here[len(self.here) - (self.read - first) :] if first < self.read else self.here[:0]
            self.here, self.read = np.concatenate([kept, widen(patterns)]), last + 1
        at = np.arange(start, start + count) // bucket
        return self.here[at - (self.read - len(self.here))]

    def end(self) -> None:
        self.low.end()
        self.high.end()
