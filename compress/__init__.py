"""Tensors into few bytes and back: sample, keep the largest, quantize, entropy-code. See README.md in this
folder.
"""

from compress.codec import Cocktail, Encoded
from compress.errors import NonFiniteError, PacketError
from compress.fingerprint import fingerprint, fingerprint_after
from compress.packet import VERSION as PACKET_VERSION
from compress.packet import Expanded, decode, expanded, pieces
from compress.sampling import Sample
from compress.sharding import Shard, join, split
from compress.sparse_update import Update

__all__ = [
    "PACKET_VERSION",
    "Cocktail",
    "Encoded",
    "Expanded",
    "NonFiniteError",
    "PacketError",
    "Sample",
    "Shard",
    "Update",
    "decode",
    "expanded",
    "fingerprint",
    "fingerprint_after",
    "join",
    "pieces",
    "split",
]
