"""The peer without sockets, threads and clock: its session, and what is said again after a reconnect.

    OFFLINE    no control connection
    GREETING   Hello or Resume is sent
    JOINED     Welcome has come
    OVER       the run is over, or this peer's part in it
    REFUSED    the hub said no, and will say it again

Everything a peer says is idempotent and kept until the hub has shown that it knows: Ready until a Round
comes, a Report until the Committed of its round, an evaluation until a later round opens.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from transport.protocol import (
    PROTOCOL,
    AggregatorInfo,
    Close,
    Committed,
    Evaluated,
    Hello,
    Holds,
    Leave,
    Message,
    Over,
    Ping,
    Pong,
    Ready,
    Refused,
    Report,
    Resigns,
    Resume,
    Round,
    ToPeer,
    Wait,
    Welcome,
)


class SessionState(Enum):
    OFFLINE = "offline"
    GREETING = "greeting"
    JOINED = "joined"
    OVER = "over"
    REFUSED = "refused"


# which message means something in which state; others are ignored, and counted
HEARD: dict[SessionState, tuple[type[Message], ...]] = {
    SessionState.OFFLINE: (),
    SessionState.GREETING: (Welcome, Wait, Refused, Over, Ping),
    SessionState.JOINED: (Welcome, Round, Close, Committed, Over, Refused, Ping),
    SessionState.OVER: (Ping, Over),
    SessionState.REFUSED: (),
}
KEPT_COMMITS = 64
OPENED = 4096  # rounds not taken, and leases not delivered, remembered; more than any hub gives
SILENT_PINGS = 6  # a hub that misses this many is dialled again


class PeerState:
    """One peer's view of its run. Methods return the control messages to send."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.link = SessionState.OFFLINE
        self.welcome: Welcome | None = None
        self.sessions = 0  # how many sessions this peer has had
        self.newest = -1  # newest committed round heard of
        self.commits: dict[int, Committed] = {}
        self.rounds: deque[Round] = deque(maxlen=OPENED)  # opened, not yet taken by `next_round`
        self.taken = -1  # newest round taken
        self.orders: deque[Round | Close | Committed] = deque(maxlen=OPENED)  # of a peer that owns shards
        self.over: Over | None = None
        self.refused: Refused | None = None
        self.waits = ""  # what the hub says it waits for, before it welcomes this peer
        self.heard = 0.0  # when the hub last said something
        self.parted = False  # the hub has heard this peer's Leave
        self.ignored = 0
        self.offer_again = False  # the hub asks again for an update that it had or was to have
        self.term = 0  # the highest met: a hub of a lower one was replaced, and speaks for nobody
        self.replaced = ""  # what such a hub said of itself, since the newest Welcome
        self._holds: set[int] = set()  # rounds whose leases this peer heard of and has not delivered
        self._ready: Ready | None = None
        self._was_ready = False
        self._report: Report | None = None
        self._evaluated: deque[Evaluated] = deque(maxlen=4)
        self._leave: Leave | None = None
        self._holding: Holds | None = None  # of an owner: until its round is committed
        self._resigns: Resigns | None = None  # of an owner that is to leave
        self.owners: list[AggregatorInfo] = []  # of the newest round taken
        self.reopened: Round | None = None  # that round again, with other owners
        self.assembles = False  # the packet of the newest round is put together from its owners'
        self._said_hello = False

    # ---- in: from the wire ---------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Message]:
        self.heard, self.link = now, SessionState.GREETING
        self._said_hello = self.welcome is None
        if self.welcome is None:
            return [self.hello]
        w, waiting = self.welcome, -1 if self._report is None else self._report.round
        holds = sorted(self._holds)
        said = waiting, self._was_ready, holds, self.term, self.hello.owns, self.hello.address
        return [Resume(PROTOCOL, w.run, w.name, w.session, *said)]

    def ask_anew(self, now: float) -> list[Message]:
        """Be welcomed again on the connection that is up: what the hub offers may have changed."""
        return self.connected(now) if self.link is SessionState.JOINED else []

    def disconnected(self) -> None:
        if self.link not in (SessionState.OVER, SessionState.REFUSED):
            self.link = SessionState.OFFLINE

    def receive(self, message: ToPeer, now: float) -> list[Message]:
        self.heard = now
        if not isinstance(message, HEARD[self.link]):
            self.ignored += 1
            return []
        if isinstance(message, Ping):
            return [Pong(message.sent)]
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if self.hello.owns and isinstance(message, Round | Close | Committed):
            self.orders.append(message)
        if isinstance(message, Wait):
            self.waits = message.reason
        if isinstance(message, Refused):
            return self._refuse(message)
        if isinstance(message, Over):
            self.over, self.link = self.over or message, SessionState.OVER
            self.parted = self._leave is not None
        elif isinstance(message, Round):
            return self._opened(message)
        elif isinstance(message, Committed):
            return self._committed(message)
        return []

    def _welcomed(self, message: Welcome) -> list[Message]:
        if message.term < self.term:
            self._shun(f"it is of term {message.term}, the newest met is {self.term}")
            return []
        self.term, self.replaced = message.term, ""
        self.link, self._said_hello = SessionState.JOINED, False
        if not message.resumed:
            self.sessions += 1
            self.rounds.clear()
            self._ready = self._report = None
            self._was_ready, self.taken, self.reopened = False, -1, None
            self._evaluated.clear()
            self._holds.clear()
        self.welcome = message
        self.newest = max(self.newest, message.round - 1)
        again: list[Message | None] = [
            self._ready,
            self._report,
            *self._evaluated,
            self._holding,
            self._resigns,
            self._leave,
        ]
        return [m for m in again if m is not None]

    def _refuse(self, message: Refused) -> list[Message]:
        if message.code == "session":  # the hub was restarted, or gave this peer up: begin anew
            if self._said_hello:  # the answers to what was said in the old session, one each
                self.ignored += 1
                return []
            self.link, self._said_hello = SessionState.GREETING, True
            return [self.hello]
        if message.code == "term":
            self._shun(message.reason)
            return []
        self.refused, self.link = message, SessionState.REFUSED
        return []

    def _shun(self, why: str) -> None:
        """This hub was replaced by another: hang up, and dial again until the other answers."""
        self.replaced, self.link = why, SessionState.OFFLINE

    def _opened(self, message: Round) -> list[Message]:
        self._ready = None
        self.assembles = any(owner.address for owner in message.owners)
        while self._evaluated and self._evaluated[0].round < message.round:
            self._evaluated.popleft()
        if message.exchange and message.round <= self.taken:  # said again after a reconnect, or opened again
            if message.round == self.taken and message.owners != self.owners:  # it was cut for others
                self.reopened = message
                return []
            self.offer_again = True
            return [] if self._report is None else [self._report]
        if message.samples and len(self._holds) < OPENED:
            self._holds.add(message.round)
        same = [r for r in self.rounds if r.round == message.round]
        for old in same:
            self.rounds.remove(old)
        self.rounds.append(message)
        return []

    def _committed(self, message: Committed) -> list[Message]:
        self.commits[message.round] = message
        while len(self.commits) > KEPT_COMMITS:
            del self.commits[min(self.commits)]
        self.newest = max(self.newest, message.round)
        if self._holding is not None and self._holding.round <= message.round:
            self._holding = None
        report, again = self._report, list[Message]()
        if report is not None and report.round <= message.round:
            if report.round == message.round and self.welcome and self.welcome.name in message.accepted:
                self._holds.difference_update(report.delivers)
            else:  # its packet came too late, its report perhaps not: said again it means "I am here"
                again = [report]
            self._report = None
        # A round that was committed before this peer took it stays in `rounds`: its lease is this peer's to
        # deliver, and the report of it, late as it is, tells the hub that the peer is there again.
        return again

    # ---- in: from the caller -------------------------------------------------------------------------------

    def ready(self, message: Ready) -> list[Message]:
        self._ready, self._was_ready = message, True
        return self._if_joined(message)

    def report(self, message: Report) -> list[Message]:
        if message.round not in self.commits:
            self._report = message
        return self._if_joined(message)

    def evaluated(self, message: Evaluated) -> list[Message]:
        self._evaluated.append(message)
        return self._if_joined(message)

    def holding(self, message: Holds) -> list[Message]:
        self._holding = message
        return self._if_joined(message)

    def resigns(self, last: bool, lost: bool = False) -> list[Message]:
        self._resigns = Resigns(last, lost)
        return self._if_joined(self._resigns)

    def leave(self, message: Leave) -> list[Message]:
        self._leave = message
        return [message] if self.link in (SessionState.JOINED, SessionState.OVER) else []

    @property
    def takes_part(self) -> bool:
        """Has this peer been given a round in this session?"""
        return self.taken >= 0

    def take_round(self) -> Round | None:
        """The next round to work on, if one is open."""
        if not self.rounds:
            return None
        round = self.rounds.popleft()
        self.taken, self.owners, self.reopened = round.round, round.owners, None
        return round

    def settled(self, round: int) -> bool:
        """Is there nothing more to wait for in this round: it is committed, or open again, or all is over?"""
        return round in self.commits or self.reopened is not None or self.over is not None

    def take_reopened(self) -> Round | None:
        """The round that was taken, where it is open again with other owners: its parts are void."""
        round, self.reopened = self.reopened, None
        if round is not None:
            self.owners = round.owners
        return round

    def _if_joined(self, message: Message) -> list[Message]:
        return [message] if self.link is SessionState.JOINED else []

    def silent_until(self) -> float:
        """When a hub that says nothing more is to be dialled again."""
        ping_s = self.welcome.ping_s if self.welcome else 1.0
        return self.heard + max(5.0, SILENT_PINGS * ping_s)
