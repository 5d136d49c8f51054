"""Rounds of a run: leases of samples, shares of the batch, straggler deadline, evaluations, history."""

from .exchange import Exchange, RoundHistory
from .figures import round_figures
from .hub_extension import CommitSeconds, HubExtension, Lines, Sums, UnderWay, UploadKind
from .leases import Ladder, Leases, LoadBalancer
from .rounds import PHASES, Phase, Rounds
