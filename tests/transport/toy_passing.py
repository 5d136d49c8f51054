"""The toy of toy_swarm.py with packets of 1 MiB, which reachable peers pass on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hub_swarm import HubSwarm
from memory_sockets import MemoryHubWire, MemoryPeerWire
from toy_swarm import PLENTY, ToyPeer, ToyWork, toy_settings

from transport import PeerLink, RunSettings
from transport.aggregators import ShardServer
from transport.passing import PacketSources, ReachablePeer
from transport.passing.direct_links import DIAL_S
from transport.peer import LinkLimits, PeerIdentity

SIZE = 1 << 20  # bytes of a packet


def passing_settings(**changes: object) -> RunSettings:
    fast = {"ping_s": 0.1, "grace_s": 0.3, "first_s": 10.0, "passing": "always", "samples": 24}
    return toy_settings(**{**fast, **changes})


@dataclass
class LargeWork(ToyWork):
    """Aggregates whose chunks all differ."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        said = json.loads(super().aggregate(round, updates))
        filled = json.dumps([*said, ""]).encode()
        noise = random.Random(round).randbytes(SIZE // 2).hex()
        return json.dumps([*said, noise[: SIZE - len(filled)]]).encode()


@dataclass
class PassingPeer(ToyPeer):
    """A volunteer that takes packets from sources, and may be one."""

    sources: PacketSources | None = None
    server: ShardServer | None = None
    passed: list[int] = field(default_factory=list)  # rounds whose packet had sources

    def catch_up(self, round: int) -> None:
        assert self.sources is not None
        while len(self.packets) < round:
            packet = self.sources.fetch(len(self.packets))
            if packet is None:
                packet = self.link.fetch(f"packet/{len(self.packets)}", PLENTY)
            else:
                self.passed.append(len(self.packets))
            self.packets.append(packet)

    def part(self) -> None:
        assert self.sources is not None
        self.sources.leave()
        if self.server is not None:
            self.server.close()


def passing_peer(
    swarm: HubSwarm, name: str, *, reachable: bool = False, server: type[ShardServer] = ShardServer
) -> PassingPeer:
    """Make a peer of a swarm in memory; a `reachable` one passes packets on."""
    link = swarm.link(name, owns=reachable, reachable=f"{name}:1" if reachable else "")
    peer = PassingPeer(link)
    if reachable:
        wire = swarm.wire.servers[f"{name}:1"] = MemoryHubWire()
        peer.server = server(wire, swarm.settings.run)
        peer.server.start()

    def dial(source: ReachablePeer) -> PeerLink:
        at = MemoryPeerWire(swarm.wire.servers[source.address], f"key-of-{name}")
        return PeerLink(swarm.url, PeerIdentity(link.name), LinkLimits(patience=DIAL_S, flows=1), wire=at)

    peer.sources = PacketSources(link, dial, peer.server)
    return peer
