"""Sections of a packet: positions as small numbers (index coding), bytes made smaller (entropy coding)."""

from . import index_coding
from .entropy_coding import LZ4, LZ4_MOST, STORED, ZSTD, Section, expand, shrink, zstd
from .index_coding import (
    GAPS,
    EncodedPositions,
    borders,
    bytes_and_escapes,
    decode_positions,
    encode_gap_bytes,
    encode_positions,
    in_gap_bytes,
    longest_positions,
    section_sizes,
)
from .section_streams import Bytes, FileSlice, Stream, held
