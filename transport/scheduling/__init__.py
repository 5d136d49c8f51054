"""Rounds: leases of samples, shares of the batch, deadlines, evaluations."""

from .evaluation import Evaluations, Part
from .leases import Leases
from .load_balancer import Speeds
from .rounds import PHASES, Exchange, Phase, owner_called, row_of
from .straggler_deadline import Pace

__all__ = [
    "PHASES",
    "Evaluations",
    "Exchange",
    "Leases",
    "Pace",
    "Part",
    "Phase",
    "Speeds",
    "owner_called",
    "row_of",
]
