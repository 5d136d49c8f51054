"""One round as the hub has seen it, for the diagnosis: arrivals, bytes, and what its peers have measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from .sight import Sight
from .spent import Spent

TENTHS = 2.563  # standard deviations between the lowest and the highest tenth
SPREAD = 0.05  # the least: nothing on a computer is more regular
TICK = 0.01  # seconds; less is not measured well


@dataclass(frozen=True)
class PeerSample:
    """One member's part in a round."""

    name: str
    arrived: float  # hub's monotonic seconds: its update was whole, or the round closed without it
    compute_s: float = 0.0  # of the lease before
    wait_s: float = 0.0  # that its device then waited for the exchange
    samples: int = 0  # of that lease; 0: not known
    cost: float = 0.0  # of these samples, as the load balancer sees it
    upload_s: float = 0.0  # from its report to its whole update
    up: int = 0  # bytes of its update; 0: not known
    down: int = 0  # bytes of the aggregate that it has fetched since its last update
    spent: Spent | None = None
    whole: bool = True  # False: the round closed without its update
    sight: Sight | None = None  # what the hub sees of a peer that the round went on without

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase of its round, or of a counter of its machine: a field of `Spent`."""
        if phase in ("compute", "upload"):
            measured = self.compute_s if phase == "compute" else self.upload_s
        else:
            measured = getattr(self.spent, phase) / 1000 if self.spent is not None else 0.0
        return measured if self.sight is None else max(measured, self.sight.seconds(phase))

    def sizes(self, phase: str) -> tuple[float, ...]:
        """Return what the seconds of a phase are in proportion to; 0: not known, (1,): to nothing."""
        if phase == "compute":
            return self.samples, self.cost
        return ({"upload": self.up, "download": self.down}.get(phase) or 1,)


@dataclass(frozen=True)
class RoundSample:
    """One committed round."""

    round: int
    opened: float  # hub's monotonic seconds
    peers: dict[str, PeerSample] = field(default_factory=dict)  # by session
    sights: dict[str, Sight] = field(default_factory=dict)  # of sessions that it has gone on without
    aggregate_s: float = 0.0  # of the hub
    disk_s: float = 0.0  # of the hub: until the round was durable
    uneven: bool = False  # peers had other work too: an evaluation


@dataclass(frozen=True)
class Usual:
    """Usual seconds of a phase, and how far they spread: a standard deviation of their logarithm."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Usual:
        """Summarise at least one value. Few values make the spread larger, as it is not well known then."""
        logs, cut = sorted(log(max(value, TICK)) for value in values), len(values) // 10
        spread = (logs[-1 - cut] - logs[cut]) / TENTHS
        return cls(median(values), max(SPREAD, spread) * (1 + 8 / len(values)))

    def excess(self, seconds: float, sigmas: float = 4.0) -> float:
        """Return the seconds above the usual ones; 0 within `sigmas` of them."""
        most = max(self.seconds, TICK) * exp(sigmas * self.spread)
        return seconds - self.seconds if seconds > most else 0.0


def usual(phase: str, of: PeerSample, before: Iterable[PeerSample]) -> Usual | None:
    """Estimate the usual seconds of a phase from other samples, for a round as large as `of`; None: unknown.

    Where two sizes are known, samples and their cost, the larger estimate counts: neither is exact.
    """
    found = []
    for number, size in enumerate(of.sizes(phase)):
        pairs = [(one.seconds(phase), one.sizes(phase)) for one in before]
        if values := [size * seconds / sizes[number] for seconds, sizes in pairs if size and sizes[number]]:
            found.append(Usual.of(values))
    return max(found, key=lambda one: one.seconds, default=None)
