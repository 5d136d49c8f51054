"""Pipeline stages on several machines: who computes with whom, and the lines between them.

A run without stages does not load it.
"""

from .stage_line import Gone, LineMessage, Renewed
from .stage_link import FromNeighbour, Neighbour, StageLink
from .stage_placement import Machines, PipelineLoad, Placed, Placement, check_address, dials, place
