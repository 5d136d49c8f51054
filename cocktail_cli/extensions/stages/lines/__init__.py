"""Lines between machines that are neighbours in a ring: each message once, whole and in order, both ways."""

from .line_probe import LineRates
from .stage_line import FORWARD, Kind, LineLost, StageMessage
from .stage_link import ANYWHERE, Neighbour, StageLink, check_address, dials
