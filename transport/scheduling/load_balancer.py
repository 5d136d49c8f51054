"""Shares of a global batch: as many samples for each peer as it computes in the same time.

    speed   samples of a lease / seconds its gradient took; the median of the last WINDOW
    share   batch x speed / all speeds, in whole samples: rounded down; the remaining ones go, one by one,
            to the peer that would then finish first

- Peers report their seconds. A peer that reports too few gets more samples and a larger weight in the mean,
  so no speed counts for more than MOST times the median.
- With fewer samples than peers, each peer has its turn; otherwise those without would never be measured.
- A newcomer's speed is unknown, so its first leases are one sample each.
- A peer slower than SLOW of the median takes part every n-th round, with a lease that lasts n rounds. In
  between it is no member, no round waits for it, and it keeps its residual. In n rounds it computes what
  a peer at SLOW computes in one, and at least one sample.
- Part of a lease's time is fixed. Shares that follow samples / seconds still converge to equal times: a new
  share is the old one x time of all / own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from math import ceil
from statistics import median, median_high

WINDOW = 3  # leases: one odd time does not move a share
MOST = 8.0  # x the median
SLOW = 0.2  # of the median


@dataclass(frozen=True)
class Portion:
    """One member's share."""

    samples: int
    spans: int = 1  # rounds that its lease lasts


class LoadBalancer:
    """Shares of the global batch, from each session's measured speed in samples a second."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def note(self, session: str, samples: int, seconds: float) -> None:
        """Measure a session: it computed the gradient of `samples` in `seconds`."""
        if samples > 0 and seconds > 0:
            self._times.setdefault(session, deque(maxlen=WINDOW)).append(samples / seconds)

    def forget(self, session: str) -> None:
        self._times.pop(session, None)

    def portions(self, batch: int, sessions: Sequence[str], round: int, longest: int) -> list[Portion]:
        """Divide `batch` samples among `sessions`, in their order; a lease lasts at most `longest` rounds."""
        known = {s: median(self._times[s]) for s in sessions if s in self._times}
        if not known or batch < len(sessions):
            return [Portion(n) for n in split(batch, [1.0] * len(sessions), round)]
        middle = median_high(known.values())
        speeds = {s: min(speed, MOST * middle) for s, speed in known.items()}
        spans = {s: 1 if s not in speeds else span(s, speeds, middle, batch, longest) for s in sessions}
        new = min(len(sessions) - len(known), max(0, batch - 1))  # with one sample each, while there are any
        takers = [s for s in sessions if s in known]
        shares = split(batch - new, [speeds[s] * spans[s] for s in takers], round)
        given = dict(zip(takers, shares, strict=True))
        for s in [s for s in sessions if s not in known][:new]:
            given[s] = 1
        return [Portion(given.get(s, 0), spans[s] if given.get(s, 0) else 1) for s in sessions]


def span(session: str, speeds: Mapping[str, float], middle: float, batch: int, longest: int) -> int:
    """Return how many rounds this peer's lease lasts."""
    part = speeds[session] / middle
    if part >= SLOW or longest < 2 or not batch:
        return 1
    share = batch * speeds[session] / sum(speeds.values())
    return min(longest, ceil(max(SLOW / part, 1 / share)))


def split(batch: int, speeds: Sequence[float], round: int) -> list[int]:
    """Divide `batch` into whole parts in proportion to the speeds; ties rotate with the round."""
    total, count = sum(map(Fraction, speeds)), len(speeds)
    parts = [int(batch * Fraction(speed) / total) for speed in speeds]
    done = [
        ((n + 1) / speed, (i - round) % count, i)
        for i, (n, speed) in enumerate(zip(parts, speeds, strict=True))
    ]
    heapify(done)
    for _ in range(batch - sum(parts)):
        _, turn, i = done[0]
        parts[i] += 1
        heapreplace(done, ((parts[i] + 1) / speeds[i], turn, i))
    return parts
