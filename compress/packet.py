"""The bytes of a packet, and the update that they mean, the same bits on every device; and the packets of all
shards as one.

A packet is a fixed header, a table of levels and five sections; FORMAT.md has them one by one.
`decode_windows` reads the sections as streams, so its memory does not grow with the packet. `decode`
decompresses all sections first and takes them as one window. A GPU decodes the expanded sections in one step
of its own; it shares the header and the checks.

An `Update` takes 12 bytes a value, and most of a sum's time goes into writing and reading them. A
`PackedUpdate` is checked like a decoded one and keeps 1.5; each value is computed where it is added, by a
compiled loop, to the bit what `decode` gives. A GPU is given those 1.5 bytes a value, window by window. That
is done for what peers usually send: all positions, or gaps of a byte each but for some longer ones; codes of
1, 2, 4 or 8 bits in whole bytes a bucket; a long vector, on a machine with numba. Every other packet is
decoded.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from compress.backends import compiled, usable
from compress.coding import (
    ALL,
    GAPS,
    LZ4,
    LZ4_MOST,
    STORED,
    Bytes,
    EncodedPositions,
    Section,
    Stream,
    borders,
    bytes_and_escapes,
    decode_positions,
    expand,
    held,
    longest_positions,
    lookup,
    section_sizes,
    shrink,
)
from compress.errors import PacketError
from compress.pinned_copy import brought
from compress.quantization import (
    BITS,
    Codes,
    dequantize,
    packed_size,
    planes,
    signed_table,
    table_size,
    widen,
)


@dataclass(frozen=True)
class Update:
    """A sparse vector over the sample: `values[j]` at `positions[j]`, zero elsewhere."""

    size: int  # m, length of the sampled vector
    positions: torch.Tensor  # (k,) int64, ascending, each once
    values: torch.Tensor  # (k,) float32, finite

    def dense(self) -> torch.Tensor:
        """Write the update out, (m,) float32, with zeros where nothing was sent."""
        out = torch.zeros(self.size, device=self.values.device)
        out[self.positions] = self.values
        return out

    # ---- on the host; a `PackedUpdate` has the same methods ------------------------------------------------

    def window(self, start: int, stop: int, device: torch.device) -> Update:
        """Bring the values start .. stop - 1 to a device; positions travel in four bytes where they can."""
        positions, values = self.positions[start:stop], self.values[start:stop]
        if device != positions.device and self.size <= 1 << 31:
            positions = positions.to(torch.int32)
        return Update(self.size, brought(positions, device).to(torch.int64), brought(values, device))

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes

    def norm(self) -> float:
        """Return the Euclidean norm, in float64, where the squares of float32 cannot overflow."""
        return float(np.sqrt(np.square(self.values.numpy(), dtype=np.float64).sum()))

    def add_to(self, out: torch.Tensor, start: int, stop: int, factor: float) -> None:
        """Add factor * the values there to out[start:stop]; out: (m,)."""
        first, last = np.searchsorted(self.positions.numpy(), (start, stop))
        here = slice(int(first), int(last))
        out.index_add_(0, self.positions[here], self.values[here], alpha=factor)

    def decoded(self) -> Update:
        return self


# ---- the header --------------------------------------------------------------------------------------------

MAGIC, VERSION = b"CK", 1
HEAD = struct.Struct("<2sBBI")  # magic, version, quant_bits, CRC-32 of all that follows
BODY = struct.Struct("<QQQIBBH")  # m, k, bytes of section 0 expanded, bucket, position kind, shift, zero
SECTIONS = 5  # positions, their low bits, codes, low and high bytes of the scales
ENTRY = struct.Struct("<Q")  # codec in the top 3 bits, length in the packet below
LEVELS = HEAD.size + BODY.size + SECTIONS * ENTRY.size
FRONT = LEVELS + 2 * table_size(8)  # bytes before the first section, at most
CRC_BLOCK = 1 << 20  # bytes read at once for the checksum
MOST = 1 << 40  # longest vector: every size below stays within 64 bits
NORMAL, INFINITE = 0x0080, 0x7F80  # BF16 patterns of 2**-126 and infinity


def write(m: int, positions: EncodedPositions, codes: Codes) -> bytes:
    """Write the packet of k values in a sampled vector of m."""
    scales = planes(codes.scales.astype("<u2").view(np.uint8), 2)
    half = len(scales) // 2
    parts = codes.packed, scales[:half], scales[half:]
    sections = [positions.main, positions.low, *(shrink(part.data) for part in parts)]
    main, kind, shift = positions.main.raw, positions.kind, positions.shift
    body: list[bytes | memoryview] = [
        BODY.pack(m, codes.count, main, codes.quant_bucket_size, kind, shift, 0),
        *(ENTRY.pack(s.codec << 61 | len(s.data)) for s in sections),
        codes.levels.astype("<u2").tobytes(),
        *(s.data for s in sections),
    ]
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join([HEAD.pack(MAGIC, VERSION, codes.quant_bits, crc), *body])


def longest(m: int, k: int, bits: int, bucket: int) -> int:
    """Return the most bytes that `write` makes of at most k values in a sampled vector of m."""

    def size(k: int) -> int:
        buckets = -(-k // bucket) if bits < 32 else 0
        return longest_positions(m, k) + packed_size(bits, k) + 2 * buckets

    return LEVELS + 2 * table_size(bits) + max(size(n) for n in {k, *borders(m)} if 0 <= n <= k)


@dataclass(frozen=True)
class Header:
    """The fields of a packet, checked against each other, and its sections, compressed or expanded."""

    quant_bits: int
    k: int
    quant_bucket_size: int
    positions: EncodedPositions
    levels: np.ndarray  # (2**(quant_bits-1),) uint16; empty at 16 and 32 bits
    sections: list[Section]  # behind the positions: codes, low and high bytes of the scales

    def expanded(self) -> Header:
        """Decompress every section into memory."""
        every = (self.positions.main, self.positions.low, *self.sections)
        main, low, *others = (Section(STORED, s.raw, memoryview(expand(s))) for s in every)
        return replace(self, positions=replace(self.positions, main=main, low=low), sections=others)

    def codes(self) -> Codes:
        """Return all codes of an expanded header. Errors: PacketError: a scale is refused."""
        packed, low, high = (np.frombuffer(section.data, np.uint8) for section in self.sections)
        scales = self.scales(low, high)
        return Codes(self.quant_bits, self.quant_bucket_size, self.k, packed, self.levels, scales)

    def scales(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Return the BF16 patterns of some scales, from their low and high bytes.

        Every product of a level and a scale must be a normal number or zero: else devices could differ.
        """
        scales = low | high.astype("<u2") << np.uint16(8)
        if not len(scales):
            return scales
        if ((scales != 0) & ((scales < NORMAL) | (scales >= INFINITE))).any():
            raise PacketError("a scale that is negative, denormal or not finite")
        top = np.float32(32767 if self.quant_bits == 16 else self.levels.max())
        with np.errstate(over="ignore"):
            if not np.isfinite(top * widen(scales.max(keepdims=True))[0]):
                raise PacketError("a level times its scale overflows")
        return scales


