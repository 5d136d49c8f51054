"""Carries bytes between peers and keeps the books of a run. The protocol: transport/README.md.

Beside these names: `transport.events`, `transport.errors`, `transport.messages`, `transport.memory`.
"""

from .admin import ask_owner, ask_status, ask_stop
from .bandwidth import Bandwidth
from .catch_up import CatchUp
from .hub import Hub
from .keys import RunKeys
from .ledger import Ledger
from .peer import PeerLink
from .settings import RunSettings
from .supply import Supply, Wanted
from .url import RunURL, parse_url

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
