"""The uploads that a hub accepts: the update of the open round, a leaver's handoff, a few trials, from which
a newcomer measures its line, and what its extensions take.
"""

from __future__ import annotations

from collections.abc import Iterable

from transport import actions as do
from transport.actions import Outbox
from transport.membership import Roster, Session, SessionEvent, State
from transport.protocol import HANDOFF, TRIAL, UPDATE, RunSettings, round_of
from transport.scheduling import Phase, Rounds, UploadKind

TRIALS, LONGEST = 4, 4 << 20  # of a session; bytes of each


class UploadPolicy:
    """Decides which uploads of a session are wanted now."""

    def __init__(self, settings: RunSettings, out: Outbox, members: Roster, rounds: Rounds) -> None:
        self.settings, self._out, self._members, self._rounds = settings, out, members, rounds
        self._kinds: dict[str, UploadKind | None] = dict.fromkeys((UPDATE, HANDOFF, TRIAL))  # by prefix

    def add(self, kinds: Iterable[UploadKind]) -> None:
        """Take these uploads too."""
        self._kinds |= {prefix_of(kind.form): kind for kind in kinds}

    def known(self, name: str) -> bool:
        """Tell whether there are uploads whose names begin as this one does."""
        return prefix_of(name) in self._kinds

    def kind_of(self, name: str) -> UploadKind | None:
        """Return the kind of an extension's upload; None: it is no extension's."""
        return self._kinds.get(prefix_of(name))

    def refusal(self, session_id: str, name: str, size: int) -> str | None:
        """Return why this upload is not wanted, or None. One beyond the size limit ends its session."""
        session = self._members.get(session_id)
        if session is None:
            return "the session is over"
        if round_of(TRIAL, name) is not None:
            return self._trial(session, size)
        leaves, kind = round_of(HANDOFF, name) is not None, self.kind_of(name)
        if kind is not None and (places := kind.places(name)) is not None:
            reason = kind.refusal(session, places)
        else:
            reason = self._handoff(session) if leaves else self._update(session, name)
        if reason is None:
            reason = self._within(session, size, kind.largest if kind is not None else 0)
        if reason is None and leaves and session.state is not State.BEHIND:
            self._members.move(session, SessionEvent.LEAVING)
        return reason

    def _within(self, session: Session, size: int, largest: int) -> str | None:
        """Return None for an upload within the limit; another one ends its session."""
        if size <= (limit := max(largest, self.settings.update_limit)):
            return None
        reason = f"its upload has {size} bytes, the limit of this run is {limit}"
        self._members.kick(session, "kicked", reason)
        return reason

    def handed_over(self, session_id: str, size: int) -> None:
        """Merge a handoff that is here, whole, with the weight that the peer's packets had."""
        session = self._members.get(session_id)
        if session is not None and session.share is not None and self._handoff(session) is None:
            session.handoff = size
            self._out.add(do.Inherit(session.id, session.name, session.share))

    def _update(self, session: Session, name: str) -> str | None:
        round = round_of(UPDATE, name)
        if round is None:
            return f"nothing of the name {name!r} is wanted"
        ex = self._rounds.open_to(session.id, round)
        if ex is None:
            return f"round {round} is not open to this peer, or is closed"
        return "it is here already" if session.id in ex.uploads else None

    def _handoff(self, session: Session) -> str | None:
        if self._rounds.ending or self._rounds.phase is Phase.FINAL:
            return "the run is ending: there is no round left to carry it"
        if session.share is None:
            return "no packet of this session is in the run"
        return "it is here already" if session.handoff else None

    def _trial(self, session: Session, size: int) -> str | None:
        if session.trials == TRIALS or size > LONGEST:
            return f"a session may try its line {TRIALS} times, with {LONGEST} bytes each"
        session.trials += 1
        return None


def prefix_of(name: str) -> str:
    """Return the first word of a name, with its slash."""
    return f"{name.partition('/')[0]}/"
