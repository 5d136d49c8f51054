"""Handshakes: Hello begins a session, Resume continues it on another connection, Ready reports its state."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import Recovered
from transport.membership import (
    FULL,
    Admission,
    KeyEvent,
    Roster,
    Session,
    SessionEvent,
    Standing,
    State,
    differences,
    refusal,
    same,
)
from transport.protocol import RunSettings, events, messages
from transport.scheduling import HubExtension, Phase, Rounds
from transport.wire import key_of, origin_of

SEAL = 16  # hex digits
REPLACED = "another hub of this run has been started since"


@dataclass(frozen=True)
class HubParts:
    """The parts of a hub that an extension may use."""

    settings: RunSettings
    out: Outbox
    members: Roster
    admission: Admission
    rounds: Rounds
    secret: str  # the host's: nobody else knows what it seeds
    recovered: Recovered  # what an earlier hub of the run has left


Extend = Callable[[HubParts], HubExtension]


@dataclass(frozen=True)
class Late:
    """An extension that begins with the first Hello that has a body for it; or, where `dialled`, with the
    first peer that others may reach."""

    name: str
    begin: Extend
    dialled: bool = False

    def __call__(self, hub: HubParts) -> HubExtension:
        return self.begin(hub)


class Handshake:
    """Answers to connections without a session.

    Args:
        late: extensions that begin later; `began` is called with each one then.
    """

    def __init__(self, parts: HubParts, late: Sequence[Late], began: Callable[[HubExtension], None]) -> None:
        self.settings, self._out, self._members = parts.settings, parts.out, parts.members
        self._parts, self._admission, self._rounds = parts, parts.admission, parts.rounds
        self.term, self.secret = parts.recovered.term, parts.secret
        self._late, self._began = {one.name: one for one in late}, began
        self.replaced = False  # peers have met a hub of a later term
        self._members.new_id = self._new_session

    def hello(self, conn: bytes, m: messages.Hello, now: float, *, approved: bool = False) -> None:
        """Begin a session, let the connection wait for approval, or refuse it."""
        key = key_of(conn)
        if self._refuse_banned(conn) or not self._answers(key, m.extra):
            return
        standing, others = self._admission.standing(key), self._members.others(m.name, key)
        token = None if standing is Standing.MEMBER else self._admission.token
        refused = refusal(m, self.settings, token, over=self._rounds.ending, peers=others)
        if refused is not None:
            self._out.send(conn, refused)
        elif not approved and not self._admission.in_turn(conn, now):
            self._members.refused += 1
        elif (role := self._with_role(m)) is not None:
            self._begin_role(role, conn, m, now, approved)
        elif standing is not Standing.MEMBER and self.settings.join == "approve":
            self._admission.ask(conn, m, now)
        elif not self._members.make_room(origin_of(conn)):
            self._out.refuse(conn, "full", FULL)
        else:
            self._begin(conn, m, now)

    def _answers(self, key: str, bodies: Mapping[str, bytes]) -> bool:
        """Tell whether this key is answered; else it dials again."""
        return all(one.answers(key, bodies.get(one.name, b"")) for one in self._rounds.extensions)

    def _with_role(self, m: messages.Hello) -> HubExtension | None:
        """Return the extension whose session a Hello asks for; None: it is a peer's."""
        self._begin_late(m.extra.keys())
        return next((one for one in self._rounds.extensions if one.role and one.name in m.extra), None)

    def _begin_late(self, names: Set[str]) -> None:
        for name in names & self._late.keys():
            self._began(self._late.pop(name)(self._parts))

    def _begin_role(
        self, of: HubExtension, conn: bytes, m: messages.Hello, now: float, approved: bool
    ) -> None:
        """Begin a session of an extension's role, if that admits it, or the host has approved it."""
        admitted = of.admits(conn, m.extra[of.name])
        if isinstance(admitted, messages.Refused):
            self._out.send(conn, admitted)
        elif approved or admitted:
            self._begin(conn, m, now, of.role)
        else:
            self._admission.ask(conn, m, now)

    def _begin(self, conn: bytes, m: messages.Hello, now: float, role: str = "peer") -> None:
        session = self._members.begin(conn, m, now)
        session.role = role
        session.proven = bool(session.key) and session.key == self.settings.own_key
        self._admission.joined(session.key)
        self._admission.move(session.key, KeyEvent.ADMITTED, session.name)
        self._introduce(session, m, now)
        self._welcome(session, resumed=False)
        if role == "peer":
            self._dial(session)
            self._members.tell_joined(session, self._rounds.round)

    def resume(self, conn: bytes, m: messages.Resume, now: float) -> None:
        """Give a session its new connection, and say again everything that the peer may have missed."""
        session, rounds = self._members.get(m.session), self._rounds
        if self._refuse_banned(conn) or not self._answers(key_of(conn), {}):
            return
        if m.term > self.term:
            if not self.replaced and self._has_given(m.session, m.term):  # a peer may claim anything
                self.replaced = True
                told = f"{REPLACED} (term {m.term}, this one is of term {self.term}): stop this one"
                self._out.warn(told, m.name)
            self._out.refuse(conn, "term", REPLACED)
        elif rounds.phase is Phase.ENDED:
            self._out.send(conn, rounds.over)
        elif session is None or (session.name, session.key) != (m.name, key_of(conn)):
            self._out.refuse(conn, "session", "the hub does not know this session any more")
        elif unknown := rounds.lacks(session, m.holds):
            self._end(session, conn, f"its lease of round {unknown[0]} is not known here")
        elif 0 <= m.waiting < rounds.round and m.waiting not in rounds.history.commits:
            self._end(session, conn, f"away since round {m.waiting}")
        else:
            if session.awaited:
                session.address = m.address
                self._introduce(session, m, now)
                self._dial(session)
            self._members.back(session, conn, now, ready=m.ready)
            rounds.revoke_unheard(session, m.holds)
            self._welcome(session, resumed=True)
            rounds.repeat(session, m.waiting)

    def _new_session(self) -> str:
        """Draw the secret of a session, which proves the term of the hub that gave it: to a hub with this
        host's secret, and to nobody else."""
        word = secrets.token_urlsafe(16)
        return f"{word}.{self._seal(word, self.term)}"

    def _seal(self, word: str, term: int) -> str:
        about = f"{self.settings.run}/{term}/{word}".encode()
        return hmac.new(self.secret.encode(), about, "sha256").hexdigest()[:SEAL]

    def _has_given(self, session: str, term: int) -> bool:
        """Tell whether a hub of this host, of that term, has given a session this secret."""
        word, _, seal = session.rpartition(".")
        return bool(self.secret) and same(seal, self._seal(word, term))

    def _end(self, session: Session, conn: bytes, why: str) -> None:
        """End a session, and say so on the connection by which its peer is back: it begins another."""
        session.conn = conn
        self._members.kick(session, "session", why)

    def ready(self, session: Session, m: messages.Ready, now: float) -> None:
        """Accept a peer that holds x' of a round, if that is the run's x', made from the run's files."""
        joining = session.state is State.JOINING
        if session.role != "peer":
            self._members.ignored += 1
        elif differ := differences(m.holds, self.settings.holds):
            self._members.kick(session, "state", differ)
        elif m.round > self._rounds.round:
            self._members.kick_other_state(session, m.round)
        elif self._members.move(session, SessionEvent.READY):
            self._rounds.caught_up(session, m.round)
            if not joining:
                return
            if not self._rounds.disputes.claims(session.id, m.round, m.fingerprint):
                session.ready_claim = (m.round, m.fingerprint)
            self._out.tell(events.PeerReady(0.0, session.name, m.round, now - session.since))

    def _refuse_banned(self, conn: bytes) -> bool:
        banned = self._admission.standing(key_of(conn)) is Standing.BANNED
        if banned:
            self._out.refuse(conn, "kicked", self._admission.known[key_of(conn)].reason)
        return banned

    def _dial(self, session: Session) -> None:
        """Check that others can reach the peer's server before they are sent there."""
        if session.address:
            self._begin_late({one.name for one in self._late.values() if one.dialled})
        if session.address and any(one.dials for one in self._rounds.extensions):
            session.dialled = True
            self._out.add(do.Reach(session.id, session.address, session.key))

    def _introduce(self, session: Session, m: messages.Hello | messages.Resume, now: float) -> None:
        """Give extensions the bodies with which a peer introduces itself."""
        for one in self._rounds.extensions:
            with self._members.ignoring_unreadable():
                one.hello(session, m.extra.get(one.name, b""), now)

    def _welcome(self, session: Session, *, resumed: bool) -> None:
        s, history = self.settings, self._rounds.history
        message = messages.Welcome(
            protocol=messages.PROTOCOL,
            run=s.run,
            name=session.name,
            session=session.id,
            recipe=s.recipe,
            recipe_hash=s.recipe_hash,
            base=list(s.base),
            round=self._rounds.round,
            ping_s=s.ping_s,
            resumed=resumed,
            term=self.term,
            log_bytes=history.log_bytes,
            snapshots=history.snapshots,
            extra={one.name: body for one in self._rounds.extensions if (body := one.welcome(session))},
        )
        self._out.send(session.conn, message)
        for one in self._rounds.extensions:
            one.welcomed(session)
