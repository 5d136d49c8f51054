"""The work of a round: leases of samples, shares of the batch, and the rung. Every sample is in exactly one
place: the pool, one lease, or counted.

    pool --grant--> held --claim--> claimed --count--> counted
      ^---revoke-----'  <--refuse---'

A *lease* holds the samples of one session in one round. An arrived update *claims* the leases that it
reports as delivered. Claimed leases wait for the commit even if their session ends: the work is here.

**Shares** of a global batch: samples for each peer that it computes in the same time.

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

**The rung** of a round: the setting that all its members share. It follows from what their lines carry, and
from how many they are.

    need of a peer    local steps whose compute an exchange of the recipe's own packets takes on its own line
                      (bandwidth_budget.py); the same on whatever rung
    need of a round   the smallest that is enough for all peers but OUTLIERS of the work
    of a block        the medians of needs and members in its BLOCK rounds

A rung *fits* if the need is at most its own, and members are at least its `peers`, or STAY of them where the
run is on it. Of rungs in order of bytes, those behind one that fits do, too. After each block the run

- goes to the first rung that fits, where its own does not; but H at most doubles;
- goes back to the first rung that would fit with a need of 1 / SPARE of this one and all its `peers`.

So

- with steady lines and members it comes to rest, also where needs vary by less than 1 / SPARE: what makes it
  leave a rung and what makes it come back are further apart than that;
- the rung follows from the one before, need and members, and is monotone in all three. Blocks end at the same
  rounds in every run. So lines that carry more, or more members, never lead to a later rung;
- it is back within two blocks after a change of lines, where H is the same;
- a round takes at most twice as long as the one before it, which the straggler deadline allows for;
- all of it is in the ledger, so a restarted hub, and who verifies the run, find the same rungs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import ceil
from statistics import median, median_high, median_low

from transport.protocol import Rung, SamplePool, SampleRanges, count_samples, minus


@dataclass
class Lease:
    ids: SampleRanges
    claimed: bool = False  # delivered by an update that waits for its commit


class Leases:
    """The samples 0 .. total-1 of a run."""

    def __init__(self, total: int, counted: SampleRanges = ()) -> None:
        self.total = total
        self.counted = count_samples(counted)
        self._pool = SamplePool(minus((0, total), counted))
        self._leases: dict[str, dict[int, Lease]] = {}  # session -> round -> lease

    @property
    def free(self) -> int:
        """Count the samples in the pool."""
        return self._pool.size

    @property
    def done(self) -> bool:
        return self.counted == self.total

    def of(self, round: int, sessions: Iterable[str]) -> dict[str, SampleRanges]:
        """Return leases of this round that exist already: it is opened again, or the hub restarted."""
        return {s: lease.ids for s in sessions if (lease := self._leases.get(s, {}).get(round))}

    def next(self, count: int) -> list[int]:
        """Return the samples that are leased next, lowest ids first."""
        return self._pool.lowest(count)

    def grant(self, round: int, shares: Mapping[str, SampleRanges]) -> None:
        """Lease each session its samples for `round`; or restore leases from before the hub restarted.

        Raises ValueError where a sample is not in the pool.
        """
        self._pool.remove(tuple(sorted(run for ids in shares.values() for run in ids)))
        for session, ids in shares.items():
            self._leases.setdefault(session, {})[round] = Lease(ids)

    def held(self, session: str) -> list[int]:
        """Return the rounds whose leases this session holds unclaimed."""
        return sorted(r for r, lease in self._leases.get(session, {}).items() if not lease.claimed)

    def ids(self, session: str, round: int) -> SampleRanges | None:
        lease = self._leases.get(session, {}).get(round)
        return None if lease is None else lease.ids

    def claimed(self, session: str, round: int) -> SampleRanges:
        """Return the samples of a lease that an arrived update delivers."""
        lease = self._leases[session][round]
        assert lease.claimed
        return lease.ids

    def claim(self, session: str, rounds: Iterable[int]) -> list[int]:
        """Claim the leases of `rounds` for an arrived update. Returns those that its session holds."""
        mine = self._leases.get(session, {})
        good = [r for r in sorted(set(rounds)) if r in mine and not mine[r].claimed]
        for r in good:
            mine[r].claimed = True
        return good

    def count(self, session: str, rounds: Iterable[int]) -> None:
        """Count the samples of a committed update, for good."""
        for r in rounds:
            lease = self._leases[session].pop(r)
            assert lease.claimed
            self.counted += count_samples(lease.ids)
        self._forget(session)

    def refuse(self, session: str, rounds: Iterable[int], *, here: bool = True) -> None:
        """Release the claims of an update that was not committed; its session, if here, keeps the leases."""
        for r in rounds:
            self._leases[session][r].claimed = False
        if not here:
            self.revoke(session)

    def settle(self, claims: dict[str, list[int]], counted: Container[str], sessions: Container[str]) -> None:
        """End a round: count the claims of sessions in `counted`, release the others. `sessions`: live."""
        for session, rounds in claims.items():
            if session in counted:
                self.count(session, rounds)
            else:
                self.refuse(session, rounds, here=session in sessions)
        claims.clear()

    def give_back(self, session: str, round: int) -> int:
        """Return one unclaimed lease to the pool. Returns how many samples it had."""
        lease = self._leases[session].pop(round)
        assert not lease.claimed
        self._pool.put(lease.ids)
        self._forget(session)
        return count_samples(lease.ids)

    def revoke(self, session: str) -> int:
        """Return an ended session's unclaimed leases to the pool. Returns how many samples they had."""
        return sum(self.give_back(session, r) for r in self.held(session))

    def _forget(self, session: str) -> None:
        if not self._leases.get(session, True):
            del self._leases[session]

    def places(self) -> tuple[int, int, int]:
        """Count samples in the pool, in leases, and counted ones; they always sum to the total."""
        leased = sum(count_samples(lease.ids) for mine in self._leases.values() for lease in mine.values())
        return self.free, leased, self.counted


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


