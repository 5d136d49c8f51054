"""Tensors into few bytes and back: sample, keep the largest, quantize, entropy-code. See README.md in this
folder.
"""

from compress.codec import Cocktail, Encoded
from compress.errors import NonFiniteError, PacketError
from compress.fingerprint import fingerprint, fingerprint_after
from compress.packet import VERSION as PACKET_VERSION
from compress.packet import PackedUpdate, decode, decode_packed, decode_windows
from compress.sampling import Sample
from compress.sharding import Shard, join, split
from compress.sparse_update import Update

__all__ = [
    "PACKET_VERSION",
    "Cocktail",
    "Encoded",
    "NonFiniteError",
    "PackedUpdate",
    "PacketError",
    "Sample",
    "Shard",
    "Update",
    "decode",
    "decode_packed",
    "decode_windows",
    "fingerprint",
    "fingerprint_after",
    "join",
    "split",
]
