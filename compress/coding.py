"""Code the sections of a packet: small integers in bits, positions as small numbers, bytes made smaller.

A section is stored, or compressed by zstd or lz4, whichever pays. zstd level 1 is within 1-2 % of the entropy
on everything a packet holds, at 0.5-1 GB/s; higher levels are larger on such data. It looks for long repeats
only: codes and gaps have statistics, not repeats, and the short matches that chance offers cost up to 8 %
(gaps at K = 0.25). lz4 has no entropy coder: it is for bytes that repeat (long runs of untouched elements),
where it is faster.

Sections are read whole, or as streams in bounded memory. A packet lies in memory or in a file (`FileSlice`);
either way slices cost nothing, and bytes are there when `bytes()` asks for them. A zstd frame is fed to its
decoder block by block (128 KiB expanded at most). An lz4 block, which runs make short, expands as a whole: to
a byte a sampled value at most.

The positions of the k values sent among m have four codings, and a rule for the smallest:

    gaps        the number of positions skipped before each value; the low `shift` bits apart, the rest as
                bytes (255 = 255 skipped and more to come), through zstd. 1-2 % over the entropy up to
                K = 0.22.
    mask        one bit an element, through zstd. As good from K = 0.2 on, better where values crowd.
    Elias-Fano  7-18 % over the entropy but needs no coder: smallest where a coder's tables would outweigh the
                data.
    plain       32 or 64 bits each: for a handful of values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, BinaryIO, Protocol

import lz4.block
import numpy as np

from compress.errors import PacketError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


# ---- bits --------------------------------------------------------------------------------------------------


def pack(numbers: np.ndarray, width: int) -> np.ndarray:
    """Pack (k,) unsigned integers below 2**width to (ceil(k * width / 8),) uint8. Widths 1, 2, 4 and 8 are
    fast, and take uint8."""
    if width == 0:
        return np.empty(0, np.uint8)
    if width == 8:
        return numbers.astype(np.uint8, copy=False)
    if width == 1:
        return np.packbits(numbers, bitorder="little")
    if width in (2, 4):
        each = 8 // width
        padded = np.zeros(-(-len(numbers) // each) * each, np.uint8)
        padded[: len(numbers)] = numbers
        words = padded.view(f"<u{each}")  # the numbers of one output byte side by side
        gathered = words.copy()
        for i in range(1, each):
            gathered |= words >> words.dtype.type(i * (8 - width))
        return gathered.astype(np.uint8)  # the low byte: what lies above is dropped
    wide = numbers.astype(np.uint64)
    bits = (wide[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def unpack(data: np.ndarray, width: int, count: int) -> np.ndarray:
    """Unpack (ceil(count * width / 8),) uint8 to (count,) int64."""
    if width == 0:
        return np.zeros(count, np.int64)
    if width in (1, 2, 4, 8):
        return lookup(np.arange(1 << width), data, width)[:count]
    bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
    total = np.zeros(count, np.int64)
    for i in range(width):
        total |= bits[:, i].astype(np.int64) << i
    return total


def lookup(table: np.ndarray, data: np.ndarray, width: int) -> np.ndarray:
    """Look up table[number] for each packed number, one look-up a byte. table: (2**width,), width 1, 2, 4 or
    8.

    Returns (len(data) * 8 / width,): the last ones come from padding.
    """
    shifts = np.arange(0, 8, width)
    each = (np.arange(256)[:, None] >> shifts) & ((1 << width) - 1)  # (256, 8 / width)
    return table[each].take(data, axis=0).reshape(-1)


# ---- sections, whole ---------------------------------------------------------------------------------------

STORED, ZSTD, LZ4 = 0, 1, 2
WORTH = 0.98  # a section that does not shrink by 2 % is stored: it decodes for free
PROBE = 1 << 16
REPEATS = 0.10  # lz4 shrank the probe to this share: the bytes repeat
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_WINDOW_LOG = 23  # 8 MiB
# a decoder refuses a larger window
IN_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
LONG_REPEATS: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.hash_log: 6,
}
LZ4_MOST = 0x7E000000  # bytes that a block of lz4 can hold


@dataclass(frozen=True)
class Section:
    """A section as the packet holds it."""

    codec: int
    raw: int  # its length once decompressed
    data: Any  # bytes, a memoryview, or what is sliced like one (`Bytes`)


def shrink(raw: bytes | memoryview) -> Section:
    """Compress a section in the form that is likely the smallest; not all three are tried."""
    size = len(raw)
    if size == 0:
        return Section(STORED, 0, b"")
    middle = (size - PROBE) // 2 if size > PROBE else 0
    probe = raw[middle : middle + PROBE]
    if size <= LZ4_MOST and len(lz4.block.compress(probe, store_size=False)) < REPEATS * len(probe):
        packed = lz4.block.compress(raw, store_size=False)
        if len(packed) < REPEATS * size:
            return Section(LZ4, size, packed)
    packed = zstd.compress(raw, options=LONG_REPEATS)
    return Section(ZSTD, size, packed) if len(packed) < WORTH * size else Section(STORED, size, raw)


def expand(section: Section) -> bytes | memoryview:
    """Decompress a section to `section.raw` bytes, which the caller has checked; never allocates more.

    Errors: PacketError.
    """
    try:
        if section.codec == STORED:
            raw: bytes | memoryview = section.data
        elif section.codec == ZSTD:
            ZstdFrame.of(section)
            decoder = zstd.ZstdDecompressor(options=IN_WINDOW)
            raw = decoder.decompress(section.data, section.raw + 1)  # one more, for the frame to end
            if not decoder.eof:
                raise PacketError(f"a zstd section of {len(section.data)} bytes ends early")
        elif section.codec == LZ4:
            raw = lz4.block.decompress(section.data, uncompressed_size=section.raw)
        else:
            raise PacketError(f"section codec {section.codec}, known are 0 (stored), 1 (zstd), 2 (lz4)")
    except (zstd.ZstdError, lz4.block.LZ4BlockError) as error:
        raise does_not_expand(section, error) from error
    if len(raw) != section.raw:
        raise PacketError(f"a section gave {len(raw)} bytes, its table entry says {section.raw}")
    return raw


@dataclass(frozen=True)
class ZstdFrame:
    """The header of a zstd frame (RFC 8878, 3.1.1.1)."""

    length: int  # of the header, bytes
    window: int  # bytes that a decoder needs

    @classmethod
    def of(cls, section: Section) -> ZstdFrame:
        """Read the header of a section.

        Errors: PacketError, also where it claims another size than the table entry or a window above 8 MiB.
        """
        front = bytes(section.data[:32])
        try:
            claimed = zstd.get_frame_info(front).decompressed_size
        except zstd.ZstdError as error:
            raise does_not_expand(section, error) from error
        if claimed != section.raw or not front.startswith(ZSTD_MAGIC):
            raise PacketError(f"a zstd section claims {claimed} bytes, its table entry {section.raw}")
        descriptor = front[4]
        single = bool(descriptor & 0x20)  # one segment, and no byte for the window
        dictionary = (0, 1, 2, 4)[descriptor & 3]
        content = (int(single), 2, 4, 8)[descriptor >> 6]
        base = 1 << (10 + (front[5] >> 3))
        window = section.raw if single else base + (base >> 3) * (front[5] & 7)
        if window > 1 << ZSTD_WINDOW_LOG:
            raise PacketError(f"a zstd section needs a window of {window} bytes, 8 MiB are allowed")
        return cls(5 + (not single) + dictionary + content, window)


def does_not_expand(section: Section, error: object) -> PacketError:
    return PacketError(f"a section of {len(section.data)} bytes does not decompress: {error}")


# ---- sections as streams -----------------------------------------------------------------------------------

STEP = 1 << 16  # bytes at a time
BLOCK = 1 << 17  # a block of zstd, packed and expanded, has at most so many
DECODER = 640 << 10  # bytes that a zstd decoder takes beside its window


class Bytes(Protocol):
    """A `memoryview`, or an object that is sliced like one; `bytes()` of a slice reads it."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: Any, /) -> Any: ...


