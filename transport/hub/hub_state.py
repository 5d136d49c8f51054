"""The hub's state machine, without I/O: input and `now` (monotonic seconds) in, actions out.

HubState routes each input to the part whose state it changes, then returns all actions that this caused:

    Roster, Admission   sessions and their liveness; the standing of keys     transport.membership
    Rounds              leases, exchanges, evaluations, the end of the run    transport.scheduling
    Handshake, AdminCommands    this package
    UploadPolicy        the uploads that a hub accepts; below

`deadline()` says when to call `tick` at the latest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import Recovered
from transport.membership import (
    Admission,
    Roster,
    Session,
    SessionEvent,
    Standing,
    State,
    same,
    wrong_run,
    wrong_token,
)
from transport.protocol import HANDOFF, TRIAL, UPDATE, RunSettings, messages, round_of
from transport.scheduling import HubExtension, Phase, Rounds, UploadKind
from transport.wire import key_of

from .admin_commands import AdminCommands, joiners_status, people_status, run_status
from .handshake import Extend, Handshake, HubParts, Late

TRIALS, LONGEST = 4, 4 << 20  # of a session; bytes of each

SessionHandler = Callable[[Session, Any, float], None]
RequestHandler = Callable[[bytes, Any, float], None]
# messages that need no session
Request = (
    messages.Hello
    | messages.Resume
    | messages.AskStatus
    | messages.Deciding
    | messages.AskStop
    | messages.AskAdmin
)


class HubState:
    """State machine of one run."""

    def __init__(
        self,
        settings: RunSettings,
        token: str,
        stop_secret: str,
        now: float,
        recovered: Recovered | None = None,
        extensions: Sequence[Extend] = (),
    ) -> None:
        recovered = recovered or Recovered()
        self.settings = settings
        self.out = out = Outbox()
        self.members = members = Roster(settings, out, self._session_ended, now)
        self.admission = admission = Admission(settings, out, token, recovered.peers)
        self.rounds = rounds = Rounds(settings, out, members, admission, recovered, now)
        parts = HubParts(settings, out, members, admission, rounds, stop_secret, recovered)
        rounds.extensions += [extend(parts) for extend in extensions if not isinstance(extend, Late)]
        self.uploads = UploadPolicy(parts)
        for one in rounds.extensions:
            self.uploads.add(one.uploads)
        late = [one for one in extensions if isinstance(one, Late)]
        self.handshake = Handshake(parts, late, self._begin)
        self.began: Callable[[HubExtension], None] = lambda _: None  # told of an extension that begins late
        self.admin = AdminCommands(parts, self.handshake)
        self._of_requests: dict[type[Request], RequestHandler] = {
            messages.Hello: self.handshake.hello,
            messages.Resume: self.handshake.resume,
            messages.AskStatus: self._answer_status,
            messages.Deciding: self._visit,
            messages.AskStop: self.admin.stop,
            messages.AskAdmin: self.admin.execute,
        }
        self._of_sessions: dict[type[messages.ToHub], SessionHandler] = {
            messages.Ready: self.handshake.ready,
            messages.Report: rounds.report,
            messages.Evaluated: rounds.evaluated,
            messages.Extension: self._extension,
            messages.Leave: self._leave,
            messages.Pong: self._pong,
        }

    def _begin(self, one: HubExtension) -> None:
        self.rounds.extensions.insert(0, one)
        self.uploads.add(one.uploads)
        self.began(one)

    # ---- from peers ----------------------------------------------------------------------------------------

    def receive(self, conn: bytes, message: messages.ToHub, now: float) -> list[do.Action]:
        """Take a checked message from a control connection."""
        session = self.members.by_conn(conn)
        if session is not None:
            session.seen = now
        if isinstance(message, Request):
            if message.run != self.settings.run:
                self.out.send(conn, wrong_run(message.run))
            else:
                self._of_requests[type(message)](conn, message, now)
        elif session is None:
            if not self.admission.heard(conn, message, now):
                self.out.refuse(conn, "session", "the hub does not know this session")
        elif (handle := self._of_sessions.get(type(message))) is not None:
            handle(session, message, now)
        else:
            self.members.ignored += 1
        return self._drain(now)

    def lost(self, conn: bytes, now: float) -> list[do.Action]:
        """Note that a connection is closed."""
        self.members.lost(conn, now)
        self.admission.gone(conn)
        return self._drain(now)

    # ---- from the shell ------------------------------------------------------------------------------------

    def reached(self, session: str, ok: bool) -> None:
        """Take the result of dialling a peer."""
        peer = self.members.get(session)
        if peer is None or peer.role == "peer":
            self.members.reached(session, ok)
            return
        for one in self.rounds.extensions:
            if one.role == peer.role:
                one.reached(peer, ok)

    def apply(self, change: Callable[[float], object], now: float) -> list[do.Action]:
        """Call `change(now)`, a method of one of the parts, and return the actions that it causes."""
        change(now)
        return self._drain(now)

    def tick(self, now: float) -> list[do.Action]:
        """Let time pass up to `now`."""
        asleep = self.members.tick(now)
        self.admission.tick(now, asleep)
        self.rounds.tick(now, asleep)
        return self._drain(now)

    def deadline(self) -> float:
        """Return when to call `tick`, if nothing else happens before. inf: never."""
        return min(self.members.deadline(), self.admission.deadline(), self.rounds.deadline())

    def status(self, now: float, recipe: bool = False) -> str:
        """Return the JSON text of `cocktail status --json`; `recipe` adds what a joiner wants to know."""
        status = run_status(self.rounds, now)
        status |= people_status(self.members, self.admission.deciding, self.rounds.extensions, now)
        status["term"] = self.handshake.term
        return json.dumps(status | (joiners_status(self.rounds) if recipe else {}))

    # ---- handlers ------------------------------------------------------------------------------------------

    def _answer_status(self, conn: bytes, m: messages.AskStatus, now: float) -> None:
        known = same(m.token, self.admission.token)
        self.out.send(conn, messages.Status(self.status(now, m.recipe)) if known else wrong_token())

    def _visit(self, conn: bytes, m: messages.Deciding, now: float) -> None:
        key = key_of(conn)
        if not (same(m.token, self.admission.token) or self.admission.standing(key) is Standing.MEMBER):
            self.out.send(conn, wrong_token())
        elif self.rounds.phase is not Phase.ENDED and self.admission.in_turn(conn, now):
            self.admission.decide(conn, m, now)

    def _extension(self, session: Session, m: messages.Extension, now: float) -> None:
        named = [one for one in self.rounds.extensions if one.name == m.name]
        for one in named:
            with self.members.ignoring_unreadable():
                one.received(session, m.body, now)
        self.members.ignored += not named

    def _session_ended(self, session: Session) -> None:
        if not self.members.with_key(session.key):
            self.admission.left(session.key)
        self.rounds.session_ended(session)

    def _leave(self, session: Session, m: messages.Leave, now: float) -> None:
        self.out.send(session.conn, messages.Over(f"left: {m.reason}", self.rounds.over.finished))
        self.members.end(session, f"left: {m.reason}", "left")

    def _pong(self, session: Session, m: messages.Pong, now: float) -> None:
        session.rtt = max(0.0, now - m.sent)
        for one in self.rounds.extensions:
            one.answered(session, m.sent)

    def _drain(self, now: float) -> list[do.Action]:
        self.rounds.progress(now)
        if self.rounds.phase is Phase.ENDED:
            self.admission.dismiss(self.admission.asking, messages.Refused("over", self.rounds.over.reason))
        return self.out.drain()


class UploadPolicy:
    """Decides which uploads of a session are wanted now: the update of the open round, a leaver's handoff, a
    few trials, from which a newcomer measures its line, and what extensions take."""

    def __init__(self, parts: HubParts) -> None:
        self.settings, self._out = parts.settings, parts.out
        self._members, self._rounds = parts.members, parts.rounds
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
            if session.trials == TRIALS or size > LONGEST:
                return f"a session may try its line {TRIALS} times, with {LONGEST} bytes each"
            session.trials += 1
            return None
        leaves, kind = round_of(HANDOFF, name) is not None, self.kind_of(name)
        if kind is not None and (places := kind.places(name)) is not None:
            reason = kind.refusal(session, places)
        else:
            reason = self._handoff(session) if leaves else self._update(session, name)
        limit = max(kind.largest if kind is not None else 0, self.settings.update_limit)
        if reason is None and size > limit:
            reason = f"its upload has {size} bytes, the limit of this run is {limit}"
            self._members.kick(session, "kicked", reason)
        if reason is None and leaves and session.state is not State.BEHIND:
            self._members.move(session, SessionEvent.LEAVING)
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


def prefix_of(name: str) -> str:
    """Return the first word of a name, with its slash."""
    return f"{name.partition('/')[0]}/"
