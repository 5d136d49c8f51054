"""Who may begin a session: what the hub knows of each key, and who waits for the owner's yes.

A key that was let in stays a member: it comes back without being asked again, whatever became of the token.
Members and bans are in the ledger. Those who wait are in memory alone, at most MOST of them, and are given
nothing: no session, so no file, no lease, no packet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from transport import actions as do
from transport.ledger import KnownPeer
from transport.protocol import (
    Hello,
    Leave,
    Message,
    Over,
    Ping,
    Refused,
    RunSettings,
    Wait,
    events,
    short_key,
)
from transport.wire import TokenBuckets, key_of, origin_of

from .roster import Outbox
from .sessions import clean_name

MOST = 16  # connections that wait at once
PATIENCE_S = 3600.0  # that one of them waits
# A session costs the ledger three writes. 256 peers of one house may come back at once; after them, a second:
GREETINGS, GREETINGS_S = 256.0, 4.0  # of one origin
STRIKES = 3  # unusable packets of a key before it is out


class Standing(Enum):
    """How a key stands with the run."""

    STRANGER = "stranger"
    WAITING = "waiting"
    MEMBER = "member"
    BANNED = "banned"


class Act(Enum):
    """What can happen to a key."""

    LET_IN = "shows the token, and no more is asked"
    ASKS = "shows the token, and the owner is to say yes"
    YES = "the owner says yes"
    GONE = "hangs up, or has waited for too long"
    KICKED = "the owner sends it away"
    BANNED = "the owner bans it"
    STRUCK_OUT = "sends its third packet that cannot be used"
    UNBANNED = "the owner lifts the ban"


NEXT: dict[Standing, dict[Act, Standing]] = {
    Standing.STRANGER: {
        Act.LET_IN: Standing.MEMBER,
        Act.ASKS: Standing.WAITING,
        Act.BANNED: Standing.BANNED,
    },
    Standing.WAITING: {
        Act.YES: Standing.MEMBER,
        Act.GONE: Standing.STRANGER,
        Act.KICKED: Standing.STRANGER,
        Act.BANNED: Standing.BANNED,
    },
    Standing.MEMBER: {
        Act.KICKED: Standing.STRANGER,
        Act.BANNED: Standing.BANNED,
        Act.STRUCK_OUT: Standing.BANNED,
    },
    Standing.BANNED: {Act.UNBANNED: Standing.STRANGER},
}


@dataclass
class Asking:
    """A connection that waits for the owner's yes."""

    hello: Hello
    since: float
    seen: float
    pinged: float

    @property
    def name(self) -> str:
        return clean_name(self.hello.name)


class Admission:
    """The standing of every key."""

    def __init__(self, settings: RunSettings, out: Outbox, known: Iterable[KnownPeer]) -> None:
        self.settings, self._out = settings, out
        self.known = {k.key: k for k in known}  # members and the banned
        self.asking: dict[bytes, Asking] = {}  # by connection
        self._greetings = TokenBuckets(GREETINGS_S, GREETINGS)
        if settings.own_key and settings.own_key not in self.known:
            self.known[settings.own_key] = KnownPeer(settings.own_key, "", Standing.MEMBER.value)

    def standing(self, key: str) -> Standing:
        if key in self.known:
            return Standing(self.known[key].standing)
        return Standing.WAITING if self.waiting(key) else Standing.STRANGER

    def waiting(self, key: str) -> list[bytes]:
        """The connections of this key that wait."""
        return [conn for conn in self.asking if key_of(conn) == key]

    def move(self, key: str, act: Act, name: str = "", reason: str = "") -> bool:
        """Follow the table; False where it has no such arrow."""
        before = self.standing(key)
        after = NEXT[before].get(act)
        if after is None:
            return False
        if after in (Standing.MEMBER, Standing.BANNED):
            old = self.known.get(key, KnownPeer(key, "", after.value))
            self.known[key] = replace(old, name=name or old.name, standing=after.value, reason=reason)
            self._out.add(do.Stand(self.known[key]))
        elif key in self.known:
            del self.known[key]
            self._out.add(do.Stand(KnownPeer(key, name, after.value)))
        return True

    def strike(self, key: str, name: str, reason: str) -> bool:
        """A member's packet could not be used. Is it out? Another session is no new beginning."""
        if self.standing(key) is not Standing.MEMBER:  # it was sent away meanwhile
            return False
        self.known[key] = known = replace(self.known[key], strikes=self.known[key].strikes + 1)
        if known.strikes >= STRIKES:
            why = f"{known.strikes} unusable packets, the last: {reason}"
            return self.move(key, Act.STRUCK_OUT, name, why)
        self._out.add(do.Stand(known))
        return False

    def in_turn(self, conn: bytes, now: float) -> bool:
        """May this greeting begin a session now? If not it is not answered: a peer that hears nothing dials
        again after 5 s."""
        return self._greetings.take(origin_of(conn), now)

    # ---- those who wait ------------------------------------------------------------------------------------

    def ask(self, conn: bytes, m: Hello, now: float) -> None:
        """Somebody with the token is here; the owner is told, once a key."""
        key = key_of(conn)
        if conn not in self.asking and len(self.asking) >= MOST:
            self._out.send(conn, Refused("full", f"{MOST} others wait for the owner's yes: try again later"))
            return
        if self.move(key, Act.ASKS):
            self._out.tell(events.PeerAsks(0.0, clean_name(m.name), m.hardware, short_key(key)))
        self.asking[conn] = Asking(m, now, now, now)
        said = f"waiting for the owner's yes, as {self.asking[conn].name}, key {short_key(key)}"
        self._out.send(conn, Wait(said))

    def heard(self, conn: bytes, message: Message, now: float) -> bool:
        """Is it one who waits that said this? It is there, or says goodbye; all else means nothing yet."""
        if conn not in self.asking:
            return False
        self.asking[conn].seen = now
        if isinstance(message, Leave):
            self._out.send(conn, Over("left", False))
            self.gone(conn)
        return True

    def gone(self, conn: bytes) -> None:
        """This connection waits no more."""
        key = key_of(conn)
        if conn in self.asking:
            if self.waiting(key) == [conn]:
                self.move(key, Act.GONE)
            del self.asking[conn]

    def dismiss(self, conns: Iterable[bytes], refused: Refused) -> None:
        """Tell these that they wait in vain."""
        for conn in list(conns):
            self._out.send(conn, refused)
            self.gone(conn)

    def tick(self, now: float, asleep: float) -> None:
        for conn, asking in list(self.asking.items()):
            asking.since += asleep
            asking.seen += asleep
            if now >= asking.since + PATIENCE_S:
                self.dismiss([conn], Refused("approval", "the run's owner has not said yes within an hour"))
            elif now >= asking.seen + self.settings.peer_timeout:
                self.gone(conn)
            elif now >= asking.pinged + self.settings.ping_s:
                asking.pinged = now
                self._out.send(conn, Ping(now))

    def deadline(self) -> float:
        """When `tick` has something to do. inf: never."""
        s = self.settings
        times = [min(a.since + PATIENCE_S, a.seen + s.peer_timeout) for a in self.asking.values()]
        return min([*times, *(a.pinged + s.ping_s for a in self.asking.values())], default=float("inf"))