BLOCK = 5  # rounds: most of the arrivals that a straggler deadline remembers are then of the newest H
SPARE = 0.8  # of a rung's need
STAY = 0.75  # of a rung's peers
OUTLIERS = 0.25  # of the samples of a round


@dataclass(frozen=True)
class Ladder:
    """The rung of a run's next round; immutable, each committed round gives the next one."""

    rungs: tuple[Rung, ...]  # needs ascend, peers descend; a single one is never left
    at: int  # the place of the rung
    needs: tuple[float, ...] = ()  # of the rounds of this block, as far as known
    members: tuple[int, ...] = ()  # of the same rounds

    @classmethod
    def of(cls, rungs: tuple[Rung, ...]) -> Ladder:
        """Begin on the first rung that is for any number of members."""
        return cls(rungs, next(at for at, rung in enumerate(rungs) if rung.peers == 1))

    @property
    def steps(self) -> int:
        """Return H."""
        return self.rungs[self.at].local_steps

    def committed(self, round: int, need: float, members: int) -> Ladder:
        """Note a round: its need, 0: not known, and its members. The last one of a block may end the rung."""
        needs = (*self.needs, need) if need > 0 else self.needs
        counts = (*self.members, members) if need > 0 else self.members
        if (round + 1) % BLOCK:
            return replace(self, needs=needs, members=counts)
        known = 2 * len(needs) > BLOCK
        return Ladder(self.rungs, self._after(median_low(needs), median_low(counts)) if known else self.at)

    def _after(self, need: float, members: int) -> int:
        stays = self._first(need, members / STAY)
        returns = self._first(need / SPARE, members)
        to = min(max(self.at, stays), returns)
        while self.rungs[to].local_steps > 2 * self.steps:
            to -= 1
        return to

    def _first(self, need: float, members: float) -> int:
        """Return the place of the first rung that fits; of the last one, where none does."""
        fits = (at for at, rung in enumerate(self.rungs) if need <= rung.need and members >= rung.peers)
        return next(fits, len(self.rungs) - 1)


def need_of_round(peers: Iterable[tuple[float, int]]) -> float:
    """Return the need of a round from (need, samples) of its peers; 0: not known.

    Peers whose own need is not known have no say.
    """
    known = sorted((need, samples) for need, samples in peers if need > 0 and samples > 0)
    above = sum(samples for _, samples in known)
    allowed = OUTLIERS * above
    for need, samples in known:
        above -= samples
        if above <= allowed:
            return need
    return 0.0
