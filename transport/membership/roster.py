"""Sessions of a run: they begin, lose their connection, come back, fall silent, end. One of them, with its
transition table and its bytes on the wire; and the checks of its handshake."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import OpenSession
from transport.protocol import (
    ProtocolError,
    RunSettings,
    clean_name,
    events,
    messages,
    unique_name,
    versions,
)
from transport.wire import key_of, origin_of

AWAKE_S = 1.0  # seconds a tick may come late before the hub counts as suspended
NEWCOMERS = 512  # sessions that catch up, or have delivered nothing: twice the largest swarm's, at its start
FULL = f"{NEWCOMERS} others are newcomers too: try again later"
SILENT_PINGS = 3  # unanswered pings after which a peer is reported as silent
SUSPECT = 1 / 3  # of peer_timeout; no round waits for a peer that was silent for so long
KEPT = 16  # ended sessions that are remembered
How = Literal["done", "left", "lost", "removed"]  # how a session ended; done: with the run
CALLED = {"base": "base weights"}  # names for people, where they differ
SHOWN = 12  # of a hash


class State(Enum):
    """States of a session."""

    JOINING = "joining"  # fetches and catches up
    READY = "ready"  # member of the next round that opens
    TRAINING = "training"  # member of the open round, whose update is expected
    SENT = "sent"  # its update of the open round is here
    APART = "apart"  # computes a lease that spans rounds; not a member again before it says that it is ready
    BEHIND = "behind"  # the round closed without it; not a member again before it is heard of


class SessionEvent(Enum):
    """Events that move a session to another state."""

    READY = "says it is ready"
    OPENED = "a round opened with it"
    ARRIVED = "its report and its packet are here"
    CLOSED = "the round closed"
    PARTED = "the round closed, and its lease spans the next ones"
    LATE = "reports on a round that is closed"
    LEAVING = "begins its handoff"  # no round waits for it any more
    BACK = "is back on another connection"  # a late report may have been lost with the old one


SESSION_TRANSITIONS: dict[State, dict[SessionEvent, State]] = {
    State.JOINING: {SessionEvent.READY: State.READY},
    State.READY: {
        SessionEvent.READY: State.READY,  # it has caught up, for its turn
        SessionEvent.OPENED: State.TRAINING,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.TRAINING: {
        SessionEvent.ARRIVED: State.SENT,
        SessionEvent.CLOSED: State.BEHIND,
        SessionEvent.PARTED: State.BEHIND,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.SENT: {
        SessionEvent.CLOSED: State.READY,
        SessionEvent.PARTED: State.APART,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.APART: {SessionEvent.READY: State.READY, SessionEvent.LEAVING: State.BEHIND},
    State.BEHIND: {
        SessionEvent.READY: State.READY,
        SessionEvent.LATE: State.READY,
        SessionEvent.BACK: State.READY,
    },
}


@dataclass(frozen=True)
class TrafficDelta:
    """Bytes moved within a period."""

    up: int = 0  # peer to hub
    down: int = 0
    fetched: int = 0  # of `down`: before the peer was ready


@dataclass
class Traffic:
    """Bytes on the wire of one session, ZMTP and CURVE framing included."""

    up: int = 0  # peer to hub
    down: int = 0
    ready: int | None = None  # `down` when the peer had caught up; None: it has not
    told: TrafficDelta = TrafficDelta()  # sums at the last `tell`

    @property
    def sums(self) -> TrafficDelta:
        return TrafficDelta(self.up, self.down, self.down if self.ready is None else self.ready)

    def tell(self) -> TrafficDelta:
        """Return the bytes since the last call."""
        before, self.told = self.told, (now := self.sums)
        return TrafficDelta(now.up - before.up, now.down - before.down, now.fetched - before.fetched)


@dataclass
class Session:
    """One peer's session. Its connection may be lost in any state; it resumes within `grace`, or ends."""

    id: str  # the secret the peer shows when it comes back
    key: str  # its CURVE key, which is its identity: only its holder can resume this session
    name: str
    hardware: str
    conn: bytes | None  # control connection; None: lost
    state: State
    since: float  # when it joined, or was restored
    seen: float  # when something last came from it
    lost_at: float = 0.0  # when the connection was lost
    grace: float = 0.0  # how long it may stay lost
    awaited: bool = False  # it took part before the hub was restarted, and has not come back yet
    pinged: float = 0.0
    doubted: float = -inf  # when its process was said to be gone; nothing came since: it has no grace
    owes_since: float | None = None  # since when it owes something; None: nothing
    at: int = 0  # newest round whose x' it is known to have
    ready_claim: tuple[int, int] | None = None  # (round, fingerprint) of its Ready, until it is compared
    role: str = "peer"  # or an extension's: it trains nothing
    rtt: float | None = None  # seconds
    origin: str = ""  # network address (wire.origin_of)
    accepted: int = 0  # packets
    proven: bool = False  # one of its packets is in the run; else it is a newcomer
    recorded: bool = False  # it is in the ledger
    left_out: int = 0  # rounds that were committed without its packet, though it was a member
    missed: int = 0  # awaited rounds in a row that closed without its packet
    waits_until: int = 0  # the round from which a newcomer that missed some is a member again
    misjudged: int = 0  # evaluations of it that cannot be, were not those of others, or never came
    tokens: int = 0  # trained tokens counted
    compute_s: float = 0.0  # of the last step of each round whose packet was accepted, summed
    wait_s: float = 0.0  # that its device then waited for the exchange
    fits: int = 0  # bytes of an aggregate that it can fetch beside its compute; 0: not known
    uplink: float = 0.0  # bytes a second of its last update; 0: not measured
    share: float | None = None  # of the mean of the last round its packet was in; None: of none yet
    handoff: int = 0  # bytes of its residual that it has handed over
    address: str = ""  # where other peers reach it, as it says
    reachable: bool = False  # the hub has reached it there
    dialled: bool = False  # that address is being tried
    trials: int = 0  # uploads that measured its line


