"""A hub's connections: whose each is, and how much it may ask of the hub.

A session has one connection for control and a few for bulk.
"""

from __future__ import annotations

from transport.protocol import AskAdmin, AskStatus, AskStop, Hello, Message, Refused, Resume
from transport.wire import MAX_BUFFERED, TokenBuckets

from .congestion_window import MIN_FRAGMENT

MAX_CONNECTIONS = (
    8  # connections of one session that are known; a peer has five, a bad line leaves some behind
)
# What one connection may say: so many messages at once, so many a second. One that fills a line of 2 Gbit/s
# brings, or asks for, 1000 chunks a second; the others have a few messages a round.
MESSAGES, MESSAGES_S = 2000.0, 1000.0
KIB = 1024  # of a message cost as much as another message
DEAR = 50.0  # a greeting costs as much as so many more, and its refusal once more
GREETINGS = (Hello, Resume, AskStatus, AskStop, AskAdmin)


class ConnectionRegistry:
    """Connections by their sessions."""

    def __init__(self) -> None:
        self.owners: dict[bytes, str] = {}  # connection -> session
        self.reading: dict[str, int] = {}  # session -> bytes that are being read for it
        self._of: dict[str, list[bytes]] = {}  # session -> its connections, the newest last
        self._said = TokenBuckets(MESSAGES_S, MESSAGES)

    def own(self, conn: bytes, session: str, control: bytes | None) -> None:
        """This one is a session's from now on. Of too many the oldest are nobody's, but not the control
        connection; if one of them lives its peer is told, and attaches again."""
        self.drop(conn)
        self.owners[conn] = session
        mine = self._of.setdefault(session, [])
        mine.append(conn)
        for old in [c for c in mine if c != control][:-MAX_CONNECTIONS]:
            self.drop(old)

    def of(self, session: str) -> list[bytes]:
        return self._of.get(session, [])

    def drop(self, conn: bytes) -> None:
        """This one is nobody's, or closed."""
        session = self.owners.pop(conn, None)
        if session is not None:
            self._of[session].remove(conn)

    def forget(self, session: str) -> None:
        """The session is over."""
        for conn in self._of.pop(session, []):
            del self.owners[conn]

    # ---- how much ------------------------------------------------------------------------------------------

    def may_say(self, conn: bytes, size: int, now: float) -> bool:
        """Is a message of so many bytes within what one connection may say?"""
        return self._said.take(conn, now, 1 + size // KIB)

    def costs(self, conn: bytes, message: Message, now: float) -> None:
        """What is said on a connection may be dear, either way."""
        if isinstance(message, (*GREETINGS, Refused)):
            self._said.fine(conn, now, DEAR)

    def begin_read(self, session: str, chunk: int, held: int) -> int:
        """What reading a chunk for this session counts as; 0: too much is being read for it, or `held` as it
        does not take it. A peer has its credit under way, a quarter of this."""
        size, reading = max(chunk, MIN_FRAGMENT), self.reading.get(session, 0)
        if reading + held >= MAX_BUFFERED:
            return 0
        self.reading[session] = reading + size
        return size

    def end_read(self, session: str, size: int) -> None:
        self.reading[session] -= size
        if not self.reading[session]:
            del self.reading[session]
