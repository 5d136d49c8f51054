"""The bytes of a packet, written and read."""

from .decoder import decode, decode_windows, window_memory
from .format import BODY, HEAD, LEVELS, VERSION, longest, read_header, write
from .packed_update import PackedUpdate, decode_packed
