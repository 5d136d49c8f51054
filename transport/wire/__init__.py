"""Sockets that carry frames, and the limits on each connection."""

from .connection_guard import HANDSHAKE_DOWN, HANDSHAKE_UP, origin, wire_size
from .frames import (
    GUARD_S,
    MAX_BUFFERED,
    Connected,
    Crossed,
    Disconnected,
    Frames,
    Guarded,
    HubWire,
    PeerWire,
    Received,
    SharedPayload,
    key_of,
    origin_of,
)
from .rate_limit import Bandwidth, FairQueue, RateLimits, TokenBucket, TokenBuckets
from .zeromq_sockets import (
    OF_PEERS,
    DealerWire,
    RouterWire,
    TcpRoute,
    is_reachable,
    raise_file_limit,
    routes_to,
    try_route,
)