@dataclass(frozen=True)
class FileSlice:
    """Bytes that stay in a file until they are read; for one thread at a time."""

    file: BinaryIO
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> FileSlice:
        start, stop, _ = part.indices(self.size)
        return FileSlice(self.file, self.start + start, max(stop - start, 0))

    def __bytes__(self) -> bytes:
        self.file.seek(self.start)
        parts, left = [], self.size
        while left and (part := self.file.read(left)):  # an unbuffered file may give less than was asked for
            parts.append(part)
            left -= len(part)
        if left:
            raise PacketError(f"the file ends {left} bytes too early")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Stream:
    """Read a section from its front, in bounded memory. Errors: PacketError, as from `expand`."""

    def __init__(self, section: Section, skip: int = 0) -> None:
        self.left = section.raw - skip
        if section.codec == STORED:
            section, skip = Section(STORED, self.left, section.data[skip:]), 0
        self._parts = _expanded(section)
        self._rest: memoryview = memoryview(b"")
        while skip > 0:
            skip -= len(self._some(skip))

    def read(self, count: int) -> np.ndarray:
        """Read the next `count` bytes, or all that are left: (count,) uint8."""
        count = min(count, self.left)
        self.left -= count
        parts = []
        while count:
            parts.append(self._some(count))
            count -= len(parts[-1])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def end(self) -> None:
        """Check that nothing follows; all bytes were read."""
        assert not self.left, f"{self.left} bytes were not asked for"
        if len(self._rest) or any(len(part) for part in self._parts):
            raise PacketError("a section gave more bytes than its table entry says")

    def _some(self, most: int) -> memoryview:
        while not len(self._rest):
            part = next(self._parts, None)
            if part is None:
                raise PacketError("a section gave fewer bytes than its table entry says")
            self._rest = memoryview(part)
        some, self._rest = self._rest[:most], self._rest[most:]
        return some


