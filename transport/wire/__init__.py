"""Sockets that carry frames, and the limits on each connection."""

from .frames import (
    GUARD_S,
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
    MOST_HELD,
    Came,
    Down,
    ForMany,
    Frames,
    HubWire,
    PeerWire,
    Up,
    key_of,
    origin_of,
    wire_size,
)
from .rate_limit import Bandwidth, BothWays, Buckets
from .zeromq_sockets import DealerWire, RouterWire, answers

__all__ = [
    "GUARD_S",
    "HANDSHAKE_DOWN",
    "HANDSHAKE_UP",
    "MOST_HELD",
    "Bandwidth",
    "BothWays",
    "Buckets",
    "Came",
    "DealerWire",
    "Down",
    "ForMany",
    "Frames",
    "HubWire",
    "PeerWire",
    "RouterWire",
    "Up",
    "answers",
    "key_of",
    "origin_of",
    "wire_size",
]
