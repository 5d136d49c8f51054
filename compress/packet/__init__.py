"""The bytes of a packet, written and read."""

from .decoder import decode, decode_windows, window_memory
from .format import VERSION, read_header, write
from .index_coding import (
    CROWDED,
    FEW,
    GAPS,
    EncodedPositions,
    decode_positions,
    encode_positions,
    encode_steps,
)
from .packed_update import PackedUpdate, decode_packed
from .section_streams import Bytes, FileSlice
