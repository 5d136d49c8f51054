"""A peer's connection to its hub, and catching up with the run."""

from .admin_client import ask_owner, ask_status, ask_stop
from .catch_up import (
    NEXT,
    CatchUp,
    Own,
    Progress,
    State,
    Way,
)
from .catch_up_downloads import Supply, Wanted
from .peer_link import LEAVE_S, LEGACY_S, LOOK_S, PeerLink
from .peer_state import HEARD

__all__ = [
    "HEARD",
    "LEAVE_S",
    "LEGACY_S",
    "LOOK_S",
    "NEXT",
    "CatchUp",
    "Own",
    "PeerLink",
    "Progress",
    "State",
    "Supply",
    "Wanted",
    "Way",
    "ask_owner",
    "ask_status",
    "ask_stop",
]
