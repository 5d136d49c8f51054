"""The samples that a parent has leased to an inner hub, under numbers of the inner hub's own.

A parent's lease is known by its round, a sample in it by its position: only the root knows sample ids.
Numbers are never used twice, also not after a restart, so the inner hub's ledger counts each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transport.protocol import SampleRanges, ranges_of

from .inner_work import LeasedSample

NUMBERS = 1 << 40  # of one start of an inner hub: more samples than it can see
TOTAL = 1 << 62  # samples that an inner hub's ledger has room for


class ParentLeases:
    """Leases of the present session with the parent. `term`: of the inner hub's ledger."""

    def __init__(self, term: int) -> None:
        self._next = term * NUMBERS
        self._leases: dict[int, tuple[int, Sequence[LeasedSample]]] = {}  # round -> first number, samples
        self._done: dict[int, set[int]] = {}  # round -> positions whose work is in d_h
        self._rounds: dict[int, int] = {}  # number -> round

    def add(self, round: int, samples: Sequence[LeasedSample]) -> SampleRanges:
        """Add a lease; returns the numbers of its samples."""
        first, self._next = self._next, self._next + len(samples)
        self._leases[round] = first, samples
        self._rounds |= dict.fromkeys(range(first, self._next), round)
        return ((first, self._next),) if samples else ()

    def sample(self, number: int) -> LeasedSample | None:
        """Return a sample; None: its lease is over."""
        round = self._rounds.get(number)
        if round is None:
            return None
        first, samples = self._leases[round]
        return samples[number - first]

    def trained(self, numbers: Iterable[int]) -> None:
        """Note that the work on these samples is in d_h. Those whose lease is over count for nobody: the
        parent has leased them to others."""
        for number in numbers:
            if (round := self._rounds.get(number)) is not None:
                self._done.setdefault(round, set()).add(number - self._leases[round][0])

    def delivered(self) -> tuple[list[int], dict[int, SampleRanges]]:
        """Return the rounds whose leases the next packet delivers, and the positions where not all."""
        positions = {round: ranges_of(sorted(done)) for round, done in sorted(self._done.items())}
        whole = {r for r in positions if len(self._done[r]) == len(self._leases[r][1])}
        return list(positions), {r: found for r, found in positions.items() if r not in whole}

    def accepted(self, rounds: Iterable[int]) -> None:
        """End the leases that a packet of this hub has delivered."""
        for round in rounds:
            self._end(round)

    def ended_before(self, round: int) -> None:
        """End the leases of earlier rounds: the parent has taken them back."""
        for old in [r for r in self._leases if r < round]:
            self._end(old)

    def clear(self) -> None:
        """End all leases: they were of a session that is over."""
        self.ended_before(TOTAL)

    def _end(self, round: int) -> None:
        first, samples = self._leases.pop(round, (0, ()))
        self._done.pop(round, None)
        for number in range(first, first + len(samples)):
            del self._rounds[number]
