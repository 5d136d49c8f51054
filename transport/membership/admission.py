"""Admission of keys: the standing of each one, and connections that have no session.

A key that the host has approved, or of which an update is in the run, stays a member: it comes back without
being asked again, whatever became of the token. These, and bans, are in the ledger. Keys are free, so one
that has only shown the token is a member for as long as it has a session, and costs the ledger nothing.

    asking      waits for the host's approval
    deciding    its user looks at the run and decides whether to join; the host sees it, so nobody counts as
                joined before they have agreed

Both are in memory alone, at most MOST of each; a further one that decides is answered all the same, and is
not shown. They get no session, so no file, no lease, no packet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import KnownPeer
from transport.protocol import RunSettings, clean_name, events, messages, short_key
from transport.wire import TokenBuckets, key_of, origin_of

from .roster import wrong_token

MOST = 16  # connections that ask at once, and that decide
PATIENCE_S = 3600.0  # that one of them may stay
# 256 peers of one network may come back at once, then 4 a second. Keys that the run does not know have a
# limit in all, so that many addresses greet no more than a large swarm does.
HELLOS, HELLOS_S = 256.0, 4.0  # of one origin
STRANGERS, STRANGERS_S = 512.0, 32.0  # of all origins
STRUCK = 4096  # keys that struck out as newcomers and are remembered
STRIKES = 3  # unusable packets of a key before it is banned


class Standing(Enum):
    """Standing of a key."""

    STRANGER = "stranger"
    WAITING = "waiting"
    MEMBER = "member"
    BANNED = "banned"


class KeyEvent(Enum):
    """Events that change the standing of a key."""

    ADMITTED = "shows the token, which is enough"
    ASKS = "shows the token, and the host must approve it"
    APPROVED = "the host approves it"
    GONE = "hangs up, or has waited for too long"
    KICKED = "the host kicks it"
    BANNED = "the host bans it"
    STRUCK_OUT = "sends its third packet that cannot be used"
    UNBANNED = "the host lifts the ban"


KEY_TRANSITIONS: dict[Standing, dict[KeyEvent, Standing]] = {
    Standing.STRANGER: {
        KeyEvent.ADMITTED: Standing.MEMBER,
        KeyEvent.ASKS: Standing.WAITING,
        KeyEvent.BANNED: Standing.BANNED,
    },
    Standing.WAITING: {
        KeyEvent.APPROVED: Standing.MEMBER,
        KeyEvent.GONE: Standing.STRANGER,
        KeyEvent.KICKED: Standing.STRANGER,
        KeyEvent.BANNED: Standing.BANNED,
    },
    Standing.MEMBER: {
        KeyEvent.KICKED: Standing.STRANGER,
        KeyEvent.BANNED: Standing.BANNED,
        KeyEvent.STRUCK_OUT: Standing.BANNED,
    },
    Standing.BANNED: {KeyEvent.UNBANNED: Standing.STRANGER},
}


# Events that are written into the ledger, whatever the key was before.
DURABLE = (KeyEvent.APPROVED, KeyEvent.BANNED)


@dataclass
class Visitor:
    """A connection without a session: its user decides, or with a Hello the host does."""

    name: str
    hardware: str
    key: str
    since: float
    seen: float
    pinged: float
    hello: messages.Hello | None = None

    @classmethod
    def of(cls, conn: bytes, m: messages.Hello | messages.Deciding, now: float) -> Visitor:
        hello = m if isinstance(m, messages.Hello) else None
        return cls(clean_name(m.name), m.hardware, key_of(conn), now, now, now, hello)


class Admission:
    """Standing of every key, and the join token that strangers need."""

    def __init__(self, settings: RunSettings, out: Outbox, token: str, known: Iterable[KnownPeer]) -> None:
        self.settings, self._out, self.token = settings, out, token
        self.known = {k.key: k for k in known}  # members and the banned
        self.asking: dict[bytes, Visitor] = {}  # by connection
        self._deciding: dict[bytes, Visitor] = {}
        self.recorded = set(self.known)  # those in the ledger
        self._hellos, self._strangers = TokenBuckets(HELLOS_S, HELLOS), TokenBuckets(STRANGERS_S, STRANGERS)
        if settings.own_key and settings.own_key not in self.known:
            self.known[settings.own_key] = KnownPeer(settings.own_key, "", Standing.MEMBER.value)

    def standing(self, key: str) -> Standing:
        if key in self.known:
            return Standing(self.known[key].standing)
        return Standing.WAITING if self.waiting(key) else Standing.STRANGER

    def waiting(self, key: str) -> list[bytes]:
        """Return the connections of this key that wait."""
        return [conn for conn in self.asking if key_of(conn) == key]

    def move(self, key: str, act: KeyEvent, name: str = "", reason: str = "") -> bool:
        """Follow the transition table; False where it has no such arrow."""
        before = self.standing(key)
        after = KEY_TRANSITIONS[before].get(act)
        if after is None:
            return False
        if after in (Standing.MEMBER, Standing.BANNED):
            old = self.known.get(key, KnownPeer(key, "", after.value))
            self.known[key] = replace(old, name=name or old.name, standing=after.value, reason=reason)
            if act in DURABLE or key in self.recorded:
                self._record(key)
        elif key in self.known:
            self._forget(key, after, name)
        return True

    def _record(self, key: str) -> None:
        self.recorded.add(key)
        self._out.add(do.RecordStanding(self.known[key]))

    def _forget(self, key: str, after: Standing, name: str = "") -> None:
        del self.known[key]
        if key in self.recorded:
            self.recorded.remove(key)
            self._out.add(do.RecordStanding(KnownPeer(key, name, after.value)))

    def remember(self, key: str) -> None:
        """Write a member into the ledger: an update of it is in the run, or an extension counts on it."""
        if key not in self.recorded and self.standing(key) is Standing.MEMBER:
            self._record(key)

    def left(self, key: str) -> None:
        """Forget a key without a session, unless it is remembered for good, or has strikes."""
        known = self.known.get(key)
        if (
            known is not None
            and key not in self.recorded
            and not known.strikes
            and key != self.settings.own_key
        ):
            del self.known[key]

    def strike(self, key: str, name: str, reason: str) -> bool:
        """Count an unusable packet against a member, over all sessions. Returns whether it is banned now."""
        if self.standing(key) is not Standing.MEMBER:  # it was kicked meanwhile
            return False
        self.known[key] = known = replace(self.known[key], strikes=self.known[key].strikes + 1)
        # The oldest of too many newcomers with strikes are forgotten: a new key would have none either.
        struck = [one for one, of in self.known.items() if of.strikes and one not in self.recorded]
        for one in struck[:-STRUCK]:
            del self.known[one]
        if known.strikes >= STRIKES:
            why = f"{known.strikes} unusable packets, the last: {reason}"
            return self.move(key, KeyEvent.STRUCK_OUT, name, why)
        if key in self.recorded:
            self._record(key)
        return False

    def in_turn(self, conn: bytes, now: float) -> bool:
        """Rate-limit Hellos by origin, and those of unknown keys in all. An excess one gets no answer: its
        peer dials again after 5 s."""
        if key_of(conn) not in self.known and not self._strangers.take("", now):
            return False
        return self._hellos.take(origin_of(conn), now)

    # ---- connections without a session ---------------------------------------------------------------------

    @property
    def deciding(self) -> list[Visitor]:
        """Return those whose users decide, by name."""
        return sorted(self._deciding.values(), key=lambda one: one.name)

    def decide(self, conn: bytes, m: messages.Deciding, now: float) -> None:
        """Note a connection whose user decides, and tell the host."""
        if conn not in self._deciding and len(self._deciding) < MOST:
            self._deciding[conn] = one = Visitor.of(conn, m, now)
            self._out.tell(events.PeerDeciding(0.0, one.name, one.hardware))

    def joined(self, key: str) -> None:
        """Forget those that decide with the key of a peer that begins a session."""
        self._deciding = {conn: one for conn, one in self._deciding.items() if one.key != key}

    def ask(self, conn: bytes, m: messages.Hello, now: float) -> None:
        """Let a connection that has the token wait for approval; the host is told, once a key."""
        if conn not in self.asking and len(self.asking) >= MOST:
            self._out.refuse(conn, "full", f"{MOST} others wait for the host's approval: try again later")
            return
        one = Visitor.of(conn, m, now)
        if self.move(one.key, KeyEvent.ASKS):
            self._out.tell(events.PeerAsks(0.0, one.name, one.hardware, short_key(one.key)))
        self._deciding.pop(conn, None)
        self.asking[conn] = one
        said = f"waiting for the host's approval, as {one.name}, key {short_key(one.key)}"
        self._out.send(conn, messages.Wait(said))

    def heard(self, conn: bytes, message: messages.Message, now: float) -> bool:
        """Take a message of a connection without a session: only Leave means something. False: it is none."""
        one = self.asking.get(conn) or self._deciding.get(conn)
        if one is None:
            return False
        one.seen = now
        if isinstance(message, messages.Leave):
            self._out.send(conn, messages.Over("left", False))
            self.gone(conn)
        return True

    def pays_for_itself(self, conn: bytes) -> bool:
        """Tell whether a connection may stay though it has no session."""
        return conn in self.asking or conn in self._deciding

    def rotate(self, token: str) -> None:
        """Require this token from newcomers; those that wait came with the old one."""
        self.token = token
        self.dismiss(self.asking, wrong_token())

    def gone(self, conn: bytes) -> None:
        """Drop a connection that asks or decides: it hung up, or has declined."""
        if (one := self._deciding.pop(conn, None)) is not None:
            self._out.tell(events.PeerDeclined(0.0, one.name))
        if conn in self.asking:
            if self.waiting(key_of(conn)) == [conn]:
                self.move(key_of(conn), KeyEvent.GONE)
            del self.asking[conn]

    def dismiss(self, conns: Iterable[bytes], refused: messages.Refused) -> None:
        """Refuse these waiting connections."""
        for conn in list(conns):
            self._out.send(conn, refused)
            self.gone(conn)

    def tick(self, now: float, asleep: float) -> None:
        """Ping those without a session and drop silent ones. The hub was suspended for `asleep` seconds."""
        for conn, one in [*self._deciding.items(), *self.asking.items()]:
            one.since += asleep
            one.seen += asleep
            if one.hello is not None and now >= one.since + PATIENCE_S:
                said = "the run's host has not approved this peer within an hour"
                self.dismiss([conn], messages.Refused("approval", said))
            elif now >= self._until(one):
                self.gone(conn)
            elif now >= one.pinged + self.settings.ping_s:
                one.pinged = now
                self._out.send(conn, messages.Ping(now))

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        here = [*self._deciding.values(), *self.asking.values()]
        return min((min(self._until(v), v.pinged + self.settings.ping_s) for v in here), default=inf)

    def _until(self, one: Visitor) -> float:
        return min(one.since + PATIENCE_S, one.seen + self.settings.peer_timeout)