@dataclass(frozen=True)
class Departure:
    """The end of a session."""

    session: Session
    traffic: Traffic
    how: How
    reason: str


class Roster:
    """Live sessions of a run. `on_end` is called with each one that ends."""

    def __init__(
        self, settings: RunSettings, out: Outbox, on_end: Callable[[Session], object], now: float
    ) -> None:
        self.settings = settings
        self.sessions: dict[str, Session] = {}  # by session id
        self._by_conn: dict[bytes, str] = {}  # control connection -> session id
        self.traffic = defaultdict[str, Traffic](Traffic)  # by session id; the shell counts into it
        self.new_id: Callable[[], str] = lambda: secrets.token_urlsafe(16)  # of a session
        self.quiet = False  # the run is over: departures are no news
        self.gone: dict[str, Departure] = {}  # by name, the newest last
        self.ignored = 0  # messages that the sender's state does not allow
        self.refused = 0  # malformed messages, and refused connections
        self._out, self._on_end = out, on_end
        self._ticked = now

    # ---- beginning and end -------------------------------------------------------------------------------

    def begin(self, conn: bytes, m: messages.Hello, now: float) -> Session:
        """Begin a session for an accepted Hello."""
        name, key = clean_name(m.name), key_of(conn)
        for old in list(self.sessions.values()):
            back = m.alone and old.conn is None and (old.name, old.key) == (name, key)
            if old.conn == conn or back:
                self.end(old, "it came back in a new session", "left")
        name = unique_name(name, {s.name for s in self.sessions.values()})
        id, origin = self.new_id(), origin_of(conn)
        session = Session(id, key, name, m.hardware, conn, State.JOINING, now, now, pinged=now)
        session.origin, session.address = origin, m.address
        self.sessions[session.id], self._by_conn[conn] = session, session.id
        self.gone.pop(name, None)
        return session

    def tell_joined(self, session: Session, round: int) -> None:
        """Tell the host of a new session, which catches up to `round`."""
        origin = session.origin.replace("-", ".")  # wire.origin_of has no dots
        self._out.tell(events.PeerJoined(0.0, session.name, session.hardware, round, origin))

    def to_record(self, ids: Iterable[str]) -> tuple[OpenSession, ...]:
        """Return those of these sessions that are to be written into the ledger: each once, with its first
        work. Before that there is nothing to come back for."""
        new = [session for session in self.present(ids) if not session.recorded]
        for session in new:
            session.recorded = True
        return tuple(OpenSession(s.id, s.name, s.hardware, s.key) for s in new)

    @contextmanager
    def ignoring_unreadable(self) -> Iterator[None]:
        """Ignore and count what cannot be read (ProtocolError)."""
        try:
            yield
        except ProtocolError:
            self.ignored += 1

    def make_room(self, origin: str) -> bool:
        """Tell whether there may be another newcomer, ending one of the most frequent origin to make room."""
        unproven = (s for s in self.sessions.values() if not s.proven)
        # not who was ready and has missed no round: it can have delivered nothing yet
        newcomers = [s for s in unproven if s.state is State.JOINING or s.missed]
        if len(newcomers) < NEWCOMERS:
            return True
        origins = Counter(s.origin for s in newcomers)
        crowd, many = origins.most_common(1)[0]
        if many <= origins[origin] + 1:
            return False
        first = next(s for s in newcomers if s.origin == crowd)
        self.kick(first, "full", f"{many} peers of one address have not delivered yet, and others want to")
        return True

    def newcomer_from(self, id: str) -> str | None:
        """Return the origin of a session that is a newcomer; None for others."""
        session = self.sessions.get(id)
        return session.origin if session is not None and not session.proven else None

    def reached(self, id: str, ok: bool) -> None:
        """Take the result of dialling the address that a peer names."""
        session = self.get(id)
        if session is not None:
            session.reachable, session.dialled = ok, False
            if not ok:
                self._out.warn(f"does not answer at {session.address}: no peer is sent there", session.name)

    def restore(self, old: OpenSession, now: float, *, awaited: bool) -> None:
        """Restore a session from before the restart; it has `recover_s` to come back."""
        session = Session(old.session, old.key, old.name, old.hardware, None, State.JOINING, now, now, now)
        session.grace, session.recorded = self.settings.recover_s, True
        session.awaited = session.proven = awaited
        self.sessions[session.id] = session

    def back(self, session: Session, conn: bytes, now: float, *, ready: bool) -> None:
        """Resume a session on another connection. `ready`: it was a member before the hub was restarted."""
        self._by_conn.pop(session.conn or b"", None)
        self._by_conn[conn] = session.id
        session.conn, session.seen, session.pinged, session.grace = conn, now, now, 0.0
        session.awaited = False
        if ready and session.state is State.JOINING:
            self.move(session, SessionEvent.READY)
        elif session.state is State.BEHIND:
            self.move(session, SessionEvent.BACK)

    def lost(self, conn: bytes, now: float) -> None:
        """Mark the session of a closed connection as lost; it may come back within its grace."""
        session = self.by_conn(conn)
        self._by_conn.pop(conn, None)
        if session is not None:
            session.conn, session.lost_at = None, now
            session.grace = self.settings.grace_s if session.seen > session.doubted else 0.0

    def doubt(self, key: str, now: float) -> None:
        """Note that the process with this key is said to be gone: each of its sessions whose connection is
        closed, or turns out to be, ends without a grace. One of which anything comes meanwhile does not."""
        for session in self.with_key(key):
            session.doubted, session.pinged = now, now
            if session.conn is None:
                session.grace = 0.0
            else:
                self._out.send(session.conn, messages.Ping(now))  # which fails where it is closed

    def end(self, session: Session, reason: str, how: How) -> None:
        del self.sessions[session.id]
        if self._by_conn.get(session.conn or b"") == session.id:
            del self._by_conn[session.conn or b""]
        self._on_end(session)
        traffic = self.traffic.get(session.id, Traffic())
        departure = Departure(session, traffic, "done" if self.quiet else how, reason)
        self._out.add(do.Forget(session.id, session.origin, session.recorded))
        self.gone.pop(session.name, None)
        if session.recorded or departure.how != "left":  # who leaves before any work has only looked
            self.gone = dict([*self.gone.items(), (session.name, departure)][-KEPT:])
        if not self.quiet:
            self._out.tell(events.PeerLeft(0.0, session.name, reason, session.handoff, how))

    def kick(self, session: Session, code: str, reason: str) -> None:
        self._out.refuse(session.conn, code, reason)
        self.end(session, reason, "removed")

    def kick_other_state(self, session: Session, round: int) -> None:
        """End a session whose x' is not the run's: other base weights, packets, or arithmetic."""
        self.kick(
            session, "state", f"its x' of round {round} is not the one of the run (other base weights?)"
        )

    # ---- look-ups ----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Session]:
        """Iterate over a copy: sessions may end meanwhile."""
        return iter(list(self.sessions.values()))

    def __contains__(self, id: object) -> bool:
        return id in self.sessions

    def get(self, id: str) -> Session | None:
        return self.sessions.get(id)

    def by_conn(self, conn: bytes) -> Session | None:
        id = self._by_conn.get(conn)
        session = self.sessions.get(id) if id is not None else None
        return session if session is not None and session.conn == conn else None

    def present(self, ids: Iterable[str]) -> list[Session]:
        """Return the live sessions among these, in their order."""
        return [self.sessions[id] for id in ids if id in self.sessions]

    def with_key(self, key: str) -> list[Session]:
        return [s for s in self.sessions.values() if s.key == key]

    def conns_of(self, name: str, key: str) -> list[bytes]:
        """Return the connections of sessions with this name and key."""
        who = clean_name(name), key
        return [s.conn for s in self.sessions.values() if (s.name, s.key) == who and s.conn is not None]

    def ready(self) -> list[Session]:
        """Return the members of a round that would open now, by name."""
        ready = [s for s in self.sessions.values() if s.state is State.READY and s.conn is not None]
        return sorted(ready, key=lambda s: s.name)

    @property
    def apart(self) -> int:
        """Count sessions that compute a lease of several rounds, and will be back."""
        return sum(s.state is State.APART and s.conn is not None for s in self.sessions.values())

    def why(self, id: str, now: float) -> str:
        """Explain to the host why a session delivers nothing."""
        session = self.sessions.get(id)
        if session is None:
            return "gone"
        if session.conn is None:
            return "connection lost"
        if now - session.seen >= SILENT_PINGS * self.settings.ping_s:
            return f"silent for {now - session.seen:.0f} s"
        if session.role != "peer":
            return f"trains nothing: it is a {session.role}"
        if session.state is State.APART:
            return "computes a lease that spans several rounds"
        return "catches up" if session.state is State.JOINING else "answers, but its update has not come"

    def suspect(self, session: Session, now: float) -> bool:
        """Tell whether a connected peer has been silent for long: frozen, or behind a dead line."""
        return session.conn is not None and now - session.seen >= SUSPECT * self.settings.peer_timeout

    def not_ready(self, now: float) -> list[str]:
        """Name sessions that are not ready or have ended, each with the reason."""
        here = [s for s in self.sessions.values() if s.state is not State.READY or s.conn is None]
        why = {name: departure.reason.removeprefix("left: ") for name, departure in self.gone.items()}
        why |= {s.name: self.why(s.id, now) for s in here}
        return [f"{name} ({reason})" for name, reason in sorted(why.items())]

    def others(self, name: str, key: str) -> int:
        """Count peers, except a lost one that would come back under this name."""
        who, peers = (clean_name(name), key), [s for s in self.sessions.values() if s.role == "peer"]
        return sum(s.conn is not None or (s.name, s.key) != who for s in peers)

    @property
    def awaited(self) -> int:
        """Count the sessions that are expected back after a restart of the hub."""
        return sum(s.awaited for s in self.sessions.values())

    @property
    def dialling(self) -> bool:
        """Tell whether the address of a peer is still being tried."""
        return any(s.dialled for s in self.sessions.values())

    def move(self, session: Session, kind: SessionEvent) -> bool:
        """Follow the transition table; False where it has no such arrow: the event is ignored and counted."""
        state = SESSION_TRANSITIONS[session.state].get(kind)
        if state is None:
            self.ignored += 1
            return False
        if session.state is State.JOINING:  # the only way out is Ready
            self.traffic[session.id].ready = self.traffic[session.id].down
        session.state = state
        return True

    def by_name(self) -> list[tuple[Session, Traffic]]:
        """Return sessions with their traffic, by name."""
        sessions = sorted(self.sessions.values(), key=lambda s: s.name)
        return [(s, self.traffic.get(s.id, Traffic())) for s in sessions]

    def tell_traffic(self) -> dict[str, TrafficDelta]:
        """Return bytes by peer since the last call."""
        return {s.name: self.traffic[s.id].tell() for s in self.sessions.values() if s.id in self.traffic}

    # ---- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Let time pass. Returns for how long of it the hub was suspended, which counts against no peer."""
        s, asleep = self.settings, now - self._ticked - self.settings.ping_s
        asleep = asleep if asleep > AWAKE_S else 0.0
        self._ticked = now
        for session in list(self.sessions.values()):
            session.seen += asleep
            session.lost_at += asleep
            session.owes_since = None if session.owes_since is None else session.owes_since + asleep
            if session.conn is None:
                if now >= session.lost_at + session.grace:
                    self.end(session, "connection lost", "lost")
                    continue
            elif now >= session.seen + s.peer_timeout:
                self.end(session, f"silent for {now - session.seen:.0f} s", "lost")
                continue
            elif now >= session.pinged + s.ping_s:
                session.pinged = now
                self._out.send(session.conn, messages.Ping(now))
            if now >= self.owing(session) + s.lease_s:
                self.kick(session, "session", f"delivered nothing for {now - self.owing(session):.0f} s")
        return asleep

    def owing(self, session: Session) -> float:
        """Return since when this session owes something that it could deliver; inf: nothing."""
        idle = self.quiet or session.state is State.READY or session.owes_since is None
        return inf if idle or session.owes_since is None else session.owes_since

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        s, times = self.settings, [inf]
        for session in self.sessions.values():
            if session.conn is None:
                times.append(session.lost_at + session.grace)
            else:
                times += [session.pinged + s.ping_s, session.seen + s.peer_timeout]
            times.append(self.owing(session) + s.lease_s)
        return min(times)


