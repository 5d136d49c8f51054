"""How long a round waits for whom: reckoned from when updates arrived before, not from what a user guessed.

All times are seconds after the opening of a round. Each member is measured by itself, so one that is slow but
steady is waited for, and one that is fast is missed early:

    limit of a member = max(FLOOR, 3 x its median, min(its median + 6 x its spread, 10 x the members' median))
    deadline          = the longest limit of those still missing x how slow this round is; at most the cap

- The spread is 1.4826 x the median distance from the median (a standard deviation, where times are normal).
  What is left of it for an erratic member is bounded by the pace of all; its own 3 medians are not.
- How slow this round is: the median of arrival / own median of those who are here, at least 1. Evaluations,
  larger shares after a loss, a hub that was busy: they slow everybody, and are not the fault of the last.
- A member with fewer than KNOWN arrivals is waited for up to the cap: nobody knows its pace yet.
- After a restart of the hub the last rounds in its ledger stand for the arrivals of those who were in them.
- A missed round counts as an arrival when it closed, the least it can have been. So a member that has become
  slower is believed after half a WINDOW of misses; its limit then grows threefold, and again if need be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

from transport.ledger import RoundRow

WINDOW = 8  # arrivals remembered per member: two of them may be odd, four in a row are its new pace
KNOWN = 3  # arrivals that make a pace: the first comes early (no compute before it) or late (a cold machine)
FLOOR = 2.0  # seconds; below, a busy scheduler or one lost TCP segment looks like a stall
MEDIANS, SPREADS = 3.0, 6.0  # jitter that is ordinary
BOUND = 10.0  # medians of all that an erratic member may cost
SIGMA = 1.4826  # median distance from the median -> standard deviation


@dataclass(frozen=True)
class Habit:
    """When a member's updates come."""

    median: float
    spread: float

    def limit(self, overall: float) -> float:
        """When this member is given up. `overall`: the median over the members of their medians."""
        erratic = min(self.median + SPREADS * self.spread, BOUND * overall)
        return max(FLOOR, MEDIANS * self.median, erratic)


def habit(arrivals: Iterable[float]) -> Habit | None:
    """What a member's last arrivals say; None: too few to say anything."""
    times = list(arrivals)
    if len(times) < KNOWN:
        return None
    middle = median_high(times)
    return Habit(middle, SIGMA * median_high(abs(t - middle) for t in times))


def slowness(here: Mapping[str, float], habits: Mapping[str, Habit]) -> float:
    """How many times as long as usual those took who are here; at least 1."""
    usual = FLOOR / MEDIANS  # shorter times say more about this computer than about the round
    ratios = [at / max(usual, habits[s].median) for s, at in here.items() if s in habits]
    return max(1.0, median(ratios)) if ratios else 1.0


class StragglerDeadline:
    """Deadlines from the arrival times of each session. A peer in a new session is measured anew."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._arrivals: dict[str, deque[float]] = {}  # by session
        self._habits: dict[str, Habit] = {}

    def note(self, session: str, seconds: float) -> None:
        """An update came, or a round closed without it, so long after its opening."""
        times = self._arrivals.setdefault(session, deque(maxlen=WINDOW))
        times.append(seconds)
        if (known := habit(times)) is not None:
            self._habits[session] = known

    def recover(self, session: str, name: str, rounds: Iterable[RoundRow]) -> None:
        """After a restart of the hub: rounds that this peer was a member of took no less than its update did.

        By wall clocks, which may have been set meanwhile: what cannot be is left out.
        """
        for row in rounds:
            if name in row.members and 0 < row.committed - row.opened <= self.cap:
                self.note(session, row.committed - row.opened)

    def forget(self, session: str) -> None:
        self._arrivals.pop(session, None)
        self._habits.pop(session, None)

    def after_opening(self, missing: Iterable[str], here: Mapping[str, float]) -> float:
        """Return when a round closes, in seconds after its opening; at most the cap.

        Args:
            missing: sessions whose updates are awaited.
            here: session -> seconds after the opening at which its update arrived.
        """
        waited = list(missing)
        if not here or not all(s in self._habits for s in waited):
            return self.cap
        known = [self._habits[s].median for s in [*waited, *here] if s in self._habits]
        if not known:
            return self.cap  # nobody is missing
        overall = median_low(known)
        longest = max((self._habits[s].limit(overall) for s in waited), default=0.0)
        return min(self.cap, longest * slowness(here, self._habits))
