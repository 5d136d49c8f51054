"""A hub and its peers in one process: the real Hub and PeerLink, over queues or over the loopback.

with HubSwarm(settings, work, folder) as swarm:
    link = swarm.link("ann")        # a PeerLink; use it from a thread of its own
    swarm.train(ToyPeer(link))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memory_sockets import MemoryHubWire, MemoryPeerWire
from toy_swarm import BOUNDS, ToyPeer
from waiting import until

from transport.hub import Extend, Hub
from transport.ledger import Ledger
from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import Event, HubDelegate, RoundCommitted, RunEnded, RunKeys, RunSettings, events

FAST = {"ping_s": 0.1, "grace_s": 0.3, "recover_s": 5.0, "linger_s": 2.0}


class HubSwarm:
    """A hub with its ledger in `folder`, its events, and links to it. Leaving the context closes all of them.

    Without a `port`, queues connect them; with one, sockets of the loopback do (0: a free port).
    """

    def __init__(
        self,
        settings: RunSettings,
        work: HubDelegate,
        folder: Path,
        port: int | None = None,
        keys: RunKeys | None = None,
        extend: Callable[[RunKeys, Ledger], Sequence[Extend]] = lambda keys, ledger: (),
    ) -> None:
        self.settings, self.folder, self.keys = settings, folder, keys or RunKeys.generate()
        self.work: Any = work
        self.ledger = Ledger(folder, run=settings.run, samples=settings.samples)
        self.wire = MemoryHubWire()
        self.in_memory = port is None
        at = self.wire if port is None else ("127.0.0.1", port)
        try:
            extensions = extend(self.keys, self.ledger)
            self.hub = Hub(at, self.keys, self.ledger, settings, work, extensions)
        except BaseException:
            self.ledger.close()
            raise
        self.url = self.keys.url("127.0.0.1", self.hub.port, settings.run)
        self.links: list[PeerLink] = []
        self.wires: dict[PeerLink, MemoryPeerWire] = {}
        self.events: list[Event] = []
        self._listener = threading.Thread(target=self._listen, name="cocktail-events", daemon=True)

    def start(self) -> HubSwarm:
        self.hub.start()
        self._listener.start()
        return self

    def _listen(self) -> None:
        for event in self.hub.events():
            self.events.append(event)

    def link(self, name: str, limits: LinkLimits | None = None, **identity: Any) -> PeerLink:
        """Create a peer's link, not connected yet."""
        wire = MemoryPeerWire(self.wire, f"key-of-{name}") if self.in_memory else None
        limits = limits or (LinkLimits(patience=10.0, flows=1) if self.in_memory else LinkLimits())
        link = PeerLink(self.url, PeerIdentity(name, "memory", **identity), limits, wire=wire)
        link.bounds = BOUNDS
        self.links.append(link)
        if wire is not None:
            self.wires[link] = wire
        return link

    def train(self, *peers: ToyPeer, seconds: float = 120.0) -> list[Event]:
        """Let peers take part, if they do not yet, until the run and they have ended."""
        threads = [peer.thread or peer.start() for peer in peers]
        self.wait(seconds)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        return self.events

    def wait(self, seconds: float = 120.0) -> list[Event]:
        """Wait for the end of the run and return its events. Raises TimeoutError."""
        self._listener.join(seconds)
        if self._listener.is_alive():
            raise TimeoutError(f"the run has not ended after {seconds:.0f} s; last event: {self.events[-1:]}")
        return self.events

    def ended(self, seconds: float = 120.0) -> RunEnded:
        """Wait for the end of the run."""
        return next(event for event in self.wait(seconds) if isinstance(event, RunEnded))

    def until(self, there: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait for what a run that goes on comes to."""

        def there_or_over() -> object:
            last = self.events[-1:]
            found = there()
            assert found or not isinstance(last and last[0], RunEnded), last
            return found

        until(there_or_over, seconds)

    def left(self, name: str) -> list[str]:
        """Why the peer of this name went, each time it did."""
        return [e.reason for e in self.events if isinstance(e, events.PeerLeft) and e.peer == name]

    def committed(self) -> int:
        return sum(isinstance(event, RoundCommitted) for event in self.events)

    @contextmanager
    def training(self, compute_s: float = 0.02) -> Iterator[HubSwarm]:
        """While one honest peer trains, so long in each round; the hub is closed after it, and the peer must
        have met no error."""
        peer = ToyPeer(
            PeerLink(self.url, PeerIdentity("ann")), before_exchange=lambda _: time.sleep(compute_s)
        )
        thread = peer.start()
        self.until(lambda: self.committed() > 3)
        yield self
        self.close()
        thread.join(120)
        assert peer.error is None

    def kill(self) -> None:
        """Stop the hub as kill -9 does: sockets closed, no messages, the ledger as it was."""
        self.hub._end_at = 0.0
        self.hub._wire.wake()
        assert self.hub.join(120)
        self.ledger.close()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.hub.stop(now=True)
        self._listener.join(120)
        self.ledger.close()

    def __enter__(self) -> HubSwarm:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
