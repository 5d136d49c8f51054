"""Links between peers, beside those to their hub, and a peer's port for them. A run whose peers do not dial
each other does not load it.
"""

from .direct_links import DirectLinks, ReachablePeer, StallDetector, link_to
from .peer_server import Fragment, PeerServer, Read, Uploads
