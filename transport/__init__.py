"""Carries bytes between peers and keeps the books of a run. The protocol: transport/PROTOCOL.md.

Beside these names: `transport.events`, `transport.errors`, `transport.messages`, `transport.memory`.
"""

from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import CatchUp, PeerLink, Supply, Wanted, ask_owner, ask_status, ask_stop
from transport.protocol import RunKeys, RunSettings, RunURL, parse_url
from transport.wire import Bandwidth

__all__ = [
    "Bandwidth",
    "CatchUp",
    "Hub",
    "Ledger",
    "PeerLink",
    "RunKeys",
    "RunSettings",
    "RunURL",
    "Supply",
    "Wanted",
    "ask_owner",
    "ask_status",
    "ask_stop",
    "parse_url",
]
