"""A stage's lines to its two neighbours, over sockets with CURVE.

The more direct address is dialled, of equal ones that of the stage after. Each line is a connection of
its own, also where both neighbours are the same peer. `StageLine` decides; this is two threads and a lock.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from transport.protocol import (
    AddressInUse,
    CurveKeys,
    LinkLost,
    ProtocolError,
    Route,
    Unreachable,
    UrlError,
    parse_address,
)
from transport.wire import (
    GUARD_S,
    OF_PEERS,
    Bandwidth,
    Connected,
    DealerWire,
    Disconnected,
    Frames,
    HubWire,
    PeerWire,
    RateLimits,
    Received,
    RouterWire,
    TcpRoute,
    key_of,
    wire_size,
)

from .line_probe import LineProbe, LineRates, ProbeAnswers
from .stage_line import FORWARD, GONE_S, LIFE, RENEWED, LineLost, StageLine, StageMessage, State, unpack

ANYWHERE = "0.0.0.0"
LIMIT = 1 << 32  # bytes of a message: the packets of all machines, in rounds that send everything
RETRY_S = 0.5  # until a refused connection is dialled again
MEASURES_S = 4.0  # for a line to be measured, its connection included
BURST = 32  # fragments sent before messages are looked at again
OLD = 64  # connections of before whose late frames are known as such
BEFORE, AFTER = "before", "after"
NAME = re.compile(r"[0-9a-f]{32}")  # of a machine, where another place leads to it


def plain_route(address: str) -> Sequence[Route]:
    """Return the way to a machine at "host:port". Raises UrlError."""
    return (TcpRoute(*parse_address(address)),)


@dataclass(frozen=True)
class Neighbour:
    """The stage before or after, as it is assigned."""

    name: str
    key: str  # CURVE, base64url
    address: str = ""  # of its stage link: "host:port", or "place:port/name"; empty: none
    ring: str = ""  # a line of another ring is another line, also to the same machine


News = StageMessage | LineLost | ProtocolError  # of a neighbour; an error: it breaks the line's rules


@dataclass(eq=False)
class _Line:
    """A line and its present connection."""

    neighbour: Neighbour
    line: StageLine
    wire: PeerWire | None
    conn: bytes = b""  # of the listening end
    old: deque[bytes] = field(default_factory=lambda: deque(maxlen=OLD))
    dial_at: float = 0.0  # infinite: it is dialled
    more: bool = False  # is to be sent at once
    broken: bool = False  # its neighbour breaks the rules


class StageLink:
    """The lines of one stage.

    Args:
        wire: listens, and lets in whose key this `knows`.
        limit: bytes of the longest message that a neighbour may send.
    """

    def __init__(self, wire: HubWire, keys: CurveKeys, limit: int = LIMIT, gone_s: float = GONE_S) -> None:
        self.port, self.key = wire.port, keys.public
        self.rate_limits = RateLimits(Bandwidth())  # the peer's own, once it has a link to its hub
        self.routes_to: Callable[[str], Sequence[Route]] = plain_route  # a machine, by its address
        self.bytes_up = self.bytes_down = 0
        self._wire, self._keys, self._limit, self._gone_s = wire, keys, limit, gone_s
        self._lines: dict[str, _Line] = {}
        self._dropped = set[str]()  # sides to which something was sent before there was a line
        self._probes = ProbeAnswers()
        self._inbox: deque[tuple[_Line, News]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        # called in a line's thread: its connection was made, or was closed or (why) refused, and is dialled
        self.dialled: Callable[[Neighbour, Unreachable | None], None] = lambda neighbour, why: None
        self.lost: Callable[[str], None] = lambda why: None  # told when a neighbour is gone
        # told of a neighbour that breaks the rules, or sends what no stage would send
        self.refused: Callable[[Neighbour], None] = lambda neighbour: None
        self._told = ""  # to `lost`, since the last message
        self._told_of = set[str]()  # keys of neighbours that were refused for a message
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    @classmethod
    def open(cls, keys: CurveKeys, bind: str = ANYWHERE, port: int = 0, hub: str = "") -> StageLink:
        """Listen at a port, 0: any free one. `hub`: key of a hub that may see whether this machine is
        reached. Raises AddressInUse."""
        link: StageLink | None = None  # until it is made, the wire's thread lets nobody in: they dial again

        def allowed(key: str) -> bool:
            return key == hub or (link is not None and link.knows(key))

        try:
            wire = RouterWire(bind, port, keys, 1, allowed=allowed)
        except AddressInUse as error:
            hint = f"this machine of the ring may run here already; else give it another port than {port}"
            error.hints = (hint,)
            raise
        link = cls(wire, keys)
        return link

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="cocktail-stage-link", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- the stage's side, one thread ----------------------------------------------------------------------

    def connect(self, before: Neighbour, after: Neighbour, address: str) -> None:
        """Connect to these neighbours; lines that are new replace those of before, with all they hold, and
        the caller is told as of a neighbour that was started again. `address` is this stage's own.

        Errors: LinkLost: neither end of a line can be dialled.
        """
        for side, neighbour in ((BEFORE, before), (AFTER, after)):
            known = self._lines.get(side)
            if known is not None and known.neighbour == neighbour:
                continue
            if not neighbour.address and not address:
                raise LinkLost(f"neither this stage nor {neighbour.name} can be dialled")
            self._replace(side, neighbour, dials(address, neighbour.address, first=side == AFTER))

    def _replace(self, side: str, neighbour: Neighbour, is_dialled: bool) -> None:
        wire: PeerWire | None = None
        if is_dialled:
            routes = self.routes_to(neighbour.address)
            wire = DealerWire(routes, neighbour.key, self._keys, OF_PEERS)
        line = StageLine(
            secrets.token_bytes(LIFE), side == AFTER, self._limit, time.monotonic(), self._gone_s
        )
        made = _Line(neighbour, line, wire)
        with self._changed:
            old, self._lines[side] = self._lines.get(side), made
            self._inbox = deque((of, what) for of, what in self._inbox if of is not old)
            if old is not None or side in self._dropped:
                self._tell(made, [RENEWED])
            self._dropped.discard(side)
        if old is not None and old.wire is not None:
            old.wire.wake()  # its thread sees that it is replaced
        if wire is not None:
            self._start(lambda: self._dial(side, made))

    def admit(self, keys: Iterable[str]) -> None:
        """Let the machines of these keys measure their lines to this one, and no others from now on."""
        with self._changed:
            self._probes.admit(keys)

    def knows(self, key: str) -> bool:
        """Tell whether this is the key of a neighbour, or of a machine that may measure its line."""
        return key in self._probes or any(line.neighbour.key == key for line in list(self._lines.values()))

    def send(self, message: StageMessage) -> None:
        """Send a message: activations and requests to the next stage, all else to the one before, from any
        thread. Does not wait. Where a neighbour is not connected yet the message is lost, and the caller is
        told once it is, as of one that was started again."""
        side = AFTER if message.kind in FORWARD else BEFORE
        with self._changed:
            line = self._lines.get(side)
            if line is None:
                self._dropped.add(side)
                return
            line.line.send(message)
        (line.wire or self._wire).wake()

    def receive(self, timeout: float) -> StageMessage | LineLost | None:
        """Wait for what a neighbour sends, or becomes; None: nothing in so many seconds. For one thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox, timeout)
            if not self._inbox:
                return None
            line, what = self._inbox.popleft()
            if isinstance(what, StageMessage):
                line.line.took(what)
                self._told = ""
                return what
        if isinstance(what, ProtocolError):
            self.refused(line.neighbour)
            what = LineLost(f"breaks the rules of its line: {what}")
        lost = LineLost(f"{line.neighbour.name} {what.why}")
        if lost.why != self._told:  # of a ring of two, both lines are to the same machine
            self._told = lost.why
            self.lost(lost.why)
        return lost

    def refuse(self, kind: str, why: str) -> None:
        """Note that a neighbour has sent a message of this kind, which no stage would send."""
        line = self._lines.get(BEFORE if kind in FORWARD else AFTER)
        if line is not None and line.neighbour.key not in self._told_of:
            self._told_of.add(line.neighbour.key)
            self.lost(f"{line.neighbour.name} {why}")
            self.refused(line.neighbour)

    def close(self) -> None:
        self._closing = True
        self._wire.wake()
        for line in list(self._lines.values()):
            if line.wire is not None:
                line.wire.wake()
        for thread in self._threads:
            thread.join(5.0)

    # ---- threads: one listens, one more for each line that is dialled --------------------------------------

    def _listen(self) -> None:
        guard_at = 0.0
        try:
            while not self._closing:
                lines = [line for line in list(self._lines.values()) if line.wire is None]
                for conn, frames in self._wire.poll(self._pause(lines, time.monotonic())):
                    with self._changed:
                        self._arrived_at_port(conn, frames)
                now = time.monotonic()
                for line in lines:
                    if not self._flow(line, partial(self._wire.send, line.conn)) or line.line.is_quiet(now):
                        line.line.closed()
                if now >= guard_at:
                    guard_at = now + GUARD_S
                    self._wire.guard(now, self._session_of)
        finally:
            self._wire.close()

    def _session_of(self, conn: bytes) -> str | None:
        if key_of(conn) in self._probes:
            return key_of(conn)
        return next((line.neighbour.name for line in list(self._lines.values()) if line.conn == conn), None)

    def _arrived_at_port(self, conn: bytes, frames: Frames) -> None:
        line = next((line for line in self._lines.values() if line.wire is None and line.conn == conn), None)
        if line is None:
            if self._answered(conn, frames):
                return
            found = unpack(frames)
            if found is None or not isinstance(found[0], State):
                return
            line = self._lines.get(BEFORE if found[0].before else AFTER)
            mine = line is not None and line.wire is None and line.neighbour.key == key_of(conn)
            if line is None or not mine or conn in line.old:
                return
            line.old.append(line.conn)
            line.conn = conn
            line.line.opened(time.monotonic())
        self._take(line, frames)

    def _answered(self, conn: bytes, frames: Frames) -> bool:
        """Answer a machine that measures its line; returns False where this is no message of such a one."""
        key = key_of(conn)
        if key not in self._probes:
            return False
        answer = self._probes.answer(key, frames, self.rate_limits.lent)
        if answer is not None:
            self._count(time.monotonic(), frames, answer)
            self._wire.send(conn, answer)
        elif key not in self._probes:
            self._wire.hang_up(conn)
        return answer is not None

    def _dial(self, side: str, line: _Line) -> None:
        assert line.wire is not None
        wire = line.wire
        try:
            while not self._closing and self._lines[side] is line:
                now = time.monotonic()
                if now >= line.dial_at:
                    line.dial_at = inf
                    wire.dial(0)
                elif line.line.is_quiet(now):
                    wire.hang_up(0)
                    self._lost(line, now)
                for event in wire.poll(self._pause([line], now)):
                    with self._changed:
                        if isinstance(event, Connected):
                            line.line.opened(time.monotonic())
                            self.dialled(line.neighbour, None)
                        elif isinstance(event, Disconnected):
                            self._ended(line, event.error)
                        elif isinstance(event, Received):
                            self._take(line, event.frames)
                if not self._flow(line, lambda frames: wire.send(0, frames)):
                    wire.hang_up(0)
                    self._lost(line, time.monotonic())
        finally:
            wire.close()

    def _ended(self, line: _Line, why: Unreachable | ProtocolError | None) -> None:
        """Handle the end of a connection; one that has broken the rules is not read any more."""
        if isinstance(why, ProtocolError):
            line.broken = True
            self._tell(line, [why])
            why = None
        self._lost(line, time.monotonic(), why)

    def _lost(self, line: _Line, now: float, why: Unreachable | None = None) -> None:
        """Dial a lost connection at once; one that was not made, later."""
        line.dial_at = now if line.line.open else now + RETRY_S
        line.line.closed()
        self.dialled(line.neighbour, why)

    def _take(self, line: _Line, frames: Frames) -> None:
        now = time.monotonic()
        self._count(now, came=frames)
        if line.broken:
            return
        try:
            self._tell(line, line.line.receive(frames, now))
        except ProtocolError as error:
            line.broken = True
            self._tell(line, [error])

    def _count(self, now: float, came: Frames = (), sent: Frames = ()) -> None:
        """Count the bytes of messages that came and are sent, and charge them to the rate limits."""
        with self._changed:
            self.bytes_down += wire_size(came)
            self.bytes_up += wire_size(sent)
        self.rate_limits.down.take(wire_size(came), now)
        self.rate_limits.up.take(wire_size(sent), now)

    def measure(self, key: str, address: str) -> LineRates | None:
        """Measure the line to the machine of this key, which answers once it is told of this one's.

        Takes a second or two, MEASURES_S at most. Any thread may call it. None: there is no answer. Raises
        UrlError.
        """
        wire = DealerWire(self.routes_to(address), key, self._keys, OF_PEERS)
        probe, until = LineProbe(self.rate_limits.lent), time.monotonic() + MEASURES_S
        dial_at, sent = 0.0, False
        try:
            while (now := time.monotonic()) < until and not probe.done and not self._closing:
                if now >= dial_at:
                    dial_at = inf
                    wire.dial(0)
                for event in wire.poll(min(until - now, RETRY_S)):
                    came_at = time.monotonic()
                    if isinstance(event, Received):
                        self._count(came_at, came=event.frames)
                    if isinstance(event, Disconnected):
                        if sent:
                            return probe.measured
                        dial_at = now + RETRY_S  # it may not have been told of this machine yet
                    elif isinstance(event, Connected) or probe.receive(event.frames, came_at):
                        sent = True
                        if (frames := probe.next(time.monotonic())) is not None:
                            self._count(time.monotonic(), sent=frames)
                            wire.send(0, frames)
                if sent:
                    probe.look(time.monotonic())
        finally:
            wire.close()
        return probe.measured

    def _tell(self, line: _Line, news: Iterable[News]) -> None:
        if line not in self._lines.values():
            return  # replaced, while its thread had this at hand
        self._inbox.extend((line, what) for what in news)
        self._changed.notify_all()

    def _flow(self, line: _Line, send: Callable[[Frames], bool]) -> bool:
        """Send what the line has, and tell when its neighbour is silent; returns False where the connection
        is closed."""
        with self._changed:
            now = time.monotonic()
            self._tell(line, line.line.look(now))
            for _ in range(BURST):
                waits = line.broken or self.rate_limits.up.open_at(now) > now
                frames = None if waits else line.line.next(now)
                line.more = frames is not None
                if frames is None:
                    return True
                self._count(now, sent=frames)
                if not send(frames):
                    return False
            return True

    def _pause(self, lines: Sequence[_Line], now: float) -> float:
        """Return the seconds that a poll may take, unless it is woken."""
        if any(line.more for line in lines):
            return 0.0
        opens = self.rate_limits.up.open_at(now) - now
        return min(GUARD_S, opens) if opens > 0 else GUARD_S


def directness(address: str) -> int:
    """Rank a machine's address: 2 is dialled directly, 1 through something else, 0 not at all."""
    return 0 if not address else 1 if "/" in address else 2


def dials(here: str, there: str, *, first: bool) -> bool:
    """Tell whether of two machines the one at `here` dials the one at `there`: the more direct address is
    dialled, and of equal ones that of the second machine."""
    return bool(there) and (directness(there), first) > (directness(here), False)


def check_address(address: str) -> None:
    """Raise UrlError where this is neither "host:port" nor "place:port/name"."""
    place, slash, name = address.partition("/")
    parse_address(place)
    if slash and not NAME.fullmatch(name):
        raise UrlError(f"the name {name[:40]!r} at {place[:80]} is not of 32 hex digits")
