"""Who is in the run: sessions begin, lose their connection, come back, fall silent, end."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from transport import actions as do
from transport.ledger import OpenSession
from transport.protocol import Hello, Message, Ping, Refused, RunSettings, Traffic, TrafficDelta, events
from transport.wire import key_of, origin_of

from .sessions import NEXT, Kind, Session, State, clean_name, unique_name

AWAKE_S = 1.0  # ticks come as they are asked for, or this much later
CATCHING_UP = 512  # sessions that have not said Ready yet: twice the largest swarm, which may begin at once
SILENT_PINGS = 3  # so many unanswered are worth telling
SUSPECT = 1 / 3  # of peer_timeout; a peer that was silent for so long holds no round up
OWED = 4096  # keys of which errors may come when they are back
KEPT = 16  # peers that are gone, remembered for those who ask where they are


class Outbox:
    """The actions that an input has caused so far."""

    def __init__(self) -> None:
        self._actions: list[do.Action] = []

    def add(self, action: do.Action) -> None:
        self._actions.append(action)

    def send(self, conn: bytes | None, message: Message) -> None:
        """Nothing is kept for a lost connection: what matters is said again when the peer is back."""
        if conn is not None:
            self.add(do.Send(conn, message))

    def tell(self, event: events.Event) -> None:
        self.add(do.Tell(event))

    def warn(self, message: str, peer: str | None = None) -> None:
        self.tell(events.Warned(0.0, message, peer))

    def drain(self) -> list[do.Action]:
        actions, self._actions = self._actions, []
        return actions


class Members:
    """The sessions of a run. `on_end(session)`, when one is over, says how many samples it gives back."""

    def __init__(
        self, settings: RunSettings, out: Outbox, on_end: Callable[[Session], int], now: float
    ) -> None:
        self.settings = settings
        self.sessions: dict[str, Session] = {}  # by session id
        self.traffic = defaultdict[str, Traffic](Traffic)  # by session id; the shell counts into it
        self.quiet = False  # the run is over and everybody leaves: nobody need hear of it
        self.gone: dict[str, str] = {}  # name -> why
        self._owned: dict[str, Collection[int]] = {}  # key of one that is gone -> as Session.owned
        self.ignored = 0  # messages that made no sense where they came
        self.refused = 0  # bytes that were no message, and connections that were told no
        self._out, self._on_end = out, on_end
        self._ticked = now

    # ---- beginning and end -------------------------------------------------------------------------------

    def begin(self, conn: bytes, m: Hello, now: float) -> Session:
        """A new session for a greeting that was found good."""
        name, key = clean_name(m.name), key_of(conn)
        for old in list(self.sessions.values()):
            back = m.alone and old.conn is None and (old.name, old.key) == (name, key)
            if old.conn == conn or back:
                self.end(old, "it came back in a new session")
        name = unique_name(name, {s.name for s in self.sessions.values()})
        id, origin = secrets.token_urlsafe(16), origin_of(conn)
        session = Session(id, key, name, m.hardware, conn, State.JOINING, now, now, pinged=now, origin=origin)
        session.address, session.owned = m.address, set(self._owned.pop(key, ()))
        session.owns = m.owns and not m.address  # else once the hub has been there
        self.sessions[session.id] = session
        self.gone.pop(name, None)
        self._out.add(do.Enrol(session.id, name, m.hardware, key))
        return session

    def make_room(self, origin: str) -> bool:
        """Is there room for another that catches up? It is taken from where most of them come from."""
        joining = [s for s in self.sessions.values() if s.state is State.JOINING and not s.awaited]
        if len(joining) < CATCHING_UP:
            return True
        crowds = Counter(s.origin for s in joining)
        crowd, many = crowds.most_common(1)[0]
        if many <= crowds[origin] + 1:
            return False
        first = next(s for s in joining if s.origin == crowd)
        self.kick(first, "full", f"{many} peers of one address are catching up, and others want to")
        return True

    def recall(self, keys: Iterable[str]) -> None:
        """Members of before the hub was restarted: any of them may come back with errors of shards."""
        everything = range(self.settings.shards if self.settings.owners == "peers" else 0)
        self._owned = dict.fromkeys(keys, everything)  # nobody wrote down what it owned

    def restore(self, old: OpenSession, now: float, *, awaited: bool) -> None:
        """A session of before the hub was restarted: it has `recover_s` to come back."""
        grace, id = self.settings.recover_s, old.session
        self.sessions[id] = Session(
            id, old.key, old.name, old.hardware, None, State.JOINING, now, now, now, grace, awaited
        )
        self.sessions[id].owned = set(self._owned.get(old.key, ()))

    def back(self, session: Session, conn: bytes, now: float, *, ready: bool) -> None:
        """A session resumes on another connection. `ready`: it was a member before the hub was restarted."""
        session.conn, session.seen, session.pinged, session.grace = conn, now, now, 0.0
        session.awaited = False
        if ready and session.state is State.JOINING:
            self.move(session, Kind.READY)
        elif session.state is State.BEHIND:
            self.move(session, Kind.BACK)

    def lost(self, conn: bytes, now: float) -> None:
        """The connection is closed. Its session may come back within the grace."""
        session = self.by_conn(conn)
        if session is not None:
            session.conn, session.lost_at, session.grace = None, now, self.settings.grace_s

    def end(self, session: Session, reason: str) -> None:
        del self.sessions[session.id]
        returned = self._on_end(session)
        self._out.add(do.Forget(session.id))
        self.gone = dict([*self.gone.items(), (session.name, reason)][-KEPT:])
        if session.owned:
            self._owned = dict([*self._owned.items(), (session.key, session.owned)][-OWED:])
        if not self.quiet:
            self._out.tell(events.PeerLeft(0.0, session.name, reason, returned, session.legacy))

    def kick(self, session: Session, code: str, reason: str) -> None:
        self._out.send(session.conn, Refused(code, reason))
        self.end(session, reason)

    def kick_other_state(self, session: Session, round: int) -> None:
        """This peer's x' is not the run's: its base weights, a packet it applied, or its arithmetic."""
        self.kick(
            session, "state", f"its x' of round {round} is not the one of the run (other base weights?)"
        )

    # ---- who ---------------------------------------------------------------------------------------------

    def get(self, id: str) -> Session | None:
        return self.sessions.get(id)

    def by_conn(self, conn: bytes) -> Session | None:
        return next((s for s in self.sessions.values() if s.conn == conn), None)

    def conns_of(self, name: str, key: str) -> list[bytes]:
        """Connections of the peer that a greeting may be of."""
        who = clean_name(name), key
        return [s.conn for s in self.sessions.values() if (s.name, s.key) == who and s.conn is not None]

    def ready(self) -> list[Session]:
        """Who would be in a round that opens now, by name."""
        ready = [s for s in self.sessions.values() if s.state is State.READY and s.conn is not None]
        return sorted(ready, key=lambda s: s.name)

    @property
    def apart(self) -> int:
        """How many compute a lease that spans rounds, and will be back."""
        return sum(s.state is State.APART and s.conn is not None for s in self.sessions.values())

    def why(self, id: str, now: float) -> str:
        """Why nothing comes of a session, as far as the hub can know."""
        session = self.sessions.get(id)
        if session is None:
            return "gone"
        if session.conn is None:
            return "connection lost"
        if now - session.seen >= SILENT_PINGS * self.settings.ping_s:
            return f"silent for {now - session.seen:.0f} s"
        if session.state is State.APART:
            return "computes a lease that spans several rounds"
        return "catches up" if session.state is State.JOINING else "answers, but its update has not come"

    def suspect(self, session: Session, now: float) -> bool:
        """Connected as it seems, and silent: frozen, or behind a line that swallows everything."""
        return session.conn is not None and now - session.seen >= SUSPECT * self.settings.peer_timeout

    def not_ready(self, now: float) -> list[str]:
        """Names, with the reason, of those who are here and not ready, and of those who are gone."""
        here = [s for s in self.sessions.values() if s.state is not State.READY or s.conn is None]
        why = self.gone | {s.name: self.why(s.id, now) for s in here}
        return [f"{name} ({reason})" for name, reason in sorted(why.items())]

    def others(self, name: str, key: str) -> int:
        """How many peers there are, beside a lost one that would come back under this name."""
        who = clean_name(name), key
        return sum(s.conn is not None or (s.name, s.key) != who for s in self.sessions.values())

    def awaited(self) -> bool:
        """Is somebody expected back after a restart of the hub?"""
        return any(s.awaited for s in self.sessions.values())

    def move(self, session: Session, kind: Kind) -> bool:
        """Follow the table; False where it has no such arrow: that is ignored, and counted."""
        state = NEXT[session.state].get(kind)
        if state is None:
            self.ignored += 1
            return False
        if session.state is State.JOINING:  # it is ready
            self.traffic[session.id].ready = self.traffic[session.id].down
        session.state = state
        return True

    def move_all(self, ids: Iterable[str], kind: Kind) -> None:
        for id in ids:
            if id in self.sessions:
                self.move(self.sessions[id], kind)

    def tell_traffic(self) -> dict[str, TrafficDelta]:
        """Bytes by peer since this was last asked."""
        return {s.name: self.traffic[s.id].tell() for s in self.sessions.values() if s.id in self.traffic}

    # ---- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Let time pass. Returns for how long of it this hub was suspended, which is nobody's fault."""
        s, asleep = self.settings, now - self._ticked - self.settings.ping_s
        asleep = asleep if asleep > AWAKE_S else 0.0
        self._ticked = now
        for session in list(self.sessions.values()):
            session.seen += asleep
            session.lost_at += asleep
            session.owes = None if session.owes is None else session.owes + asleep
            if session.conn is None:
                if now >= session.lost_at + session.grace:
                    self.end(session, "connection lost")
                    continue
            elif now >= session.seen + s.peer_timeout:
                self.end(session, f"silent for {now - session.seen:.0f} s")
                continue
            elif now >= session.pinged + s.ping_s:
                session.pinged = now
                self._out.send(session.conn, Ping(now))
            if now >= self.owing(session) + s.lease_s:
                self.kick(session, "session", f"delivered nothing for {now - self.owing(session):.0f} s")
        return asleep

    def owing(self, session: Session) -> float:
        """Since when this session owes something that it could deliver; inf: nothing."""
        idle = self.quiet or session.state is State.READY or session.owes is None
        return float("inf") if idle or session.owes is None else session.owes

    def deadline(self) -> float:
        """When `tick` has something to do. inf: never."""
        s, times = self.settings, [float("inf")]
        for session in self.sessions.values():
            if session.conn is None:
                times.append(session.lost_at + session.grace)
            else:
                times += [session.pinged + s.ping_s, session.seen + s.peer_timeout]
            times.append(self.owing(session) + s.lease_s)
        return min(times)
