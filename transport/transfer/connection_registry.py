"""A hub's connections: the session of each, and limits on what it may ask of the hub.

A session has one connection for control and a few for bulk.
"""

from __future__ import annotations

from transport.protocol import messages
from transport.wire import MAX_BUFFERED, TokenBuckets

from .congestion_window import MIN_FRAGMENT

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
