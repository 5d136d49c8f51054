"""The straggler deadline: when a round closes, computed from earlier arrival times instead of a user's guess.

All times are seconds after the opening of a round. Each member is measured by itself, so a round waits for
one that is slow but steady, and soon misses one that is fast:

    limit of a member   = max(FLOOR, 3 x min(usual, most), min(its median + 6 x its spread, most))
                  usual = its median, or its last arrival if that was later
                  most  = 10 x the median of all members' medians
          of one that missed its last round = max(FLOOR, 1.5 x when its update came then), at most 3 x most
          of a newcomer = max(MOMENT, 3 x the longest median of the trusted), whatever it has missed
    deadline            = the longest limit of the missing x slowness of this round, at most the cap
                          (without those whose limit the account cannot pay)

- The spread is 1.4826 x the median distance from the median (a standard deviation, where times are normal).
- Slowness of a round: the median of arrival / own median over the updates that are here, at least 1.
  Evaluations, larger shares after a loss, or a busy hub slow all members; the last one is not at fault.
- After a restart of the hub the newest rounds in its ledger stand for their members' arrivals.

**The accounts.** Keys are free, so no rule about one member bounds what many cost that never deliver. Waiting
in vain is paid for, by those who have delivered before from one account, by newcomers from another. A member
is *trusted* whose last awaited update came, and who has one in the run. To wait for the trusted costs
nothing: until the last of them is here, or 1.5 of its usual times have passed. What a round waits beyond, and
then closes without those it waited for, is charged. Each account fills by SHARE of the time that passes, and
holds what the longest limit costs, that of members the FLOOR for a few crashes at least. Before anybody is
known both hold FIRST seconds. So members that deliver nothing, however many they are, take SHARE of a run's
time, and who delivers and then stalls takes as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

from transport.ledger import RoundRow

WINDOW = 8  # arrivals remembered per member: two outliers change nothing, four in a row do
KNOWN = 3  # arrivals needed: the first is early (no compute before it) or late (a cold machine)
FLOOR = 2.0  # seconds; below that, a busy scheduler or one lost TCP segment looks like a stall
MOMENT = 0.5  # seconds; a newcomer whose first update comes later sends it at once in its next round
MEDIANS, SPREADS = 3.0, 6.0  # ordinary jitter
BOUND = 10.0  # medians of all that a slow or erratic member may cost
SIGMA = 1.4826  # median distance from the median -> standard deviation
FREE = 1.5  # usual times that a round waits for a trusted member at no cost
SHARE = 0.05  # of a run's time that rounds may wait in vain, for each account
CRASHES = 3  # that rounds wait for in vain, where they are short, before they wait for no late member
FIRST = 60.0  # seconds that they may before any member is known


@dataclass(frozen=True)
class Arrivals:
    """Arrival times of a member's updates, summarised."""

    median: float
    spread: float

    def limit(self, last: float, overall: float) -> float:
        """Return when to give this member up.

        Args:
            last: its last arrival in time.
            overall: the median over the members of their medians.
        """
        most = BOUND * overall
        usual = max(self.median, last)
        return max(FLOOR, MEDIANS * min(usual, most), min(self.median + SPREADS * self.spread, most))


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
        self.trusted: set[str] = set()  # sessions whose last awaited update came, with one in the run
        self.accounts = {True: FIRST, False: FIRST}  # seconds to wait in vain for members, and for newcomers
        self._arrivals: dict[str, deque[float]] = {}  # by session; a missed round is in there as its closing
        self._known: dict[str, Arrivals] = {}
        self._came: dict[str, deque[float]] = {}  # arrivals in time, by session
        self._late: dict[str, float] = {}  # session that missed its last round -> when its report came

    # ---- what is measured ----------------------------------------------------------------------------------

    def note(self, session: str, seconds: float) -> None:
        """Add an arrival: the update came, or the round closed without it."""
        times = self._arrivals.setdefault(session, deque(maxlen=WINDOW))
        times.append(seconds)
        if (known := summary(times)) is not None:
            self._known[session] = known

    def came_late(self, session: str, seconds: float) -> None:
        """Note when the report of a round came that had closed without this member."""
        if session not in self.trusted:
            self._late[session] = seconds

    def recover(self, session: str, name: str, rounds: Iterable[RoundRow]) -> None:
        """Estimate arrivals after a restart of the hub by the durations of rounds that had this member.

        The wall clock may have been set in between: impossible durations are left out.
        """
        for row in rounds:
            if name in row.members and 0 < row.committed - row.opened <= self.cap:
                self.note(session, row.committed - row.opened)
        if session in self._arrivals:
            self._came[session] = deque(self._arrivals[session], WINDOW)
            self.trusted.add(session)

    def forget(self, session: str) -> None:
        for of in (self._arrivals, self._known, self._came, self._late):
            of.pop(session, None)
        self.trusted.discard(session)

    def closed(
        self, seconds: float, missing: Collection[str], here: Mapping[str, float], proven: Collection[str]
    ) -> None:
        """Note how a round has closed, after so many seconds.

        Args:
            missing: sessions without which it closed.
            proven: sessions of `here` that have an update in the run.
        """
        vain = max(0.0, seconds - self._free(missing, here)) if here else 0.0
        pace = self._pace(here)
        known = bool(self._known.keys() & self.trusted)
        most = MEDIANS * BOUND * self._overall([*missing, *here])
        for members, limit in ((True, most if known else FIRST), (False, MEDIANS * pace if known else FIRST)):
            charged = vain if any((s in self._came) is members for s in missing) else 0.0
            least = CRASHES * FLOOR if members else MOMENT
            filled = min(max(least, limit), self.accounts[members] + SHARE * seconds)
            self.accounts[members] = max(0.0, filled - charged)
        for session in missing:
            self.note(session, seconds)
            self.trusted.discard(session)
            self._late.pop(session, None)
        for session, at in here.items():
            self.note(session, at)
            self._came.setdefault(session, deque(maxlen=WINDOW)).append(at)
            self._late.pop(session, None)
            if session in proven:
                self.trusted.add(session)

    # ---- what follows --------------------------------------------------------------------------------------

    def after_opening(self, missing: Collection[str], here: Mapping[str, float]) -> float:
        """Return when a round closes, in seconds after its opening; at most the cap.

        Args:
            missing: sessions whose updates are awaited.
            here: session -> seconds after the opening at which its update arrived.
        """
        if not here or not missing:
            return self.cap  # nothing to close with, or nobody is missing
        overall = self._overall([*missing, *here])
        slow, pace, free = slowness(here, self._known), self._pace(here), self._free(missing, here)
        limits = ((s in self._came, slow * self._limit(s, overall, pace)) for s in missing)
        paid = [limit for member, limit in limits if limit <= free + self.accounts[member]]
        return min(self.cap, max([free, *paid]))

    def _overall(self, sessions: Iterable[str]) -> float:
        """Return the median over the members of their medians; 0: nobody is known."""
        known = [self._known[s].median for s in sessions if s in self._known]
        return median_low(known) if known else 0.0

    def _pace(self, here: Mapping[str, float]) -> float:
        """Return how long those take that deliver: usually, or in this round where nobody is known."""
        usual = [median(self._came[s]) for s in self.trusted if s in self._known]
        return max(usual) if usual else max(here.values(), default=0.0)

    def _limit(self, session: str, overall: float, pace: float) -> float:
        if session not in self._came or session not in self._known:
            first = MOMENT if self._known.keys() & self.trusted else FIRST / 2
            return max(first, MEDIANS * pace)
        if (late := self._late.get(session)) is not None:
            return max(FLOOR, min(FREE * late, MEDIANS * BOUND * overall))
        return self._known[session].limit(self._came[session][-1], overall)

    def _free(self, missing: Collection[str], here: Mapping[str, float]) -> float:
        """Return until when waiting costs nothing."""
        arrived = [at for session, at in here.items() if session in self.trusted] or [*here.values()]
        usual = (max(median(c := self._came[s]), c[-1]) for s in self.trusted.intersection(missing))
        awaited = min(max(usual, default=0.0), BOUND * self._overall([*missing, *here]))
        return max(*arrived, FREE * slowness(here, self._known) * awaited)

    def patience(self, missing: Iterable[str]) -> float | None:
        """Return when to give up a round of which no update is here, and none of a trusted member is to come;
        None: one is to come, or nobody is trusted."""
        if not self.trusted or self.trusted.intersection(missing):
            return None
        return min(self.cap, max(FLOOR, MEDIANS * self._pace({})))

    @property
    def ten_rounds(self) -> float:
        """Return the seconds in which those that deliver would have done so ten times; the cap at most."""
        return min(self.cap, max(BOUND * FLOOR, BOUND * self._pace({})))
