"""A peer's port for other peers of the run: they fetch objects that it serves, and upload what it takes.

It speaks as much of the hub's protocol as PeerLink.put and fetch need: Hello, Attach, and bulk. Only guests,
as the hub names them, may connect: checked by key at the handshake and by name at Hello.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transport.protocol import CurveKeys, ProtocolError, RunURL, decode_to_hub, encode, messages
from transport.transfer import CompletedUpload, ConnectionRegistry, Inbox
from transport.wire import GUARD_S, Bandwidth, Frames, HubWire, RateLimits, RouterWire, key_of, wire_size

log = logging.getLogger(__name__)

CREDIT = 32  # chunks under way for each session and direction
EARLY, EARLY_S = 4096, 20.0  # requests that wait for their chunk, of all sessions, and how long
EARLY_OF_ONE = 8 * CREDIT  # of one session
EARLY_POLL_S = 0.01  # how often they are looked at
QUIET_S = 3600.0  # no pings here: the hub watches over members
GONE = "it is not served here, or not any more"


@dataclass(frozen=True)
class Fragment:
    """A fragment of an object; `size` and `sha256` are of the whole."""

    payload: bytes | memoryview
    size: int
    sha256: bytes = b""


# (name of a guest, its request) -> the fragment; None: it is not here yet. Raises KeyError, with the reason,
# where it is not served.
Read = Callable[[str, messages.Get], Fragment | None]


@dataclass(frozen=True)
class Row:
    """The objects whose names begin with `prefix`, and the groups of guests that may fetch them."""

    prefix: str
    groups: tuple[str, ...]
    read: Read


@dataclass(frozen=True)
class Uploads:
    """Takes uploads. Both are given the name of a guest, then that of the upload."""

    refusal: Callable[[str, str, int], str | None]  # and its size: why it is not wanted; None: it is
    took: Callable[[str, str, bytes], object]


@dataclass(frozen=True)
class EarlyRequest:
    """A request for a chunk that this peer has not received yet."""

    conn: bytes
    session: str
    message: messages.Get
    until: float  # when it is refused


class PeerServer:
    """One peer's server. It starts before the handshake with the hub, which dials it; guests come later.

    What it calls is called in its own thread.

    Args:
        wire: binds the port; the names of its connections begin with proven keys.
    """

    def __init__(self, wire: HubWire, run: str) -> None:
        self.run = run
        self.uploads = Uploads(lambda guest, name, size: "nothing is uploaded here", lambda *upload: None)
        self.rate_limits = RateLimits(Bandwidth())  # the peer's own, once it has a link to its hub
        self.bytes_up = self.bytes_down = 0
        self._wire = wire
        self._guests: dict[str, Mapping[str, str]] = {}  # by group: name -> key
        self._rows: tuple[Row, ...] = ()
        self._early: deque[EarlyRequest] = deque()  # for chunks that are not here yet
        self._waiting = Counter[str]()  # of `_early`, by session
        self._sessions: dict[str, tuple[str, str]] = {}  # session -> name, key
        self._connections = ConnectionRegistry()
        self._inbox = Inbox(self._refusal)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cocktail-peer-server", daemon=True)

    @classmethod
    def open(cls, at: tuple[str, int], keys: CurveKeys, url: RunURL) -> tuple[PeerServer, int]:
        """Start a server for the hub and guests; return its port too. Raises AddressInUse."""

        def knows(key: str) -> bool:
            return key == url.key or server.knows(key)

        wire = RouterWire(*at, keys, allowed=knows)
        server = cls(wire, url.run)
        server.start()
        return server, wire.port

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wire.wake()
        self._thread.join(5.0)

    # ---- any thread ----------------------------------------------------------------------------------------

    def admit(self, group: str, guests: Mapping[str, str]) -> None:
        """Let these peers, name -> key, connect, in place of those that the group had."""
        self._guests = self._guests | {group: dict(guests)}

    def serve(self, prefix: str, read: Read, *groups: str) -> None:
        """Serve the objects whose names begin so to the guests of these groups."""
        self._rows = *self._rows, Row(prefix, groups, read)

    def finish(self, timeout: float, lacks: Callable[[], object]) -> None:
        """Wait until guests have what they were sent, and `lacks` is false: then this may be closed."""
        until = time.monotonic() + timeout
        while (
            self._thread.is_alive()
            and time.monotonic() < until
            and (lacks() or any(map(self._wire.held, list(self._connections.sessions))))
        ):
            time.sleep(EARLY_POLL_S)

    def knows(self, key: str) -> bool:
        """True if this key belongs to a guest."""
        return any(key in guests.values() for guests in self._guests.values())

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        guard_at = 0.0  # when to check what connections hold
        waiting: deque[tuple[bytes, Frames]] = deque()  # messages that wait for the rate limits
        try:
            while not self._closing:
                idle = EARLY_POLL_S if self._early else GUARD_S
                waiting.extend(self._wire.poll(self._pause(time.monotonic()) if waiting else idle))
                for _ in range(len(self._early)):
                    early = self._early.popleft()
                    self._waiting[early.session] -= 1
                    self._serve(early)
                while waiting and not self._pause(time.monotonic()):
                    self._receive(*waiting.popleft())
                if time.monotonic() >= guard_at:
                    guard_at = time.monotonic() + GUARD_S
                    self._wire.guard(time.monotonic(), self._connections.sessions.get)
        finally:
            self._wire.close()

    def _pause(self, now: float) -> float:
        """Return the seconds until both rate limits allow traffic again."""
        return max(
            0.0, *(bucket.open_at(now) - now for bucket in (self.rate_limits.up, self.rate_limits.down))
        )

    def _count(self, up: int, down: int) -> None:
        self.bytes_up, self.bytes_down, now = self.bytes_up + up, self.bytes_down + down, time.monotonic()
        self.rate_limits.up.take(up, now)
        self.rate_limits.down.take(down, now)

    def _receive(self, conn: bytes, frames: Frames) -> None:
        self._count(0, wire_size(frames))
        try:
            if not 1 <= len(frames) <= 2 or len(frames[0]) > messages.MAX_CONTROL:
                raise ProtocolError(f"{len(frames)} frames")
            self._handle(conn, decode_to_hub(frames[0]), frames[1] if len(frames) > 1 else b"")
        except ProtocolError as error:
            log.debug("at a peer's server", exc_info=error)

    def _handle(self, conn: bytes, message: messages.ToHub, payload: bytes | memoryview) -> None:
        session = self._connections.sessions.get(conn)
        if isinstance(message, messages.Hello):
            self._welcome_guest(conn, message)
        elif isinstance(message, messages.Resume | messages.Attach):
            name, key = self._sessions.get(message.session, ("", ""))
            if key != key_of(conn):
                self._send(conn, messages.Refused("session", "no such visitor"))
                return
            self._connections.own(conn, message.session, None)
            again = self._welcome(name, message.session, resumed=True)
            self._send(conn, messages.Attached(CREDIT) if isinstance(message, messages.Attach) else again)
        elif isinstance(message, messages.Leave):
            self._send(conn, messages.Over("left", False))
        elif session is not None and isinstance(message, messages.Put | messages.Chunk):
            for answer in self._inbox.receive(session, message, payload):
                if isinstance(answer, CompletedUpload):
                    self.uploads.took(self._sessions[session][0], answer.name, answer.parts.data())
                else:
                    self._send(conn, answer)
        elif session is not None and isinstance(message, messages.Get):
            self._serve(EarlyRequest(conn, session, message, time.monotonic() + EARLY_S))

    def _welcome_guest(self, conn: bytes, m: messages.Hello) -> None:
        key = key_of(conn)
        if m.run != self.run or key not in [guests.get(m.name) for guests in self._guests.values()]:
            self._send(conn, messages.Refused("kicked", f"{m.name!r} with this key is not in the round"))
            return
        session = secrets.token_urlsafe(16)
        for old in [s for s, who in self._sessions.items() if who == (m.name, key)]:
            del self._sessions[old]
            self._connections.forget(old)
            self._inbox.drop(old)
        self._sessions[session] = m.name, key
        self._connections.own(conn, session, None)
        self._send(conn, self._welcome(m.name, session, resumed=False))

    def _welcome(self, name: str, session: str, *, resumed: bool) -> messages.Welcome:
        return messages.Welcome(messages.PROTOCOL, self.run, name, session, "", "", [], 0, QUIET_S, resumed)

    def _refusal(self, session: str, name: str, size: int) -> str | None:
        guest, key = self._sessions[session]
        if key not in [guests.get(guest) for guests in self._guests.values()]:
            return f"{guest} is not in the round"
        return self.uploads.refusal(guest, name, size)

    def _serve(self, asked: EarlyRequest) -> None:
        """Serve a fragment, or let the request wait. PROTOCOL.md has these objects and who may fetch each."""
        (name, key), m = self._sessions.get(asked.session, ("", "")), asked.message
        for row in self._rows:
            if m.name.startswith(row.prefix):
                if not key or key not in [self._guests.get(one, {}).get(name) for one in row.groups]:
                    self._refuse(asked, f"{name} is not in the round")
                    return
                try:
                    fragment = row.read(name, m)
                except KeyError as error:
                    self._refuse(asked, str(error.args[0]))
                    return
                if fragment is None:
                    self._wait(asked)
                else:
                    said = messages.Data(m.name, m.index, fragment.size, fragment.sha256)
                    self._send(asked.conn, said, fragment.payload)
                return
        self._refuse(asked, GONE)

    def _refuse(self, asked: EarlyRequest, why: str) -> None:
        self._send(asked.conn, messages.NoObject(asked.message.name, why))

    def _wait(self, asked: EarlyRequest) -> None:
        """Let a request wait, or refuse it: it has waited long, or too many wait."""
        mine = self._waiting[asked.session]
        if time.monotonic() < asked.until and len(self._early) < EARLY and mine < EARLY_OF_ONE:
            self._early.append(asked)
            self._waiting[asked.session] = mine + 1
        else:
            self._refuse(asked, "it is not here yet, or this peer has no time for it")

    def _send(
        self, conn: bytes, message: messages.Message, payload: bytes | memoryview | None = None
    ) -> None:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        self._count(wire_size(frames), 0)
        if not self._wire.send(conn, frames):
            self._connections.drop(conn)
