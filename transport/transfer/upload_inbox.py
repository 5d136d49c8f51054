"""Uploads and connections of a server, a hub or a peer's: chunks in any order until each upload is complete.

A session has one connection for control and a few for bulk, with limits on what it may ask of the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from transport.protocol import ProtocolError, messages
from transport.wire import MAX_BUFFERED, TokenBuckets

from .chunks import ChunkBuffer
from .congestion_window import MIN_FRAGMENT

MAX_UPLOADS = 2  # uploads of one session under way: an update and a handoff
POOL = 64 << 20  # bytes of the uploads of newcomers, all together
Key = tuple[str, str]  # session, name

FULL = "other newcomers' uploads fill the hub: try again in the next round"


@dataclass(frozen=True)
class CompletedUpload:
    """A complete upload, as its sender sent it: CURVE authenticates every chunk, and each names its upload.
    The reader must check the content: a packet has a checksum of its own."""

    session: str
    name: str
    parts: ChunkBuffer


class Inbox:
    """All uploads to a hub, or to a shard server.

    Those of newcomers, of whom the run has no update yet, share `pool` bytes: complete ones count too, until
    `forget` says that their round is over. Where they are full, the uploads of the origin that has most give
    way.

    Args:
        refuses: returns why an upload (session, name, bytes) is not wanted, or None.
        origin_of: returns the origin of a session that is a newcomer; None: it is none.
    """

    def __init__(
        self,
        refuses: Callable[[str, str, int], str | None],
        origin_of: Callable[[str], str | None] = lambda session: None,
        pool: int = POOL,
    ) -> None:
        self._refuses, self._origin_of = refuses, origin_of
        self.at_once, self.pool = MAX_UPLOADS, pool
        self._parts: dict[Key, ChunkBuffer] = {}
        self._newcomers: dict[Key, tuple[str, int]] = {}  # their uploads -> origin, bytes that are here

    def receive(
        self, session: str, message: messages.Put | messages.Chunk, payload: bytes | memoryview
    ) -> list[messages.Message | CompletedUpload]:
        """Return the answers to one message, and the upload if it is complete now."""
        key = (session, message.name)
        if isinstance(message, messages.Put):
            return [self._put(key, message)]
        parts = self._parts.get(key)
        if parts is None:
            return [messages.PutDone(message.name, False, "no upload of this name is under way")]
        if message.of not in (b"", parts.sha256[: messages.UPLOAD_TAG]):
            return []  # it was sent before this `Put`, on another connection: no answer is awaited
        try:
            parts.add(message.index, payload)
        except ProtocolError as error:
            self._drop(key)
            return [messages.PutDone(message.name, False, str(error))]
        if key in self._newcomers:
            self._newcomers[key] = self._newcomers[key][0], parts.map.received
            if not self._fits(key):
                return [messages.PutDone(message.name, False, FULL)]
        if not parts.map.whole:
            return [messages.Ack(message.name, message.index)]
        del self._parts[key]
        return [messages.PutDone(message.name, True), CompletedUpload(session, message.name, parts)]

    def _fits(self, key: Key) -> bool:
        """Make room for what newcomers upload; False where this upload had to give way itself."""
        while sum(size for _, size in self._newcomers.values()) > self.pool:
            held = Counter[str]()
            for origin, size in self._newcomers.values():
                held[origin] += size
            crowd = held.most_common(1)[0][0]
            mine = {one: size for one, (origin, size) in self._newcomers.items() if origin == crowd}
            self._drop(max((one for one in mine if one in self._parts), key=mine.__getitem__, default=key))
            if key not in self._newcomers:
                return False
        return True

    def _drop(self, key: Key) -> None:
        self._parts.pop(key, None)
        self._newcomers.pop(key, None)

    def _put(self, key: tuple[str, str], m: messages.Put) -> messages.Message:
        reason = self._refuses(*key, m.size)
        if reason is not None:
            self._drop(key)
            return messages.PutDone(m.name, False, reason)
        old = self._parts.get(key)
        if old is None or (old.map.size, old.map.chunk, old.sha256) != (m.size, m.chunk, m.sha256):
            old = self._parts[key] = ChunkBuffer(m.size, m.sha256, m.chunk)
            if (origin := self._origin_of(key[0])) is not None:
                self._newcomers[key] = origin, 0
            for other in [k for k in self._parts if k[0] == key[0]][: -self.at_once]:
                self._drop(other)
        return messages.Have(m.name, old.map.bitmap())

    def under_way(self, session: str, name: str) -> tuple[int, int] | None:
        """Return the bytes that are here of an upload, and its size; None: it is not under way."""
        parts = self._parts.get((session, name))
        return None if parts is None else (parts.map.received, parts.map.size)

    def drop(self, session: str) -> None:
        """Forget the uploads of a session that is over."""
        for key in [k for k in {**self._parts, **self._newcomers} if k[0] == session]:
            self._drop(key)

    def forget(self, which: Callable[[str], bool]) -> None:
        """Forget the uploads whose name `which` selects."""
        for key in [k for k in {**self._parts, **self._newcomers} if which(k[1])]:
            self._drop(key)


MAX_CONNECTIONS = 8  # of one session; a peer has five, a bad line leaves some behind
# Messages of one connection: in a burst, and a second. One that fills a line of 2 Gbit/s carries or requests
# 1000 chunks a second; others have a few messages a round.
MESSAGES, MESSAGES_S = 2000.0, 1000.0
KIB = 1024  # bytes of a message that cost as much as one more message
# Messages of one session that ask for, or bring, what is not wanted: in a burst, and a second. An honest peer
# has some after each restart of the hub, and where its updates come too late.
UNWANTED, UNWANTED_S = 200.0, 10.0
UNWANTED_BYTES = 64 * 1024  # of payload that count as one more
VIOLATION = 16.0  # that a message counts as which no honest peer sends
READING = 12 << 20  # bytes that one session may have asked for and not been read yet: one and a half credits
HANDSHAKE_COST = 50.0  # messages that a handshake message counts as, and its refusal again
HANDSHAKES = (
    messages.Hello,
    messages.Resume,
    messages.AskStatus,
    messages.Deciding,
    messages.AskStop,
    messages.AskAdmin,
)


class ConnectionRegistry:
    """Connections by their sessions."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, str] = {}  # connection -> session
        self.reading: dict[str, int] = {}  # session -> bytes that are being read for it
        self._of: dict[str, list[bytes]] = {}  # session -> its connections, the newest last
        self._said = TokenBuckets(MESSAGES_S, MESSAGES)
        self._unwanted = TokenBuckets(UNWANTED_S, UNWANTED)

    def own(self, conn: bytes, session: str, control: bytes | None) -> None:
        """Assign a connection to a session. Beyond MAX_CONNECTIONS the oldest are dropped, except `control`;
        if one of them is alive, its peer is told and attaches again."""
        self.drop(conn)
        self.sessions[conn] = session
        mine = self._of.setdefault(session, [])
        mine.append(conn)
        for old in [c for c in mine if c != control][:-MAX_CONNECTIONS]:
            self.drop(old)

    def of(self, session: str) -> list[bytes]:
        return self._of.get(session, [])

    def drop(self, conn: bytes) -> None:
        """Unassign a connection, which may be closed."""
        session = self.sessions.pop(conn, None)
        if session is not None:
            self._of[session].remove(conn)

    def forget(self, session: str) -> None:
        """Unassign all connections of a session that is over."""
        for conn in self._of.pop(session, []):
            del self.sessions[conn]
        self._unwanted.forget(session)

    # ---- limits --------------------------------------------------------------------------------------------

    def may_say(self, conn: bytes, size: int, now: float) -> bool:
        """True if a message of `size` bytes is within the rate limit of its connection."""
        return self._said.take(conn, now, 1 + size // KIB)

    def tolerates(self, conn: bytes, cost: float, now: float) -> bool:
        """Charge the session of a connection for something unwanted. False: it had too many."""
        return self._unwanted.take(self.sessions.get(conn, conn), now, cost)

    def costs(self, conn: bytes, message: messages.Message, now: float) -> None:
        """Charge a connection for a costly message, in either direction."""
        if isinstance(message, (*HANDSHAKES, messages.Refused)):
            self._said.fine(conn, now, HANDSHAKE_COST)

    def begin_read(self, session: str, chunk: int, held: int) -> int:
        """Reserve the reading of a chunk for a session and return the bytes it counts as.

        Returns 0 if too much is being read for it, or `held` because it does not read.
        """
        size, reading = max(chunk, MIN_FRAGMENT), self.reading.get(session, 0)
        if reading >= READING or reading + held >= MAX_BUFFERED:
            return 0
        self.reading[session] = reading + size
        return size

    def end_read(self, session: str, size: int) -> None:
        self.reading[session] -= size
        if not self.reading[session]:
            del self.reading[session]
