"""The bytes of a packet, written and read."""

from .format import VERSION, codes_of, decode
from .index_coding import (
    CROWDED,
    FEW,
    GAPS,
    Places,
    load,
    small_steps,
    store,
)
from .packed_update import Expanded, expanded
from .section_streams import Bytes, InFile
from .windowed_decoder import memory, pieces

__all__ = [
    "CROWDED",
    "FEW",
    "GAPS",
    "VERSION",
    "Bytes",
    "Expanded",
    "InFile",
    "Places",
    "codes_of",
    "decode",
    "expanded",
    "load",
    "memory",
    "pieces",
    "small_steps",
    "store",
]
