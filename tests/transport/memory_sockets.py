"""HubWire and PeerWire over queues within one process: real messages, no sockets."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from transport.protocol import Route, Unreachable
from transport.wire import Connected, Disconnected, Frames, Guarded, Received

WAKE = None
T = TypeVar("T")


class MemoryHubWire:
    """The hub's end of the queues: a HubWire."""

    port = 0

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[bytes, list[bytes]] | None] = queue.SimpleQueue()
        self.conns: dict[bytes, tuple[MemoryPeerWire, int]] = {}
        self.servers: dict[str, MemoryHubWire] = {}  # by address: those that this hub can dial
        self.closed = False
        self._lock = threading.Lock()
        self._names = itertools.count(1)

    def accept(self, wire: MemoryPeerWire, flow: int) -> bytes | None:
        with self._lock:
            if self.closed:
                return None
            conn = b"%s.%d" % (wire.key.encode(), next(self._names))
            self.conns[conn] = (wire, flow)
            return conn

    def drop(self, conn: bytes) -> None:
        with self._lock:
            self.conns.pop(conn, None)

    def poll(self, timeout: float) -> list[tuple[bytes, list[bytes]]]:
        came = drain(self.inbox, timeout)
        return [c for c in came if c[0] in self.conns]

    def send(self, conn: bytes, frames: Frames) -> bool:
        with self._lock:
            end = self.conns.get(conn)
        if end is None:
            return False
        end[0].inbox.put((end[1], conn, [bytes(f) for f in frames]))
        return True

    def held(self, conn: bytes) -> int:
        return 0

    def crossed(self, conn: bytes) -> None:
        """Return None: no system counts the bytes of a queue."""

    def hang_up(self, conn: bytes) -> None:
        end = self.conns.get(conn)
        if end is not None:
            end[0].cut(end[1])

    def guard(
        self,
        now: float,
        session_of: Callable[[bytes], str | None],
        is_newcomer: Callable[[str], bool] = lambda session: False,
    ) -> Guarded:
        return Guarded(0, 0)

    def reaches(self, address: str, key: str) -> bool:
        return address in self.servers and not self.servers[address].closed

    def wake(self) -> None:
        self.inbox.put(WAKE)

    def close(self) -> None:
        with self._lock:
            self.closed, ends, self.conns = True, list(self.conns.items()), {}
        for conn, (wire, flow) in ends:
            wire.inbox.put((flow, conn, None))


class MemoryPeerWire:
    """A peer's end of the queues: a PeerWire. `cut` ends a connection, as a bad network would."""

    way = "memory"

    def __init__(self, hub: MemoryHubWire, key: str = "a-key") -> None:
        self.others: dict[str, MemoryHubWire] = {}  # by key
        self.hub, self.key = hub, key  # not proven: one process has no impostors
        self.inbox: queue.SimpleQueue[tuple[int, bytes, list[bytes] | None] | None] = queue.SimpleQueue()
        self.conns: dict[int, bytes] = {}

    def aim(self, routes: Sequence[Route], server_key: str) -> None:
        self.hub = self.others[server_key]

    def dial(self, flow: int) -> None:
        self.hang_up(flow)
        conn = self.hub.accept(self, flow)
        if conn is not None:
            self.conns[flow] = conn
        self.inbox.put((flow, conn or b"", [] if conn else None))

    def hang_up(self, flow: int) -> None:
        conn = self.conns.pop(flow, None)
        if conn is not None:
            self.hub.drop(conn)

    def cut(self, flow: int) -> None:
        """End a connection as the network would, from any thread."""
        conn = self.conns.get(flow)
        if conn is not None:
            self.hub.drop(conn)
            self.inbox.put((flow, conn, None))

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]:
        events: list[Connected | Disconnected | Received] = []
        for flow, conn, frames in drain(self.inbox, timeout):
            if not conn:
                events.append(Disconnected(flow, Unreachable("memory", 0, "tcp", "the hub is closed")))
            elif self.conns.get(flow) != conn:
                continue  # the connection was hung up meanwhile
            elif frames is None:
                self.hang_up(flow)
                events.append(Disconnected(flow, None))
            else:
                events.append(Received(flow, frames) if frames else Connected(flow))
        return events

    def send(self, flow: int, frames: Frames) -> bool:
        conn = self.conns.get(flow)
        if conn is None:
            return False
        self.hub.inbox.put((conn, [bytes(f) for f in frames]))
        return True

    def crossed(self, flow: int) -> tuple[int, int]:
        return 0, 0  # a message is here at once

    def wake(self) -> None:
        self.inbox.put(WAKE)

    def close(self) -> None:
        for flow in list(self.conns):
            self.hang_up(flow)


def drain(inbox: queue.SimpleQueue[T | None], timeout: float) -> list[T]:
    """Wait up to `timeout` seconds for the first item or a wake-up, then return all items queued."""
    came: list[T] = []
    try:
        item = inbox.get(timeout=max(0.0, timeout)) if timeout > 0 else inbox.get_nowait()
        while True:
            if item is not WAKE:
                came.append(item)
            item = inbox.get_nowait()
    except queue.Empty:
        return came
