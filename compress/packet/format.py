"""The bytes of a packet: a fixed header, a table of levels, five sections. FORMAT.md has them one by one."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from compress.backends import compiled, usable
from compress.errors import PacketError
from compress.quantization import BITS, Codes, dequantize, packed_size, planes, table_size, widen
from compress.sparse_update import Update

from . import index_coding as places
from .entropy_coding import LZ4, LZ4_MOST, Section, expand, shrink
from .section_streams import Bytes

MAGIC, VERSION = b"CK", 1
HEAD = struct.Struct("<2sBBI")  # magic, version, bits, CRC-32 of all that follows
BODY = struct.Struct("<QQQIBBH")  # m, k, bytes of section 0 expanded, bucket, position kind, shift, zero
SECTIONS = 5  # positions, their low bits, codes, low and high bytes of the scales
ENTRY = struct.Struct("<Q")  # codec in the top 3 bits, length here below
LEVELS = HEAD.size + BODY.size + SECTIONS * ENTRY.size
FRONT = LEVELS + 2 * table_size(8)  # bytes before the first section, at most
AT_ONCE = 1 << 20  # bytes, where a packet is read through
MOST = 1 << 40  # no vector is longer: every size below stays within 64 bits
NORMAL, INFINITE = 0x0080, 0x7F80  # BF16 patterns of 2**-126 and infinity


def write(m: int, where: places.Places, codes: Codes) -> bytes:
    """The packet of k values and their places in a sampled vector of m."""
    scales = planes(codes.scales.astype("<u2").view(np.uint8), 2)
    half = len(scales) // 2
    sections = [where.main, where.low] + [
        shrink(part.data) for part in (codes.packed, scales[:half], scales[half:])
    ]
    body: list[bytes | memoryview] = [
        BODY.pack(m, codes.count, where.main.raw, codes.bucket, where.kind, where.shift, 0)
    ]
    body += [ENTRY.pack(s.codec << 61 | len(s.data)) for s in sections]
    body += [codes.levels.astype("<u2").tobytes()]
    body += [s.data for s in sections]
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join([HEAD.pack(MAGIC, VERSION, codes.bits, crc), *body])


def decode(
    packet: bytes | bytearray | memoryview,
    m: int,  # length of the sampled vector, which the receiver knows
    device: torch.device | str = "cpu",  # where the update is wanted
    kernels: bool | None = None,  # True: Triton; False: NumPy, the reference; None: what is fastest there
) -> Update:
    """The update in a packet, the same bits on every device.

    PacketError where anything is wrong: the packet comes from somebody else. Every size is checked against
    m before memory is asked for; what is allocated is at most some 40 bytes for each of the m elements.
    """
    head = read_head(memoryview(packet), m)
    main, low = (np.frombuffer(expand(section), np.uint8) for section in head.sections[:2])
    codes = read_codes(head)
    device = torch.device(device)
    if head.bits < 32 and (usable(torch.empty(0, device=device)) if kernels is None else kernels):
        from compress.backends.triton import code_kernels as there  # imports triton
        from compress.backends.triton import selection_kernels

        where = selection_kernels.load(head.kind, head.shift, main, low, m, head.k, device)
        return Update(m, where, there.dequantize(codes, device))
    fast = None if kernels is False else compiled(m)
    positions = places.load(head.kind, head.shift, main, low, m, head.k, fast)
    values = dequantize(codes)
    if head.bits == 32 and not np.isfinite(values).all():
        raise PacketError("a value that is not finite")
    return Update(m, torch.from_numpy(positions).to(device), torch.from_numpy(values).to(device))


def codes_of(packet: bytes, m: int) -> Codes:
    """The codes of a packet as they are, for those who count bits."""
    return read_codes(read_head(memoryview(packet), m))


@dataclass(frozen=True)
class Head:
    """What a packet says of itself, found plausible; the sections are still compressed."""

    bits: int
    k: int
    bucket: int
    kind: int
    shift: int
    levels: np.ndarray
    sections: list[Section]


def read_head(packet: Bytes, m: int, whole: bool = True) -> Head:
    """What a packet says of itself; `whole`: its checksum is looked at. PacketError where it cannot be."""
    if len(packet) < LEVELS:
        raise PacketError(f"{len(packet)} bytes, a packet has at least {LEVELS}")
    front = bytes(packet[:FRONT])
    magic, version, bits, crc = HEAD.unpack_from(front)
    if magic != MAGIC or version != VERSION:
        raise PacketError(f"begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if whole and _checksum(packet) != crc:
        raise PacketError("its checksum does not match: damaged on the way")
    length, k, main, bucket, kind, shift, zero = BODY.unpack_from(front, HEAD.size)
    if length != m or not k <= m < MOST:
        raise PacketError(f"{k:,} values of {length:,}, expected a sampled vector of {m:,}")
    if bits not in BITS or bucket == 0 or zero:
        raise PacketError(f"{bits} bits in buckets of {bucket}, reserved field {zero}")
    allowed, low = places.sizes(kind, shift, m, k)
    if main not in allowed:
        raise PacketError(f"positions in {main} bytes, expected {allowed.start} to {allowed.stop - 1}")
    buckets = -(-k // bucket) if bits < 32 else 0
    raw = [main, low, packed_size(bits, k), buckets, buckets]
    start = LEVELS + 2 * table_size(bits)
    sections = []
    for i, size in enumerate(raw):
        (entry,) = ENTRY.unpack_from(front, HEAD.size + BODY.size + i * ENTRY.size)
        here = entry & ((1 << 61) - 1)
        if entry >> 61 == LZ4 and size > LZ4_MOST:
            raise PacketError(f"an lz4 section of {size:,} bytes, at most {LZ4_MOST:,} are possible")
        sections.append(Section(entry >> 61, size, packet[start : start + here]))
        start += here
    if start != len(packet):
        raise PacketError(f"{len(packet)} bytes, its table of sections adds up to {start}")
    levels = np.frombuffer(front, "<u2", table_size(bits), LEVELS)
    return Head(bits, k, bucket, kind, shift, levels, sections)


def _checksum(packet: Bytes) -> int:
    crc = 0
    for start in range(HEAD.size, len(packet), AT_ONCE):
        part = packet[start : start + AT_ONCE]
        crc = zlib.crc32(part if isinstance(part, memoryview) else bytes(part), crc)
    return crc


def read_codes(head: Head) -> Codes:
    """Its codes, expanded, and its scales, found plausible. PacketError."""
    packed, low, high = (np.frombuffer(expand(section), np.uint8) for section in head.sections[2:])
    scales = low | high.astype("<u2") << np.uint16(8)
    check_scales(scales, head.levels, head.bits)
    return Codes(head.bits, head.bucket, head.k, packed, head.levels, scales)


def check_scales(scales: np.ndarray, levels: np.ndarray, bits: int) -> None:
    """Every product of a level and a scale must be a normal number, or zero: else devices could differ."""
    if not len(scales):
        return
    if ((scales != 0) & ((scales < NORMAL) | (scales >= INFINITE))).any():
        raise PacketError("a scale that is negative, denormal or not finite")
    top = np.float32(32767 if bits == 16 else levels.max())
    with np.errstate(over="ignore"):
        if not np.isfinite(top * widen(scales.max(keepdims=True))[0]):
            raise PacketError("a level times its scale overflows")
