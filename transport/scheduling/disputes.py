"""Disagreements about x', the global model: who says which fingerprint, and what the ledger says.

x' of a round follows from the base model and the packets before it, so a replay of the ledger decides, and
nothing else: keys are free, and a majority of members may be one person. A replay can take minutes. Until
then the round goes on with those of whom the run has most updates, and the others wait. That choice is no
judgement: packets alone move x', so the update of a liar is at most a bad update.

    agreed      all who have reported a round say the same
    disputed    they do not, or one contradicts what was agreed: a replay is asked for
    proven      a replay has told: who said something else is dropped

Replays take a tenth of the time at most, all together. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

REST = 9.0  # times as long as a replay took, until the next one begins
REMEMBERED = 64  # rounds before the newest whose fingerprints are kept


@dataclass(frozen=True)
class Agreed:
    """The fingerprint of x' of a round, as far as it is known."""

    fingerprint: int
    keys: int = 1  # of those who have reported it
    proven: bool = False  # a replay has told


@dataclass(frozen=True)
class Verdict:
    """The result of a replay, or of the lack of one."""

    round: int
    truth: int | None  # None: the replay has failed
    before: Agreed | None  # what was agreed
    claims: dict[str, int]  # what was said, by session

    @property
    def false(self) -> set[str]:
        """Sessions that have said something else: than the replay, or where it failed than was agreed."""
        right = self.truth
        if right is None:
            right = self.before.fingerprint if self.before is not None else None
        return {session for session, said in self.claims.items() if said != right}

    @property
    def differs_from_all(self) -> bool:
        """True where several have agreed on what is false, and nobody says what the replay says."""
        agreed = self.before is not None and self.before.keys > 1 and self.before.fingerprint != self.truth
        return self.truth is not None and agreed and self.truth not in self.claims.values()


class Disputes:
    """Fingerprints of x' by round, and who waits for a replay."""

    def __init__(self, agreed: Mapping[int, int]) -> None:
        self._agreed = {round: Agreed(said) for round, said in agreed.items()}
        self._claims: dict[int, dict[str, int]] = {}  # of disputed rounds: session -> fingerprint
        self._goes_on: dict[int, int] = {}  # by disputed round: who says this does not wait
        self._replaying: int | None = None  # the round that is replayed now
        self._began = self._next_at = 0.0

    def reported(self, round: int, reports: Mapping[str, int], work: Mapping[str, int]) -> set[str]:
        """Take what members report of x' of a round. Returns the sessions that have to wait for a replay.

        Args:
            work: updates of each of these sessions in the run.
        """
        camps: dict[int, list[str]] = {}
        for session, said in reports.items():
            camps.setdefault(said, []).append(session)
        known = self._agreed.get(round)
        if len(camps) == 1 and (known is None or known.fingerprint in camps):
            return set()
        goes_on = (
            known.fingerprint if known is not None and (known.proven or known.fingerprint in camps) else None
        )
        if goes_on is None:
            goes_on = max(camps, key=lambda said: (sum(work[s] for s in camps[said]), len(camps[said]), said))
        self._claims.setdefault(round, {}).update(reports)
        self._goes_on[round] = goes_on
        return {session for session, said in reports.items() if said != goes_on}

    def claims(self, session: str, round: int, fingerprint: int) -> bool:
        """Take what a newcomer says of x' of a round. Returns whether it has to wait for a replay."""
        known = self._agreed.get(round)
        if known is None or known.fingerprint == fingerprint:
            return False
        self._claims.setdefault(round, {})[session] = fingerprint
        self._goes_on[round] = known.fingerprint
        return True

    def known(self, round: int) -> int | None:
        """Return the fingerprint of a round that nobody disputes; None: it is not known."""
        found = self._agreed.get(round)
        return found.fingerprint if found is not None and round not in self._claims else None

    def agree(self, round: int, fingerprint: int, keys: int) -> None:
        """Note what so many members have agreed on, with their updates in the run."""
        old = self._agreed.get(round)
        if round not in self._claims and (old is None or not old.proven):
            self._agreed[round] = Agreed(fingerprint, max(keys, old.keys if old is not None else 0))
        for past in [r for r in self._agreed if r < round - REMEMBERED]:
            del self._agreed[past]

    def waits(self, session: str) -> bool:
        """Tell whether a session waits for a replay."""
        return any(said.get(session, on := self._goes_on[r]) != on for r, said in self._claims.items())

    def gone(self, session: str) -> None:
        """Forget what an ended session has said."""
        for claims in self._claims.values():
            claims.pop(session, None)

    def next_replay(self, now: float) -> int | None:
        """Begin the next replay, if one is due; return its round."""
        self._claims = {r: said for r, said in self._claims.items() if said or r == self._replaying}
        if self._replaying is not None or now < self._next_at or not self._claims:
            return None
        self._replaying, self._began = min(self._claims), now
        return self._replaying

    def replayed(self, truth: int | None, now: float) -> Verdict:
        """Take the result of the replay; None: it has failed."""
        assert self._replaying is not None
        round, self._replaying = self._replaying, None
        self._next_at = now + REST * (now - self._began)
        verdict = Verdict(round, truth, self._agreed.get(round), self._claims.pop(round, {}))
        self._goes_on.pop(round, None)
        if truth is not None:
            self._agreed[round] = Agreed(truth, proven=True)
        return verdict

    def deadline(self) -> float:
        """Return when the next replay is due. inf: none is."""
        return self._next_at if self._replaying is None and any(self._claims.values()) else inf