def refusal(
    m: messages.Hello, settings: RunSettings, token: str | None, *, over: bool, peers: int
) -> messages.Refused | None:
    """Return why this Hello gets no session, or None. `token`: None where a known key needs none."""
    if m.protocol not in messages.VERSIONS:
        return wrong_version(m.protocol)
    if m.run != settings.run:
        return wrong_run(m.run)
    if token is not None and not same(m.token, token):
        return wrong_token()
    if over:
        return messages.Refused("over", "the run is over")
    if differ := differences(m.versions, settings.versions):
        return messages.Refused("version", differ)
    if settings.max_peers is not None and peers >= settings.max_peers:
        return messages.Refused("full", f"the run has its {settings.max_peers} peers")
    return None


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe where a peer differs from the run; empty: nowhere. Only what the peer names is compared."""
    return "; ".join(
        f"{CALLED.get(what, what)}: you have {theirs[what][:SHOWN]}, the run has {want[:SHOWN]}"
        for what, want in sorted(ours.items())
        if theirs.get(what, want) != want
    )


def wrong_version(protocol: int) -> messages.Refused:
    update = (
        "update cocktail" if protocol < max(messages.VERSIONS) else "ask the run's host to update cocktail"
    )
    return messages.Refused(
        "protocol", f"you speak protocol {protocol}, this run needs {versions()}: {update}"
    )


def wrong_run(run: str) -> messages.Refused:
    """Refuse without naming the run that is here: anyone with the hub's key can ask."""
    return messages.Refused("run", f"no run {run!r} here")


def wrong_token() -> messages.Refused:
    return messages.Refused("token", "the token in the run URL is not the one of this run, or no longer")


def same(a: str, b: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(a.encode(), b.encode())
