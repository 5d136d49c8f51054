"""Rounds of a run: leases of samples, shares of the batch, straggler deadline, evaluations, history."""

from .exchange import Exchange, row_of
from .leases import Leases
from .round_history import Curve, RoundHistory
from .rounds import PHASES, Phase, Progress, Rounds

__all__ = [
    "PHASES",
    "Curve",
    "Exchange",
    "Leases",
    "Phase",
    "Progress",
    "RoundHistory",
    "Rounds",
    "row_of",
]
