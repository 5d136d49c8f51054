"""A hub and its peers in one process: the real Hub and PeerLink over in-process queues.

with MemorySwarm(settings, work, folder) as swarm:
    link = swarm.link("ann")        # a PeerLink; use it from a thread of its own
"""

from __future__ import annotations

import threading
from pathlib import Path

from memory_sockets import MemoryHubWire, MemoryPeerWire
from toy_swarm import BOUNDS

from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import Event, HubDelegate, RunKeys, RunSettings, RunURL


class MemorySwarm:
    """A hub with its ledger in `folder`, and links to it. Leaving the context closes all of them."""

    def __init__(self, settings: RunSettings, work: HubDelegate, folder: Path) -> None:
        self.settings, self.work, self.folder = settings, work, folder
        self.keys = RunKeys.generate()
        self.url: RunURL = self.keys.url("memory", 1, settings.run)
        self.ledger = Ledger(folder, run=settings.run, samples=settings.samples)
        self.wire = MemoryHubWire()
        self.hub = Hub(("memory", 0), self.keys, self.ledger, settings, work, wire=self.wire)
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

    def link(
        self, name: str, patience: float = 10.0, flows: int = 1, owns: bool = False, address: str = ""
    ) -> PeerLink:
        """Create a peer's link, not connected yet."""
        wire = MemoryPeerWire(self.wire, f"key-of-{name}")
        link = PeerLink(
            self.url,
            PeerIdentity(name, "memory", owns=owns, reachable=address),
            LinkLimits(patience=patience, flows=flows),
            wire=wire,
        )
        link.bounds = BOUNDS
        self.links.append(link)
        self.wires[link] = wire
        return link

    def wait(self, timeout: float = 60.0) -> list[Event]:
        """Wait for the end of the run and return its events. Raises TimeoutError."""
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
