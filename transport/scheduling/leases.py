"""Leases of samples. Every sample is in exactly one place: the pool, one lease, or counted.

    pool --grant--> held --claim--> claimed --count--> counted
      ^---revoke-----'  <--refuse---'

A *lease* holds the samples of one session in one round. An arrived update *claims* the leases that it
reports as delivered. Claimed leases wait for the commit even if their session ends: the work is here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from transport.protocol import SamplePool, SampleRanges, count_samples


@dataclass
class Lease:
    ids: SampleRanges
    claimed: bool = False


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
        return len(self._pool)

    @property
    def done(self) -> bool:
        return self.counted == self.total

    def restore(self, session: str, round: int, ids: SampleRanges) -> None:
        """Restore a lease that was granted before the hub restarted."""
        rest = SamplePool()
        for free in self._pool.ranges:
            rest.put(minus(free, ids))
        if len(rest) + count_samples(ids) != len(self._pool):
            raise ValueError(f"lease {round} of a session holds samples that are not free: {ids}")
        self._pool = rest
        self._leases.setdefault(session, {})[round] = Lease(ids)

    def of(self, round: int, sessions: Iterable[str]) -> dict[str, SampleRanges]:
        """Return leases of this round that exist already: it is opened again, or the hub restarted."""
        return {s: lease.ids for s in sessions if (lease := self._leases.get(s, {}).get(round))}

    def grant(self, round: int, shares: Mapping[str, int]) -> dict[str, SampleRanges]:
        """Lease each session its share of samples for `round`, in this order, until the pool is empty."""
        granted = dict[str, SampleRanges]()
        for session, share in shares.items():
            if ids := self._pool.take(share):
                self._leases.setdefault(session, {})[round] = Lease(ids)
                granted[session] = ids
        return granted

    def held(self, session: str) -> list[int]:
        """Return the rounds whose leases this session holds unclaimed."""
        return sorted(r for r, lease in self._leases.get(session, {}).items() if not lease.claimed)

    def ids(self, session: str, round: int) -> SampleRanges | None:
        lease = self._leases.get(session, {}).get(round)
        return None if lease is None else lease.ids

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


def minus(run: tuple[int, int], runs: SampleRanges) -> SampleRanges:
    """Subtract `runs` from one run."""
    left, at = [], run[0]
    for start, stop in runs:
        if stop <= at or start >= run[1]:
            continue
        if start > at:
            left.append((at, start))
        at = max(at, stop)
    if at < run[1]:
        left.append((at, run[1]))
    return tuple(left)
