"""Entropy coding: a section of a packet is stored, or compressed by zstd or lz4, whichever pays.

zstd level 1 is within 1-2 % of the entropy on everything a packet holds, at 0.5-1 GB/s; higher levels are
larger on such data. It looks for long repeats only: codes and gaps have statistics, not repeats, and the
short matches that chance offers cost up to 8 % (gaps at K = 0.25). lz4 has no entropy coder: it is for bytes
that repeat (long runs of untouched elements), where it is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lz4.block
import zstandard

from compress.errors import PacketError

STORED, ZSTD, LZ4 = 0, 1, 2
WORTH = 0.98  # a section that does not shrink by 2 % is stored: it decodes for free
PROBE = 1 << 16
REPEATS = 0.10  # lz4 shrank the probe to this share: the bytes repeat
ZSTD_WINDOW = 1 << 23
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
    packed = zstandard.ZstdCompressor(compression_params=_long_repeats()).compress(raw)
    return Section(ZSTD, size, packed) if len(packed) < WORTH * size else Section(STORED, size, raw)


def expand(section: Section) -> bytes | memoryview:
    """Decompress a section to `section.raw` bytes, which the caller has checked; never allocates more.

    Errors: PacketError.
    """
    try:
        if section.codec == STORED:
            raw: bytes | memoryview = section.data
        elif section.codec == ZSTD:
            # the frame's own claim would be believed before ours
            claimed = zstandard.frame_content_size(section.data)
            if claimed != section.raw:
                raise PacketError(f"a zstd section claims {claimed} bytes, its table entry {section.raw}")
            unpack = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
            raw = unpack.decompress(section.data, max_output_size=section.raw)
        elif section.codec == LZ4:
            raw = lz4.block.decompress(section.data, uncompressed_size=section.raw)
        else:
            raise PacketError(f"section codec {section.codec}, known are 0 (stored), 1 (zstd), 2 (lz4)")
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise PacketError(f"a section of {len(section.data)} bytes does not decompress: {error}") from error
    if len(raw) != section.raw:
        raise PacketError(f"a section gave {len(raw)} bytes, its table entry says {section.raw}")
    return raw


@lru_cache(maxsize=1)
def _long_repeats() -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )
