"""A peer's connection to its hub, and catching up with the run."""

from .admin_client import ask_admin, ask_status, ask_stop
from .catch_up import (
    NEXT,
    CatchUp,
    CatchUpSource,
    CatchUpState,
    LocalCopy,
    Progress,
)
from .catch_up_downloads import CatchUpDownloads, WantedFile
from .connection_manager import LinkLimits
from .peer_link import HANDOFF_S, LEAVE_S, POLL_S, PeerIdentity, PeerLink
from .peer_state import HEARD

__all__ = [
    "HANDOFF_S", "HEARD", "LEAVE_S", "NEXT", "POLL_S", "CatchUp", "CatchUpDownloads", "CatchUpSource",
    "CatchUpState", "LinkLimits", "LocalCopy", "PeerIdentity", "PeerLink", "Progress", "WantedFile",
    "ask_admin", "ask_status", "ask_stop",
]  # fmt: skip
