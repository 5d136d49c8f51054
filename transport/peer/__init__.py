"""A peer's connection to its hub, and catching up with the run."""

from .admin_client import ask_admin, ask_status, ask_stop, peer_pages
from .catch_up import NEXT, CatchUp, CatchUpSource, CatchUpState, LocalCopy, Progress
from .catch_up_downloads import CatchUpDownloads, WantedFile
from .connection_manager import HubPart, LinkLimits
from .hub_status import check_answer
from .peer_link import HANDOFF_S, LEAVE_S, POLL_S, PeerIdentity, PeerLink, StopRequest
from .peer_state import HEARD, Elsewhere, Newest, PeerState, SessionState
from .run_visit import RunPreview, RunVisit
from .size_bounds import BOUNDS, OF_SAMPLES, SizeBounds, hashes_size
