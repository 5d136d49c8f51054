"""The bytes of a packet: a fixed header, a table of levels, five sections. FORMAT.md has them one by one."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

import numpy as np

from compress.coding import (
    LZ4,
    LZ4_MOST,
    STORED,
    Bytes,
    EncodedPositions,
    Section,
    borders,
    expand,
    longest_positions,
    section_sizes,
    shrink,
)
from compress.errors import PacketError
from compress.quantization import BITS, Codes, packed_size, planes, table_size, widen

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
    """The fields of a packet, checked against each other, and its sections, still compressed."""

    quant_bits: int
    k: int
    quant_bucket_size: int
    kind: int  # of the positions
    shift: int
    levels: np.ndarray  # (2**(quant_bits-1),) uint16; empty at 16 and 32 bits
    sections: list[Section]

    @property
    def positions(self) -> EncodedPositions:
        return EncodedPositions(self.kind, self.shift, *self.sections[:2])

    def expanded(self) -> Header:
        """Decompress every section into memory."""
        whole = [Section(STORED, s.raw, memoryview(expand(s))) for s in self.sections]
        return replace(self, sections=whole)

    def codes(self) -> Codes:
        """Return all codes of an expanded header. Errors: PacketError: a scale is refused."""
        packed, low, high = (np.frombuffer(section.data, np.uint8) for section in self.sections[2:])
        return self.window(self.k, packed, self.scales(low, high))

    def window(self, count: int, packed: np.ndarray, scales: np.ndarray) -> Codes:
        """Return `count` of the packet's codes, with the scales of their buckets."""
        return Codes(self.quant_bits, self.quant_bucket_size, count, packed, self.levels, scales)

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
    if checksum and _checksum(packet) != crc:
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
    return Header(bits, k, bucket, kind, shift, levels, sections)


def _checksum(packet: Bytes) -> int:
    crc = 0
    for start in range(HEAD.size, len(packet), CRC_BLOCK):
        part = packet[start : start + CRC_BLOCK]
        crc = zlib.crc32(part if isinstance(part, memoryview) else bytes(part), crc)
    return crc
