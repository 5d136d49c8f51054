"""Rounds of a run: leases of samples, shares of the batch, straggler deadline, evaluations, history."""

from .exchange import Exchange, fitting, row_of
from .figures import RoundFigures, round_figures
from .hub_extension import CommitSeconds, HubExtension, Lines, Sums, UnderWay, UploadKind
from .leases import Leases
from .load_balancer import LoadBalancer
from .round_history import RoundHistory
from .rounds import PHASES, Phase, Rounds
