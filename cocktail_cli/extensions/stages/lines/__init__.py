"""Lines between machines that are neighbours in a ring: each message once, whole and in order, both ways."""

from .line_probe import LineRates
from .ring_lines import ANYWHERE, LineLost, RingLines
from .stage_line import FORWARD, Gone, Kind, Renewed, StageMessage
from .stage_link import FromNeighbour, Neighbour, StageLink, check_address, dials