def held(section: Section) -> int:
    """Return about how many bytes of memory a Stream of this section takes at once. Errors: PacketError."""
    if section.codec == LZ4:
        return 2 * section.raw + len(section.data)
    return ZstdFrame.of(section).window + DECODER if section.codec == ZSTD else 8 * STEP


def _expanded(section: Section) -> Iterator[bytes | bytearray | memoryview]:
    if section.codec == STORED:
        if isinstance(section.data, FileSlice):
            for at in range(0, len(section.data), STEP):
                yield bytes(section.data[at : at + STEP])
        else:
            yield section.data
    elif section.codec == ZSTD:
        try:
            yield from _from_zstd(section)
        except zstd.ZstdError as error:
            raise does_not_expand(section, error) from error
    else:
        yield expand(Section(section.codec, section.raw, bytes(section.data)))


def _from_zstd(section: Section) -> Iterator[bytes]:
    """Decompress one frame block by block (RFC 8878, 3.1.1): given more, a decoder may expand it all."""
    decoder = zstd.ZstdDecompressor(options=IN_WINDOW)
    at, last = ZstdFrame.of(section).length, False
    yield decoder.decompress(bytes(section.data[:at]))
    while not last:
        head = int.from_bytes(bytes(section.data[at : at + 3]), "little")
        last, size = bool(head & 1), 1 if head >> 1 & 3 == 1 else head >> 3  # kind 1: one byte, repeated
        if size > BLOCK or at + 3 + size > len(section.data):
            raise PacketError(f"a block of {size} bytes in a zstd section of {len(section.data)}")
        yield decoder.decompress(bytes(section.data[at : at + 3 + size]))
        at += 3 + size
    if not decoder.eof:  # its checksum
        yield decoder.decompress(bytes(section.data[at : at + 4]))
    if not decoder.eof:
        raise PacketError(f"a zstd section of {len(section.data)} bytes ends early")


# ---- positions ---------------------------------------------------------------------------------------------

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
        return encode_bytes(ALL, positions[:0].view(np.uint8))
    if k == 0:
        return _plain(positions, m)  # nothing is worth sending: no gap, no bit
    if k <= FEW:
        ways = [_gaps(positions, m), _elias_fano(positions, m), _plain(positions, m)]
        if m <= FEW * 64:
            ways.append(_mask(positions, m))
        return min(ways, key=EncodedPositions.size)
    return _mask(positions, m) if k > CROWDED * m else _gaps(positions, m, loops)


def byte_kind(k: int, m: int) -> int | None:
    """Return the kind of k positions below m where `encode_bytes` does: only bytes then leave a device."""
    if k == m:
        return ALL
    if k <= FEW:
        return None
    if k > CROWDED * m:
        return MASK
    return GAPS if m <= k * FINE else None


def encode_bytes(kind: int, raw: np.ndarray) -> EncodedPositions:
    """Encode gap bytes with their escapes, or a mask's bytes, (b,) uint8 (of all positions: none)."""
    return EncodedPositions(kind, 0, shrink(raw.data), shrink(b""))


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
        total = 0
        while main.left:
            part = main.read(window)  # a byte that is not 255 ends a gap
            sums = np.cumsum(part, dtype=np.int64)
            sums += total
            total = int(sums[-1])
            if total << coded.shift > m:  # before a sum could overflow
                raise PacketError(f"gaps that lead out of a vector of {m:,}")
            escapes = part == 255
            yield sums[~escapes] if escapes.any() else sums
            if escapes[-1] and not main.left:
                raise PacketError("gaps that end in an escape")
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
    low = -(-k * shift // 8)
    if kind == ALL:
        return _just(0), 0
    if kind == GAPS:
        return range(k, k + (m >> shift) // 255 + 1), low
    if kind == MASK:
        return _just(-(-m // 8)), 0
    if kind == ELIAS_FANO:
        return _just(-(-(k + (m >> shift) + 1) // 8)), low
    return _just(k * (4 if m <= 1 << 32 else 8)), 0


def longest_positions(m: int, k: int) -> int:
    """Return the most bytes that `encode_positions` makes of k positions below m."""
    if k in (0, m):
        return 0
    if k <= FEW:  # the shorter of two, of whatever is tried
        shift = (m // k).bit_length() - 1
        return min(k * (4 if m <= 1 << 32 else 8), -(-(k + (m >> shift) + 1) // 8) + -(-k * shift // 8))
    if k > CROWDED * m:
        return -(-m // 8)
    shift = _gap_shift(m, k)
    return k + (m >> shift) // 255 + -(-k * shift // 8)


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
            return encode_bytes(GAPS, step)
        step[:1] = positions[0] + 1
        np.subtract(positions[1:], positions[:-1], out=step[1:], casting="unsafe")
        if int(step.sum(dtype=np.int64)) == int(positions[-1]) + 1:
            step -= 1
            return encode_bytes(GAPS, step)
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
    return encode_bytes(MASK, np.packbits(mask, bitorder="little"))


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


def _just(n: int) -> range:
    return range(n, n + 1)
