"""Sockets that carry frames, and the limits on each connection."""

from .connection_guard import origin
from .fair_queue import FairQueue
from .frames import (
    GUARD_S,
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
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
    wire_size,
)
from .rate_limit import Bandwidth, RateLimits, TokenBucket, TokenBuckets
from .tcp_route import TcpRoute, routes_to
from .zeromq_sockets import OF_PEERS, DealerWire, RouterWire, is_reachable, raise_file_limit, try_route
