"""The connections of a page: as many as there is room for, none of which waits for its client for long.

uvicorn waits for ever for the rest of a request, and for a client that reads nothing; and it answers 503 to
all while too many of such are open. Here the one that came first makes room for a new one, of the address
that has most of those that wait. So whoever asks in one go is answered, whatever others hold open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

CONNECTION = "connection"  # in the state of a request: what it came on
PATIENCE = 10.0  # seconds for a whole request, from the connection or from the answer before
TAKES = 16 * 1024  # bytes of an answer that a client takes in that time


class Room:
    """All connections of a page.

    Args:
        http: uvicorn's protocol, which handles a connection.
        most: connections at once.
        patience: seconds that each of them waits for its client.
    """

    def __init__(self, http: Callable[..., asyncio.Protocol], most: int, patience: float = PATIENCE) -> None:
        self.http, self.most, self.patience = http, most, patience
        self.connections: dict[Connection, None] = {}  # in the order in which they came

    def protocol(self, **given: Any) -> Connection:
        """Make the protocol of a new connection, of what uvicorn gives to one of its own."""
        return Connection(self, given)

    def enter(self, new: Connection) -> None:
        """Take a connection, and end one where there are too many: the new one if all others compute."""
        self.connections[new] = None
        if len(self.connections) > self.most:
            waiting = [one for one in self.connections if one.waits and one is not new]
            crowd = Counter(one.address for one in waiting).most_common(1)
            ended = next((one for one in waiting if one.address == crowd[0][0]), new)
            self.leave(ended)
            ended.transport.abort()

    def leave(self, gone: Connection) -> None:
        self.connections.pop(gone, None)


class Connection(asyncio.Protocol):
    """A connection that uvicorn's protocol handles, and that ends when its client takes too long."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle

    def __init__(self, room: Room, given: dict[str, Any]) -> None:
        self.room, self.address = room, ""
        self.answering = False  # the page is asked for an answer
        self.paused = False  # the client does not read what is written
        self.left = 0  # bytes that it had not taken when the timer was set
        state = {**given.pop("app_state"), CONNECTION: self}
        self.inner = room.http(app_state=state, **given)

    @property
    def waits(self) -> bool:
        """Tell whether it is the client's turn."""
        return self.paused or not self.answering

    @contextmanager
    def answers(self) -> Iterator[None]:
        """Have the page's turn inside; then wait for the client to take the answer, and to ask again."""
        self.answering = True
        try:
            yield
        finally:
            self.answering = False
            self.set_timer()

    def set_timer(self) -> None:
        self.timer.cancel()
        self.left = self.transport.get_write_buffer_size()
        self.timer = asyncio.get_running_loop().call_later(self.room.patience, self.expire)

    def expire(self) -> None:
        """End the connection, unless its client has read on, or it is not the client's turn."""
        taken = self.left - self.transport.get_write_buffer_size()
        if self.waits and taken < TAKES:
            self.transport.abort()
        else:
            self.set_timer()

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        self.inner.connection_made(transport)
        self.timer = asyncio.get_running_loop().call_later(self.room.patience, self.expire)
        self.room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        self.room.leave(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> None:
        self.inner.eof_received()

    def pause_writing(self) -> None:
        self.paused = True
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.paused = False
        self.inner.resume_writing()
