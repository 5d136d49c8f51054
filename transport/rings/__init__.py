"""The hub's side of rings of machines that each hold some layers.

A run without such machines does not load it.
"""

from .ring_coordinator import RingCoordinator
from .ring_table import GAP_S, Lender, Ring, RingTable
