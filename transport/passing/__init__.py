"""Reachable peers pass a round's packet on: it leaves the hub once or twice, not once for each peer.

They pass files on to newcomers, too.
"""

from .direct_links import DirectLinks, ReachablePeer, StallDetector, link_to
from .file_sources import FileSources
from .packet_sources import PacketSources
from .packet_stripes import divide, packets_over
from .passing_choice import PassingChoice
from .passing_coordinator import PassingCoordinator
