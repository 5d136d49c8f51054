"""Entropy coding: a section of a packet is stored, or compressed by zstd or lz4, whichever pays.

zstd level 1 is within 1-2 % of the entropy on everything a packet holds, at 0.5-1 GB/s; higher levels are
larger on such data. It looks for long repeats only: codes and gaps have statistics, not repeats, and the
short matches that chance offers cost up to 8 % (gaps at K = 0.25). lz4 has no entropy coder: it is for bytes
that repeat (long runs of untouched elements), where it is faster.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import lz4.block

from compress.errors import PacketError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STORED, ZSTD, LZ4 = 0, 1, 2
WORTH = 0.98  # a section that does not shrink by 2 % is stored: it decodes for free
PROBE = 1 << 16
REPEATS = 0.10  # lz4 shrank the probe to this share: the bytes repeat
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_WINDOW_LOG = 23  # 8 MiB
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
    data: Any  # bytes, a memoryview, or what is sliced like one (streams.Bytes)


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
            unpack = zstd_decoder()
            raw = unpack.decompress(section.data, section.raw + 1)  # one more, for the frame to end
            if not unpack.eof:
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


def zstd_decoder() -> zstd.ZstdDecompressor:
    """Return a decoder of one frame, which refuses a window above 8 MiB."""
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


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
