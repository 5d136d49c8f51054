"""Leases of samples. Every sample is in exactly one place: the pool, one lease, or counted.

    pool --grant--> held --claim--> claimed --count--> counted
      ^---revoke-----'  <--refuse---'

A *lease* holds the samples of one session in one round. An arrived update *claims* the leases that it
reports as delivered. Claimed leases wait for the commit even if their session ends: the work is here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from transport.protocol import SamplePool, SampleRanges, count_samples, minus


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
        return len(self._pool)

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
