"""The toy of toy_swarm.py with packets of 1 MiB, which reachable peers pass on."""

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hub_swarm import HubSwarm
from memory_sockets import MemoryHubWire, MemoryPeerWire
from toy_swarm import PLENTY, ToyPeer, ToyWork, toy_settings

from cocktail_cli.extensions.passing.bodies import NAME
from cocktail_cli.extensions.passing.hub import PassingCoordinator
from cocktail_cli.extensions.passing.peer import PassingPeer
from transport import PeerLink, RunSettings
from transport.direct import PeerServer, ReachablePeer
from transport.peer import LinkLimits, PeerIdentity

SIZE = 1 << 20  # bytes of a packet


def passing_settings(**changes: object) -> RunSettings:
    fast = {"ping_s": 0.1, "grace_s": 0.3, "first_s": 10.0, "samples": 24}
    return toy_settings(**{**fast, **changes})


def passing_swarm(settings: RunSettings, work: ToyWork, folder: Path, port: int | None = None) -> HubSwarm:
    """Make a swarm whose hub has the extension."""
    extensions = [partial(PassingCoordinator, mode="always")]
    return HubSwarm(settings, work, folder, port, extend=lambda keys, ledger: extensions)


@dataclass
class LargeWork(ToyWork):
    """Aggregates whose chunks all differ."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        said = json.loads(super().aggregate(round, updates))
        filled = json.dumps([*said, ""]).encode()
        noise = random.Random(round).randbytes(SIZE // 2).hex()
        return json.dumps([*said, noise[: SIZE - len(filled)]]).encode()


@dataclass
class ToyPassingPeer(ToyPeer):
    """A volunteer that takes packets from sources, and may be one."""

    half: PassingPeer | None = None
    server: PeerServer | None = None
    passed: list[int] = field(default_factory=list)  # rounds whose packet had sources
    running: ExitStack = field(default_factory=ExitStack)

    def join(self) -> None:
        assert self.half is not None
        if not self.rounds:
            self.running.enter_context(self.half.beside(set()))
            self.link.listen({NAME: self.half.received})
            self.half.built({}, None)  # type: ignore[arg-type]
        super().join()

    def catch_up(self, round: int) -> None:
        assert self.half is not None
        while len(self.packets) < round:
            packet = self.half.fetch(len(self.packets))
            if packet is None:
                packet = self.link.fetch(f"packet/{len(self.packets)}", PLENTY)
            else:
                self.passed.append(len(self.packets))
            self.packets.append(packet)

    def part(self) -> None:
        assert self.half is not None
        self.half.leave()
        self.running.close()
        if self.server is not None:
            self.server.close()


def passing_peer(
    swarm: HubSwarm, name: str, *, reachable: bool = False, server: type[PeerServer] = PeerServer
) -> ToyPassingPeer:
    """Make a peer of a swarm in memory; a `reachable` one passes packets on."""
    link = swarm.link(name, reachable=f"{name}:1" if reachable else "")
    peer = ToyPassingPeer(link)
    if reachable:
        wire = swarm.wire.servers[f"{name}:1"] = MemoryHubWire()
        peer.server = server(wire, swarm.settings.run)
        peer.server.start()

    def dial(source: ReachablePeer) -> PeerLink:
        at = MemoryPeerWire(swarm.wire.servers[source.address], f"key-of-{name}")
        return PeerLink(swarm.url, PeerIdentity(link.name), LinkLimits(patience=2.0, flows=1), wire=at)

    peer.half = PassingPeer(link, dial, peer.server)
    return peer
