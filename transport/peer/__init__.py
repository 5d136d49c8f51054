"""A peer's connection to its hub, and catching up with the run."""

from .catch_up import NEXT, CatchUp, CatchUpSource, CatchUpState, Progress
from .catch_up_downloads import CatchUpDownloads, WantedFile
from .connection_manager import BOUNDS, OF_SAMPLES, HubPart, LinkLimits, SizeBounds, hashes_size
from .hub_questions import RunPreview, RunVisit, ask_admin, ask_status, ask_stop, check_answer, peer_pages
from .peer_link import HANDOFF_S, LEAVE_S, POLL_S, PeerIdentity, PeerLink, StopRequest
from .peer_state import HEARD, Elsewhere, Newest, PeerState, SessionState
