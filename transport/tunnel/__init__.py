"""The ways to a hub beside its own address: relays, proxies, a WebSocket over TLS. A run that needs none of
them does not load this package."""

from . import relay_socks
from .bridge import Bridge
from .dialling import ask, certificate_doubt, first_answer, open_stream, probe, request, round_trip
from .loop_thread import LoopThread, PolledWire, TaskSet
from .streams import SocketStream, Stream, accept, dial_loopback, prepare, splice
from .websocket_stream import TLS_FIRST, accept_websocket, client_context
