"""A swarm in one process, without sockets: the same hub and links over queues, real messages.

with MemorySwarm(settings, work, folder) as swarm:
    link = swarm.link("ann")        # a PeerLink; use it from a thread of its own
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import PeerLink
from transport.protocol import Event, HubDelegate, RunKeys, RunSettings, RunURL, Unreachable
from transport.wire import Connected, Disconnected, Frames, Received

WAKE = None
T = TypeVar("T")


class MemoryHubWire:
    """The hub's end of queues."""

    port = 0

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[bytes, list[bytes]] | None] = queue.SimpleQueue()
        self.conns: dict[bytes, tuple[MemoryPeerWire, int]] = {}
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

    def hang_up(self, conn: bytes) -> None:
        end = self.conns.get(conn)
        if end is not None:
            end[0].cut(end[1])

    def guard(self, now: float, owner: Callable[[bytes], str | None]) -> int:
        return 0

    def wake(self) -> None:
        self.inbox.put(WAKE)

    def close(self) -> None:
        with self._lock:
            self.closed, ends, self.conns = True, list(self.conns.items()), {}
        for conn, (wire, flow) in ends:
            wire.inbox.put((flow, conn, None))


class MemoryPeerWire:
    """A peer's end of queues. `cut` makes its connections end, as a bad link would."""

    def __init__(self, hub: MemoryHubWire, key: str = "a-key") -> None:
        self.hub, self.key = hub, key  # taken for proven: there is nobody here who lies
        self.inbox: queue.SimpleQueue[tuple[int, bytes, list[bytes] | None] | None] = queue.SimpleQueue()
        self.conns: dict[int, bytes] = {}

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
        """End a connection from outside, at any time, from any thread."""
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
                continue  # of a connection that is hung up
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

    def wake(self) -> None:
        self.inbox.put(WAKE)

    def close(self) -> None:
        for flow in list(self.conns):
            self.hang_up(flow)


def drain(inbox: queue.SimpleQueue[T | None], timeout: float) -> list[T]:
    """Wait up to `timeout` seconds for the first thing or a wake, then take what is there."""
    came: list[T] = []
    try:
        item = inbox.get(timeout=max(0.0, timeout)) if timeout > 0 else inbox.get_nowait()
        while True:
            if item is not WAKE:
                came.append(item)
            item = inbox.get_nowait()
    except queue.Empty:
        return came


class MemorySwarm:
    """A hub with its ledger in `folder`, and links to it; a context that ends with all of them closed."""

    def __init__(self, settings: RunSettings, work: HubDelegate, folder: Path) -> None:
        self.settings, self.work, self.folder = settings, work, folder
        self.keys = RunKeys.generate()
        self.url: RunURL = self.keys.url("memory", 1, settings.run)
        self.ledger = Ledger(folder, run=settings.run, samples=settings.samples)
        self.wire = MemoryHubWire()
        self.hub = Hub("memory", 0, self.keys, self.ledger, settings, work, wire=self.wire)
        self.links: list[PeerLink] = []
        self.wires: dict[PeerLink, MemoryPeerWire] = {}
        self.events: list[Event] = []
        self._listener = threading.Thread(target=self._listen, name="cocktail-events", daemon=True)

    def __enter__(self) -> MemorySwarm:
        self.hub.start()
        self._listener.start()
        return self

    def _listen(self) -> None:
        for event in self.hub.events():
            self.events.append(event)

    def link(self, name: str, patience: float = 10.0, flows: int = 1, owns: bool = False) -> PeerLink:
        """A new peer's link, not connected yet."""
        wire = MemoryPeerWire(self.wire, f"key-of-{name}")
        link = PeerLink(self.url, name, "memory", patience=patience, flows=flows, wire=wire, owns=owns)
        self.links.append(link)
        self.wires[link] = wire
        return link

    def wait(self, timeout: float = 60.0) -> list[Event]:
        """All events, once the run has ended. Raises TimeoutError."""
        self._listener.join(timeout)
        if self._listener.is_alive():
            raise TimeoutError(f"the run has not ended after {timeout:.0f} s; last event: {self.events[-1:]}")
        return self.events

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            link.close()
        self.hub.stop(now=True)
        self._listener.join(10.0)
        self.ledger.close()
