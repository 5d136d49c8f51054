"""A peer's session as a state machine without sockets, threads and clock; it repeats messages on reconnect.

    OFFLINE    no control connection
    GREETING   Hello or Resume is sent
    JOINED     Welcome has come
    OVER       the run is over, or this peer has left it
    REFUSED    the hub refused this peer for good

Every message of a peer is idempotent and kept until the hub has shown that it received it: Ready until a
Round arrives, a Report until the Committed of its round, an evaluation until a later round opens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import msgspec
from msgspec import structs

from transport.protocol import ProtocolError, messages


class SessionState(Enum):
    OFFLINE = "offline"
    GREETING = "greeting"
    JOINED = "joined"
    OVER = "over"
    REFUSED = "refused"


# the messages handled in each state; others are ignored and counted
HEARD: dict[SessionState, tuple[type[messages.Message], ...]] = {
    SessionState.OFFLINE: (),
    SessionState.GREETING: (messages.Welcome, messages.Wait, messages.Refused, messages.Over, messages.Ping),
    SessionState.JOINED: (
        messages.Welcome,
        messages.Round,
        messages.Committed,
        messages.Extension,
        messages.Over,
        messages.Refused,
        messages.Ping,
    ),
    SessionState.OVER: (messages.Ping, messages.Over),
    SessionState.REFUSED: (),
}
M = TypeVar("M", bound=msgspec.Struct)

KEPT = 64  # rounds not taken, commits, orders: more than any hub has a peer wait for
KEPT_BYTES = 256 * 1024  # of each of these, as they are on the wire: in memory they take many times that
OPENED = 4096  # leases not delivered that are remembered; more than any hub gives
SILENT_PINGS = 6  # a hub silent for this many pings is redialled,
SILENT_S = 5.0  # or for this long, where that is more
DOUBTED_PINGS, DOUBTED_S = 4, 4.0  # the same where the run may be elsewhere, if the hub is lost


class Newest(Generic[M]):
    """Messages by number, in the order in which they came: so many of the highest numbers, within a size."""

    def __init__(self, most: int = KEPT) -> None:
        self._kept: dict[int, tuple[M, int]] = {}  # and bytes on the wire
        self._most, self._size = most, 0

    def add(self, number: int, message: M) -> None:
        """Keep a message, in place of one of the same number; drop the lowest numbers, where there are too
        many."""
        self.pop(number)
        self._kept[number] = message, len(msgspec.msgpack.encode(message))
        self._size += self._kept[number][1]
        while (many := len(self._kept)) > self._most or (many > 1 and self._size > KEPT_BYTES):
            self.pop(min(self._kept))

    def pop(self, number: int) -> M | None:
        """Drop the message of a number, if it is here, and return it."""
        message, size = self._kept.pop(number, (None, 0))
        self._size -= size
        return message

    def popleft(self) -> M | None:
        """Drop the message that came first, and return it."""
        return self.pop(next(iter(self._kept))) if self._kept else None

    def get(self, number: int) -> M | None:
        return self._kept[number][0] if number in self._kept else None

    def values(self) -> list[M]:
        return [message for message, _ in self._kept.values()]

    def clear(self) -> None:
        self._kept, self._size = {}, 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)


@dataclass(frozen=True)
class Elsewhere:
    """A place at which the run is looked for, in turns with the hub, where that is lost. It lets this peer
    wait until it is the hub itself."""

    place: str
    key: str  # that it proves
    dialled: Callable[[], object]


class PeerState:
    """One peer's session. Methods return the control messages to send."""

    def __init__(self, hello: messages.Hello) -> None:
        self.hello = hello
        self.link = SessionState.OFFLINE
        self.welcome: messages.Welcome | None = None
        self.sessions = 0  # how many sessions this peer has had
        self.newest = -1  # newest committed round known
        self.commits = Newest[messages.Committed]()  # by round
        self.rounds = Newest[messages.Round]()  # by round: opened, not yet taken by `next_round`
        self.taken = -1  # newest round taken
        self._unheard = Newest[messages.Extension]()  # as they came, until `listen` is called
        self._ordered = 0  # how many came
        self._takers: Mapping[str, Callable[[bytes], object]] | None = None
        self.over: messages.Over | None = None
        self.refused: messages.Refused | None = None
        self.waits = ""  # what the hub waits for before it welcomes this peer
        self.heard = 0.0  # when the hub last sent something
        self.parted = False  # the hub has answered this peer's Leave
        self.ignored = 0
        self.offer_again = False  # the hub asks again for an update
        self.term = 0  # the highest met: a hub of a lower term was replaced and is ignored
        self.elsewhere: Elsewhere | None = None
        self.rolled_back = ""  # what the hub lacks of what this peer has, if it took over
        self.replaced = ""  # why the hub that answers is ignored, since the newest Welcome
        self._holds: set[int] = set()  # rounds whose leases this peer has received and not delivered
        self._ready: messages.Ready | None = None
        self._was_ready = False
        self._report: messages.Report | None = None
        self._evaluated: deque[messages.Evaluated] = deque(maxlen=4)
        self._leave: messages.Leave | None = None
        self._opened_as: messages.Round | None = None  # the newest round taken
        self.anew: messages.Round | None = None  # the same, announced anew: what was exchanged for it is void
        self.voids: Callable[[messages.Round, messages.Round], bool] = lambda old, new: False
        self._said_hello = False

    # ---- from the wire -------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[messages.Message]:
        self.heard, self.link = now, SessionState.GREETING
        self._said_hello = self.welcome is None
        if self.welcome is None:
            return [self.hello]
        w = self.welcome
        return [
            messages.Resume(
                messages.PROTOCOL,
                w.run,
                w.name,
                w.session,
                waiting=-1 if self._report is None else self._report.round,
                ready=self._was_ready,
                holds=sorted(self._holds),
                term=self.term,
                address=self.hello.address,
                extra=self.hello.extra,
            )
        ]

    def ask_anew(self, now: float) -> list[messages.Message]:
        """Resume on the connection that is up, to get a new Welcome with the hub's current offers."""
        return self.connected(now) if self.link is SessionState.JOINED else []

    def disconnected(self) -> None:
        if self.link not in (SessionState.OVER, SessionState.REFUSED):
            self.link = SessionState.OFFLINE

    def receive(self, message: messages.ToPeer, now: float) -> list[messages.Message]:
        self.heard = now
        if not isinstance(message, HEARD[self.link]):
            self.ignored += 1
            return []
        if isinstance(message, messages.Ping):
            return [messages.Pong(message.sent)]
        if isinstance(message, messages.Welcome):
            return self._welcomed(message)
        if isinstance(message, messages.Wait):
            self.waits = message.reason
        if isinstance(message, messages.Refused):
            return self._refuse(message)
        if isinstance(message, messages.Over):
            self.over, self.link = self.over or message, SessionState.OVER
            self.parted = self._leave is not None
        elif isinstance(message, messages.Round):
            return self._opened(message)
        elif isinstance(message, messages.Committed):
            return self._committed(message)
        elif isinstance(message, messages.Extension):
            self._hear(message)
        return []

    def introduce(self, name: str, body: bytes) -> None:
        """Have each Hello and Resume from now on bring this body of an extension."""
        self.hello = structs.replace(self.hello, extra={**self.hello.extra, name: body})

    def listen(self, takers: Mapping[str, Callable[[bytes], object]]) -> None:
        """Have bodies of extensions taken by name: those that have come, and others as they come. One that
        cannot be read (ProtocolError) is ignored."""
        self._takers = takers
        while (message := self._unheard.popleft()) is not None:
            self._hear(message)

    def _hear(self, message: messages.Extension) -> None:
        if self._takers is None:
            self._ordered += 1
            self._unheard.add(self._ordered, message)
        elif (take := self._takers.get(message.name)) is None:
            self.ignored += 1
        else:
            try:
                take(message.body)
            except ProtocolError:
                self.ignored += 1

    def _welcomed(self, message: messages.Welcome) -> list[messages.Message]:
        if message.term < self.term:
            self._ignore_hub(f"it is of term {message.term}, the newest met is {self.term}")
            return []
        self.replaced = ""
        self.link, self._said_hello = SessionState.JOINED, False
        if not message.resumed:
            self.sessions += 1
            self.rounds.clear()
            self._ready = self._report = None
            self._was_ready, self.taken, self.anew = False, -1, None
            self._evaluated.clear()
            self._holds.clear()
        if message.round <= self.newest and message.term > self.term:
            self.rolled_back = f"another hub took over without round {message.round}, which this peer has"
        self.term = message.term
        self.welcome = message
        self.newest = max(self.newest, message.round - 1)
        kept = self._ready, self._report, *self._evaluated, self._leave
        return [m for m in kept if m is not None]

    def _refuse(self, message: messages.Refused) -> list[messages.Message]:
        if message.code == "session":  # the hub was restarted, or gave this peer up: begin a new session
            if self._said_hello:  # more answers to messages of the old session
                self.ignored += 1
                return []
            self.link, self._said_hello = SessionState.GREETING, True
            return [self.hello]
        if message.code == "term":
            self._ignore_hub(message.reason)
            return []
        self.refused, self.link = message, SessionState.REFUSED
        return []

    def _ignore_hub(self, why: str) -> None:
        """Hang up on a hub that was replaced; redial until the newer one answers."""
        self.replaced, self.link = why, SessionState.OFFLINE

    def _opened(self, message: messages.Round) -> list[messages.Message]:
        self._ready = None
        while self._evaluated and self._evaluated[0].round < message.round:
            self._evaluated.popleft()
        if message.exchange and message.round <= self.taken:  # repeated after a reconnect, or reopened
            old = self._opened_as
            if old is not None and message.round == self.taken and self.voids(old, message):
                self.anew = message
                return []
            self.offer_again = True
            return [] if self._report is None else [self._report]
        if message.samples and len(self._holds) < OPENED:
            self._holds.add(message.round)
        self.rounds.add(message.round, message)
        return []

    def _committed(self, message: messages.Committed) -> list[messages.Message]:
        self.commits.add(message.round, message)
        self.newest = max(self.newest, message.round)
        report, again = self._report, list[messages.Message]()
        if report is not None and report.round <= message.round:
            if report.round == message.round and self.welcome and self.welcome.name in message.accepted:
                self._holds.difference_update(report.delivers)
            else:  # the packet came too late, the report perhaps not: repeated it is a sign of life
                again = [report]
            self._report = None
        # A round committed before this peer took it stays in `rounds`: this peer still delivers its lease,
        # and the late report tells the hub that the peer is back.
        return again

    # ---- from the caller -----------------------------------------------------------------------------------

    def ready(self, message: messages.Ready) -> list[messages.Message]:
        self._ready, self._was_ready = message, True
        return self._if_joined(message)

    def report(self, message: messages.Report) -> list[messages.Message]:
        if message.round not in self.commits:
            self._report = message
        return self._if_joined(message)

    def evaluated(self, message: messages.Evaluated) -> list[messages.Message]:
        self._evaluated.append(message)
        return self._if_joined(message)

    def leave(self, message: messages.Leave) -> list[messages.Message]:
        self._leave = message
        return [message] if self.link in (SessionState.JOINED, SessionState.OVER) else []

    def fetches(self, round: int) -> bool:
        """True if this peer is a member of the round."""
        opened = self.rounds.get(round)
        return round == self.taken or (opened is not None and opened.exchange)

    def take_round(self) -> messages.Round | None:
        """Pop the next round to work on, if one is open."""
        round = self.rounds.popleft()
        if round is None:
            return None
        if round.exchange:  # else it may still be opened with this peer
            self.taken = round.round
        self._opened_as, self.anew = round, None
        return round

    def settled(self, round: int) -> bool:
        """True if the round is committed or announced anew, or the run is over."""
        return round in self.commits or self.anew is not None or self.over is not None

    def take_anew(self) -> messages.Round | None:
        """Pop the round that was taken, if it was announced anew."""
        round, self.anew = self.anew, None
        self._opened_as = round or self._opened_as
        return round

    def _if_joined(self, message: messages.Message) -> list[messages.Message]:
        return [message] if self.link is SessionState.JOINED else []

    def silent_until(self) -> float:
        """Return the time at which a silent hub is to be redialled."""
        ping_s = self.welcome.ping_s if self.welcome else 1.0
        doubted = max(DOUBTED_S, DOUBTED_PINGS * ping_s), max(SILENT_S, SILENT_PINGS * ping_s)
        return self.heard + doubted[self.elsewhere is None]
