"""Tensors into few bytes and back: sample, keep the largest, quantize, entropy-code. See README.md in this
folder.
"""

from compress.cocktail import Cocktail
from compress.errors import NonFiniteError, PacketError
from compress.expanded import Expanded, expanded
from compress.fingerprint import fingerprint, fingerprint_after
from compress.packet import VERSION as PACKET_VERSION
from compress.packet import decode
from compress.pieces import pieces
from compress.sample import Sample
from compress.shards import Shard, join, split
from compress.update import Update

__all__ = [
    "PACKET_VERSION",
    "Cocktail",
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