def read_header(packet: Bytes, m: int, checksum: bool = True) -> Header:
    """Read and check everything in front of the sections, and compare the checksum unless told not to.

    Errors: PacketError. Every size is checked against m before memory is asked for.
    """
    if len(packet) < LEVELS:
        raise PacketError(f"{len(packet)} bytes, a packet has at least {LEVELS}")
    front = bytes(packet[:FRONT])
    magic, version, bits, crc = HEAD.unpack_from(front)
    if magic != MAGIC or version != VERSION:
        raise PacketError(f"begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if checksum:
        found = 0
        for start in range(HEAD.size, len(packet), CRC_BLOCK):
            part = packet[start : start + CRC_BLOCK]
            found = zlib.crc32(part if isinstance(part, memoryview) else bytes(part), found)
        if found != crc:
            raise PacketError("its checksum does not match: damaged on the way")
    length, k, main, bucket, kind, shift, zero = BODY.unpack_from(front, HEAD.size)
    if length != m or not k <= m < MOST:
        raise PacketError(f"{k:,} values of {length:,}, expected a sampled vector of {m:,}")
    if bits not in BITS or bucket == 0 or zero:
        raise PacketError(f"{bits} bits in buckets of {bucket}, reserved field {zero}")
    allowed, low = section_sizes(kind, shift, m, k)
    if main not in allowed:
        raise PacketError(f"positions in {main} bytes, expected {allowed.start} to {allowed.stop - 1}")
    buckets = -(-k // bucket) if bits < 32 else 0
    start = LEVELS + 2 * table_size(bits)
    sections = []
    for i, size in enumerate([main, low, packed_size(bits, k), buckets, buckets]):
        (entry,) = ENTRY.unpack_from(front, HEAD.size + BODY.size + i * ENTRY.size)
        here = entry & ((1 << 61) - 1)
        if entry >> 61 == LZ4 and size > LZ4_MOST:
            raise PacketError(f"an lz4 section of {size:,} bytes, at most {LZ4_MOST:,} are possible")
        sections.append(Section(entry >> 61, size, packet[start : start + here]))
        start += here
    if start != len(packet):
        raise PacketError(f"{len(packet)} bytes, its table of sections adds up to {start}")
    levels = np.frombuffer(front, "<u2", table_size(bits), LEVELS)
    positions = EncodedPositions(kind, shift, *sections[:2])
    return Header(bits, k, bucket, positions, levels, sections[2:])


# ---- decoding ----------------------------------------------------------------------------------------------

WINDOW = 1 << 16  # values
EACH = 48  # bytes of memory a value takes while its window is decoded
PLANES = {3: 2, 16: 2, 32: 4}  # streams that read the codes, by quant_bits; else 1


def decode(
    packet: bytes | bytearray | memoryview,
    m: int,  # length of the sampled vector, which the receiver knows
    device: torch.device | str = "cpu",  # where the update is wanted
    kernels: bool | None = None,  # True: Triton; False: NumPy, the reference; None: the fastest there
) -> Update:
    """Decode the update in a packet, to the same bits on every device.

    PacketError where anything is wrong: the packet comes from somebody else. Every size is checked against
    m before memory is asked for; at most some 40 bytes are allocated for each of the m elements.
    """
    header, device = read_header(memoryview(packet), m).expanded(), torch.device(device)
    if header.quant_bits < 32 and (usable(device) if kernels is None else kernels):
        from compress import triton_kernels  # imports triton

        positions = triton_kernels.decode_positions(header.positions, m, header.k, device)
        return Update(m, positions, triton_kernels.dequantize(header.codes(), device))
    update = decode_expanded(header, m, None if kernels is False else compiled(m))
    return Update(m, update.positions.to(device), update.values.to(device))


def decode_expanded(header: Header, m: int, loops: ModuleType | None) -> Update:
    """Decode a packet whose sections are in memory, on the host: in one window."""
    values = dequantize(header.codes())
    whole = (m + 8) & ~7  # a window that holds every position
    windows = list(decode_positions(header.positions, m, header.k, whole, loops))
    positions = windows[0] if windows else np.empty(0, np.int64)
    return Update(m, torch.from_numpy(positions), torch.from_numpy(values))


def decode_windows(packet: Bytes, m: int, at_most: int = WINDOW) -> Iterator[Update]:
    """Decode the update in windows of at most `at_most` values (at least 8), positions ascending.

    packet: a memoryview, or a `FileSlice`. The windows together are what `decode` gives, bit for bit.
    PacketError where anything is wrong: of the header and the checksum at once, else with the window that
    is wrong or after the last.
    """
    return _windows(read_header(packet, m), m, max(at_most & ~7, 8))


def window_memory(packet: Bytes, m: int, at_most: int = WINDOW) -> int:
    """Return about how many bytes of memory `decode_windows` takes at once. Errors: PacketError."""
    header = read_header(packet, m, checksum=False)
    positions, (codes, *scales) = header.positions, header.sections
    sections = [positions.main, positions.low, *[codes] * PLANES.get(header.quant_bits, 1), *scales]
    return EACH * min(at_most, max(header.k, 8)) + sum(held(section) for section in sections)


def _windows(header: Header, m: int, window: int) -> Iterator[Update]:
    values = _values(header, window)
    for positions in decode_positions(header.positions, m, header.k, window):
        yield Update(m, torch.from_numpy(positions), torch.from_numpy(next(values)))
    for _ in values:  # runs the checks that follow the last one
        raise PacketError(f"more values than the {header.k:,} positions")


def _values(header: Header, window: int) -> Iterator[np.ndarray]:
    """Decode the values: (window,) float32 each, the last one shorter. Checks scales and finiteness."""
    bits, bucket, k = header.quant_bits, header.quant_bucket_size, header.k
    codes, *halves = header.sections
    widths, starts = [bits], [0]  # bits of a value in each plane, and the byte where the plane begins
    if bits in PLANES:
        widths = [1, 2] if bits == 3 else [8] * PLANES[bits]
        starts = [0, -(-k // 8)] if bits == 3 else [i * k for i in range(len(widths))]
    planes = [Stream(codes, start) for start in starts]
    low, high = (Stream(section) for section in halves)
    scales = np.empty(0, np.uint16)  # of the buckets that reach into the window
    for start in range(0, k, window):
        count, inside = min(window, k - start), start % bucket  # values of the first bucket passed already
        parts = [plane.read(-(-count * width // 8)) for plane, width in zip(planes, widths, strict=True)]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if bits < 32:
            scales = scales[-1:] if inside else scales[:0]
            more = -(-(inside + count) // bucket) - len(scales)
            scales = np.concatenate([scales, header.scales(low.read(more), high.read(more))])
        yield dequantize(Codes(bits, bucket, count, packed, header.levels, scales), inside)
    for stream in (planes[-1], low, high):
        stream.end()


# ---- updates kept packed -----------------------------------------------------------------------------------

STRIDE = 1 << 10  # values from one whose position is known to the next


@dataclass(frozen=True)
class PackedUpdate:
    """An update of k values that can be added up, measured and decoded, but is not written out."""

    size: int  # m, length of the sampled vector
    # where k < m; with every position these four are empty
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
        codes = self.codes.packed, self.codes.scales, self.scales
        parts = (self.gaps, self.far, self.longer, self.before, *codes)
        return sum(part.nbytes for part in parts)

    def norm(self) -> float:
        """Return the Euclidean norm: integers within a bucket, float64 over the buckets."""
        codes, squared = self.codes, np.square(self.levels.astype(np.int64))
        by_byte = lookup(squared, np.arange(256, dtype=np.uint8), codes.quant_bits).reshape(256, -1).sum(1)
        packed = codes.packed, codes.count, codes.quant_bits, codes.quant_bucket_size
        return float(np.sqrt(self.loops.squares(*packed, squared, by_byte, self.scales)))

    def add_to(self, out: torch.Tensor, start: int, stop: int, factor: float) -> None:
        """Add to out[start:stop] the values there, times `factor`. out: (m,)"""
        codes = self.codes.packed, self.codes.quant_bits, self.codes.quant_bucket_size
        values = *codes, self.levels, self.scales, np.float32(factor)
        if self.count == self.size:
            self.loops.add_all(out.numpy(), start, stop, *values)
            return
        begin, end = (int(np.searchsorted(self.before, at)) for at in (start, stop))
        row = begin - 1
        walk = row * STRIDE, int(self.before[row]), begin * STRIDE, (end - 1) * STRIDE
        self.loops.add_codes(out.numpy(), start, stop, self.gaps, self.far, self.longer, *walk, *values)

    def add_sampled(self, x: np.ndarray, blocks: object, tables: object, values: slice, factor: int) -> int:
        """Add factor, 1 or -1, times some values to x, as `Sample.add_` does. They begin with a multiple of
        STRIDE. blocks, tables and what is returned: as in `numba_loops.add_packed`."""
        start, stop, _ = values.indices(self.count)
        before = int(self.before[start // STRIDE]) if len(self.gaps) else start - 1
        part, by, places = (start, stop, before), np.float32(factor), (self.gaps, self.far, self.longer)
        packed = self.codes.packed, self.codes.quant_bits, self.codes.quant_bucket_size
        codes = *packed, self.levels, self.scales
        return int(self.loops.add_packed(x, blocks, tables, places, codes, part, by))

    def window(self, start: int, stop: int, device: torch.device) -> Update:
        """Decode the values start .. stop - 1 on a device. start: a multiple of STRIDE."""
        bits, bucket = self.codes.quant_bits, self.codes.quant_bucket_size
        inside = start % bucket
        packed = self.codes.packed[start * bits // 8 : -(-stop * bits // 8)]
        scales = self.codes.scales[start // bucket : -(-stop // bucket)]
        codes = replace(self.codes, count=stop - start, packed=packed, scales=scales)
        if usable(device):
            from compress import triton_kernels  # imports triton

            values = triton_kernels.dequantize(codes, device, inside)
            if self.count == self.size:
                return Update(self.size, torch.arange(start, stop, device=device), values)
            here, before = slice(*np.searchsorted(self.far, (start, stop))), self.before[start // STRIDE]
            far = self.far[here] - start, self.longer[here]
            positions = triton_kernels.positions_behind(self.gaps[start:stop], int(before), far, device)
            return Update(self.size, positions, values)
        positions, values = self._positions(start, stop), torch.from_numpy(dequantize(codes, inside))
        return Update(self.size, positions.to(device), values.to(device))

    def decoded(self) -> Update:
        """Write the update out."""
        values = torch.from_numpy(dequantize(self.codes))
        return Update(self.size, self._positions(0, self.count), values)

    def _positions(self, start: int, stop: int) -> torch.Tensor:
        """Add up the gaps of the values start .. stop - 1, int64; start: a multiple of STRIDE."""
        if self.count == self.size:
            return torch.arange(start, stop)
        found = np.empty(stop - start, np.int64)
        self.loops.positions(self.gaps[start:stop], int(self.before[start // STRIDE]), found)
        here = slice(*np.searchsorted(self.far, (start, stop)))
        if len(self.far[here]):
            more = np.zeros(stop - start, np.int64)
            more[self.far[here] - start] = self.longer[here]
            found += np.cumsum(more)
        return torch.from_numpy(found)


def sampled(packet: Bytes) -> int:
    """Read m, the length of the vector that a packet is of; 0 where there is no header."""
    front = bytes(packet[: HEAD.size + BODY.size])
    return int(BODY.unpack_from(front, HEAD.size)[0]) if len(front) == HEAD.size + BODY.size else 0


def decode_packed(packet: bytes, m: int, most: int | None = None) -> PackedUpdate | Update:
    """Decode a packet to the smallest form that can be added up. Errors: PacketError, as from `decode`.

    most: values that its sender may send; None: m.
    """
    header, loops = read_header(memoryview(packet), m), compiled(m)
    if most is not None and header.k > most:
        raise PacketError(f"{header.k:,} values of {m:,}, of which at most {most:,} are sent")
    header = header.expanded()
    bits, bucket, at = header.quant_bits, header.quant_bucket_size, header.positions
    plain = at.kind == ALL or (at.kind == GAPS and at.shift == 0 and header.k)
    if loops is None or not plain or bits not in (1, 2, 4, 8) or bucket * bits % 8:
        return decode_expanded(header, m, loops)
    gaps, far, longer = bytes_and_escapes(np.frombuffer(at.main.data, np.uint8))
    before = np.empty(-(-len(gaps) // STRIDE) + 1, np.int64)
    if at.kind == GAPS:
        if len(gaps) != header.k or at.main.data[-1] == 255:
            return decode_expanded(header, m, loops)  # refuses it
        gaps = _in_words(gaps)
        loops.strides(gaps, STRIDE, far, longer, before)
        if before[-1] >= m:
            raise PacketError(f"a position {before[-1]:,} in a vector of {m:,}")
    codes = header.codes()
    codes = replace(codes, packed=_in_words(codes.packed))
    levels, scales = signed_table(codes.levels), widen(codes.scales)
    return PackedUpdate(m, gaps, far, longer, before, codes, levels, scales, loops)


def _in_words(part: np.ndarray) -> np.ndarray:
    """Return the same bytes where they can be read eight at once: a stored section begins anywhere. They are
    read-only, wherever they come from: loops are compiled anew for each kind of array."""
    words = part if part.ctypes.data % 8 == 0 else part.copy()
    words.flags.writeable = False
    return words


# ---- packets of several shards -----------------------------------------------------------------------------

# "CS", version 1, 0 | S, u32 | S lengths, u64 each | the packets, one after the other. A length of 0: this
# shard has not moved. A vector of one shard is its packet as it stands, unless it has not moved either.
JOINED, JOINED_VERSION = b"CS", 1
JOINED_HEAD = struct.Struct("<2sBBI")  # magic, version, zero, shards

B = TypeVar("B", bound=Bytes)


def join(packets: Sequence[bytes]) -> bytes:
    """Join the packets of all shards, in order; an empty one says that its shard has not moved."""
    if len(packets) == 1 and packets[0]:
        return packets[0]
    head = JOINED_HEAD.pack(JOINED, JOINED_VERSION, 0, len(packets))
    return b"".join([head, struct.pack(f"<{len(packets)}Q", *map(len, packets)), *packets])


def joined_size(sizes: Sequence[int]) -> int:
    """Return the most bytes of a packet that joins those of shards, which have at most these each."""
    return JOINED_HEAD.size + 8 * len(sizes) + sum(sizes)


def split(packet: B, count: int) -> list[B]:
    """Split what was joined, of `count` shards, which the receiver knows. Errors: PacketError."""
    if count == 1 and bytes(packet[: len(JOINED)]) != JOINED:
        return [packet]
    start = JOINED_HEAD.size + 8 * count
    front = bytes(packet[:start])
    if len(front) < start:
        raise PacketError(f"{len(packet):,} bytes, the packets of {count:,} shards have at least {start:,}")
    magic, version, zero, shards = JOINED_HEAD.unpack_from(front)
    if (magic, version, zero) != (JOINED, JOINED_VERSION, 0):
        said = f"begins with {magic!r} version {version}, reserved field {zero}"
        raise PacketError(f"{said}, expected {JOINED!r} version {JOINED_VERSION} of {count:,} shards")
    if shards != count:
        raise PacketError(f"the packets of {shards:,} shards, expected {count:,}")
    lengths = struct.unpack_from(f"<{count}Q", front, JOINED_HEAD.size)
    if start + sum(lengths) != len(packet):
        whole = start + sum(lengths)
        raise PacketError(f"{len(packet):,} bytes, its table of shards adds up to {whole:,}")
    parts = []
    for length in lengths:
        parts.append(packet[start : start + length])
        start += length
    return parts
