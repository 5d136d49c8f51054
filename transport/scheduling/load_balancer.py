"""Shares of a global batch: samples for each peer that it computes in the same time.

    cost    of a sample: its compute, where samples differ in length; else 1
    speed   cost of a lease / seconds its gradient took; the median of the last WINDOW
    share   cost of the batch x speed / all speeds, in whole samples

Equal samples are shared by number: rounded down, and each of the remaining ones to the peer that would then
finish first. Unequal samples go one by one, the costliest first, to the peer that lacks most of its share, as
ByteScale (Ge et al., 2025) balances sequences.

- Peers report their seconds. A peer that reports too few gets more samples and a larger weight in the mean,
  so no speed counts for more than MOST times the median.
- With fewer samples than peers, each peer has its turn; otherwise those without would never be measured.
- A newcomer's speed is unknown, so its first leases are one sample each, among the cheapest.
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
from itertools import accumulate, pairwise
from math import ceil
from statistics import median, median_high

WINDOW = 3  # leases: one odd time does not move a share
MOST = 8.0  # x the median
SLOW = 0.2  # of the median


@dataclass(frozen=True)
class Portion:
    """One member's share."""

    samples: tuple[int, ...]  # places in the batch, ascending
    spans: int = 1  # rounds that its lease lasts


class LoadBalancer:
    """Shares of the global batch, from each session's measured speed in cost a second."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def note(self, session: str, cost: float, seconds: float) -> None:
        """Measure a session: it computed the gradient of samples of this cost in `seconds`."""
        if cost > 0 and seconds > 0:
            self._times.setdefault(session, deque(maxlen=WINDOW)).append(cost / seconds)

    def forget(self, session: str) -> None:
        self._times.pop(session, None)

    def portions(
        self, costs: Sequence[float], sessions: Sequence[str], round: int, longest: int
    ) -> list[Portion]:
        """Divide the samples of a batch among `sessions`, in their order.

        Args:
            costs: of each sample.
            longest: maximum rounds that a lease lasts.
        """
        known = {s: median(self._times[s]) for s in sessions if s in self._times}
        if len(costs) < len(sessions):
            counts = split(len(costs), [1.0] * len(sessions), round)
            return [Portion(places) for places in in_turn(range(len(costs)), counts)]
        middle = median_high(known.values()) if known else 1.0
        speeds = {s: min(speed, MOST * middle) for s, speed in known.items()}
        spans = {s: span(speeds, s, middle, len(costs), longest) if s in speeds else 1 for s in sessions}
        takers = [s for s in sessions if s in known] or list(sessions)
        new = [s for s in sessions if s not in takers][: max(0, len(costs) - 1)]
        cheapest = sorted(range(len(costs)), key=costs.__getitem__)[: len(new)]
        rest = [place for place in range(len(costs)) if place not in set(cheapest)]
        capacities = [speeds.get(s, 1.0) * spans[s] for s in takers]
        shares = divide([costs[place] for place in rest], capacities, round)
        given = {s: tuple(rest[i] for i in share) for s, share in zip(takers, shares, strict=True)}
        given |= {s: (place,) for s, place in zip(new, cheapest, strict=True)}
        return [Portion(given.get(s, ()), spans[s] if given.get(s) else 1) for s in sessions]


def span(speeds: Mapping[str, float], session: str, middle: float, batch: int, longest: int) -> int:
    """Return how many rounds this peer's lease lasts."""
    part = speeds[session] / middle
    if part >= SLOW or longest < 2 or not batch:
        return 1
    share = batch * speeds[session] / sum(speeds.values())
    return min(longest, ceil(max(SLOW / part, 1 / share)))


def divide(costs: Sequence[float], speeds: Sequence[float], round: int) -> list[tuple[int, ...]]:
    """Divide samples into parts whose costs are in proportion to the speeds; returns the places of each."""
    if not costs or min(costs) == max(costs):
        return in_turn(range(len(costs)), split(len(costs), speeds, round))
    a_second = sum(costs) / sum(speeds)
    lacking = [(-a_second * speed, (i - round) % len(speeds), i) for i, speed in enumerate(speeds)]
    heapify(lacking)
    parts = [list[int]() for _ in speeds]
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        share, turn, i = lacking[0]
        parts[i].append(place)
        heapreplace(lacking, (share + costs[place], turn, i))
    return [tuple(sorted(part)) for part in parts]


def in_turn(places: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Give each part so many places, one part after the other."""
    ends = [0, *accumulate(counts)]
    return [tuple(places[start:stop]) for start, stop in pairwise(ends)]


def split(batch: int, speeds: Sequence[float], round: int) -> list[int]:
    """Divide a number of samples into whole parts in proportion to the speeds; ties rotate with the round."""
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
