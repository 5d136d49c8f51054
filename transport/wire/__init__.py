"""Sockets that carry frames, and the limits on each connection."""

from .frames import (
    GUARD_S,
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
    MAX_BUFFERED,
    Connected,
    Disconnected,
    Frames,
    HubWire,
    PeerWire,
    Received,
    SharedPayload,
    key_of,
    origin_of,
    wire_size,
)
from .memory_sockets import MemoryHubWire, MemoryPeerWire
from .rate_limit import Bandwidth, RateLimits, TokenBuckets
from .zeromq_sockets import DealerWire, RouterWire, is_reachable

__all__ = [
    "GUARD_S", "HANDSHAKE_DOWN", "HANDSHAKE_UP", "MAX_BUFFERED", "Bandwidth", "Connected", "DealerWire",
    "Disconnected", "Frames", "HubWire", "MemoryHubWire", "MemoryPeerWire", "PeerWire", "RateLimits",
    "Received", "RouterWire", "SharedPayload", "TokenBuckets", "is_reachable", "key_of", "origin_of",
    "wire_size",
]  # fmt: skip
