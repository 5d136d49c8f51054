"""The straggler deadline: when a round closes, computed from earlier arrival times instead of a user's guess.

All times are seconds after the opening of a round. Each member is measured by itself, so a round waits for
one that is slow but steady, and soon misses one that is fast:

    limit of a member = max(FLOOR, 3 x its median, min(its median + 6 x its spread, 10 x the members' median))
    deadline          = the longest limit of the missing members x slowness of this round; at most the cap

- The spread is 1.4826 x the median distance from the median (a standard deviation, where times are normal).
  For an erratic member the median of all bounds its effect; the member's own 3 medians have no bound.
- Slowness of a round: the median of arrival / own median over the updates that are here, at least 1.
  Evaluations, larger shares after a loss, or a busy hub slow all members; the last one is not at fault.
- A round waits up to the cap for a member with fewer than KNOWN arrivals.
- After a restart of the hub the newest rounds in its ledger stand for their members' arrivals.
- A missed round counts as an arrival at its closing, which is a lower bound. So a member that has become
  slower is measured as such after half a WINDOW of misses; its limit then grows threefold, repeatedly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

from transport.ledger import RoundRow

WINDOW = 8  # arrivals remembered per member: two outliers change nothing, four in a row do
KNOWN = 3  # arrivals needed: the first is early (no compute before it) or late (a cold machine)
FLOOR = 2.0  # seconds; below that, a busy scheduler or one lost TCP segment looks like a stall
MEDIANS, SPREADS = 3.0, 6.0  # ordinary jitter
BOUND = 10.0  # medians of all that an erratic member may cost
SIGMA = 1.4826  # median distance from the median -> standard deviation


@dataclass(frozen=True)
class Arrivals:
    """Arrival times of a member's updates, summarised."""

    median: float
    spread: float

    def limit(self, overall: float) -> float:
        """Return when to give this member up. `overall`: the median over the members of their medians."""
        erratic = min(self.median + SPREADS * self.spread, BOUND * overall)
        return max(FLOOR, MEDIANS * self.median, erratic)


def summary(arrivals: Iterable[float]) -> Arrivals | None:
    """Summarise a member's last arrivals; None for too few."""
    times = list(arrivals)
    if len(times) < KNOWN:
        return None
    middle = median_high(times)
    return Arrivals(middle, SIGMA * median_high(abs(t - middle) for t in times))


def slowness(here: Mapping[str, float], known: Mapping[str, Arrivals]) -> float:
    """Return the factor by which the updates that are here were slower than usual; at least 1."""
    usual = FLOOR / MEDIANS  # shorter times say more about this computer than about the round
    ratios = [at / max(usual, known[s].median) for s, at in here.items() if s in known]
    return max(1.0, median(ratios)) if ratios else 1.0


class StragglerDeadline:
    """Deadlines from the arrival times of each session. A peer in a new session is measured anew."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._arrivals: dict[str, deque[float]] = {}  # by session
        self._known: dict[str, Arrivals] = {}

    def note(self, session: str, seconds: float) -> None:
        """Add an arrival: the update came, or the round closed without it."""
        times = self._arrivals.setdefault(session, deque(maxlen=WINDOW))
        times.append(seconds)
        if (known := summary(times)) is not None:
            self._known[session] = known

    def recover(self, session: str, name: str, rounds: Iterable[RoundRow]) -> None:
        """Estimate arrivals after a restart of the hub by the durations of rounds that had this member.

        The wall clock may have been set in between: impossible durations are left out.
        """
        for row in rounds:
            if name in row.members and 0 < row.committed - row.opened <= self.cap:
                self.note(session, row.committed - row.opened)

    def forget(self, session: str) -> None:
        self._arrivals.pop(session, None)
        self._known.pop(session, None)

    def after_opening(self, missing: Iterable[str], here: Mapping[str, float]) -> float:
        """Return when a round closes, in seconds after its opening; at most the cap.

        Args:
            missing: sessions whose updates are awaited.
            here: session -> seconds after the opening at which its update arrived.
        """
        waited = list(missing)
        if not here or not all(s in self._known for s in waited):
            return self.cap
        known = [self._known[s].median for s in [*waited, *here] if s in self._known]
        if not known:
            return self.cap  # nobody is missing
        overall = median_low(known)
        longest = max((self._known[s].limit(overall) for s in waited), default=0.0)
        return min(self.cap, longest * slowness(here, self._known))
