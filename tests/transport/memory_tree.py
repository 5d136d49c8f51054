"""A tree of hubs in one process: real hubs, ledgers, links, aggregators, packets; only sockets are queues.

with Tree(folder, ["h0", "h1"]) as tree:
    ann = tree.peer("h0", "ann")
    tree.wait()

A peer's step on a sample is a vector that follows from the sample, so what was trained is known to the end.
Steps are summed at each level, so nothing is lost where

    sum_i (x_i - x') + sum_h d_h + e + x' = all steps.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dc_replace
from functools import partial
from pathlib import Path

import torch
from memory_swarm import MemorySwarm
from torch import Tensor
from toy_swarm import BOUNDS, TOKENS, ToyPeer, ToyWork, toy_fingerprint, toy_settings

from cocktail_cli.aggregation import DurableAggregator
from cocktail_cli.subtree import InnerAggregator
from compress import Cocktail
from recipes.algorithm import Aggregator, DecodedPacket, GlobalModel, OuterOptimizer, Worker
from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import Event, RunKeys, RunSettings, WeightedPacket, messages
from transport.tree import InnerHub, LeasedSample
from transport.tree.parent_leases import TOTAL
from transport.wire import MemoryHubWire, MemoryPeerWire

NOT_KEPT = ("ledger.lock", "ledger.db-shm")  # a lock, which ends with its process; an index, which is remade
P, SEED = 512, 7
MIX = Cocktail(random_ratio=0.5, topk_ratio=0.25, quant_bits=4, block_size=16)
SUM = OuterOptimizer("packets")
QUICK = toy_settings(
    samples=96, global_batch=16, ping_s=0.05, grace_s=0.3, recover_s=0.0, first_s=1.0, linger_s=0.5,
    peer_timeout=3.0, start_timeout=20.0,
)  # fmt: skip


def aggregator() -> Aggregator:
    return Aggregator(P, MIX, SEED, outer=SUM)


def step_of(sample: int) -> Tensor:
    """(P,) what training on a sample moves a model by."""
    return torch.randn(P, generator=torch.Generator().manual_seed(sample))


def error_of(aggregator: Aggregator) -> Tensor:
    """(P,) e, or d_h."""
    return torch.cat([shard.error for shard in aggregator.assigned.values()])


class RootWork(ToyWork):
    """The root's delegate: the real aggregator, and the packets it has made."""

    def __init__(self, ledger: Path) -> None:
        super().__init__()
        self.durable = DurableAggregator(aggregator(), ledger)

    def weight(self, ids: Sequence[int]) -> float:
        return float(bool(ids))

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        return self.durable.aggregate(round, updates)


class SteppedAggregator(InnerAggregator):
    """d_h of an inner hub. `at` is called at each step of a round, and may raise Killed."""

    def __init__(self, folder: Path, at: Callable[[str, int], None]) -> None:
        super().__init__(aggregator(), folder / "inner", equal=True)
        self.at = at

    def aggregate(self, round: int, updates: Sequence[WeightedPacket], sender: str) -> bytes:
        self.at("closed", round)
        packet = super().aggregate(round, updates, sender)
        self.at("logged", round)
        return packet

    def settle(self, accepted: bool) -> None:
        assert self.pending is not None
        round = self.pending.round
        self.at("committed above", round)
        super().settle(accepted)
        self.at("settled", round)

    def committed(self, round: int) -> None:
        self.at("committed here", round)
        super().committed(round)


class TreeWork:
    """The model side of an inner hub."""

    def __init__(self, folder: Path, at: Callable[[str, int], None] = lambda step, round: None) -> None:
        self.folder, self.residual = folder, SteppedAggregator(folder, at)

    def unpack(self, lease: bytes) -> list[LeasedSample]:
        return [LeasedSample(i, TOKENS, 1.0) for i in json.loads(lease)]

    def pack(self, samples: Sequence[LeasedSample]) -> bytes:
        return json.dumps([sample.data for sample in samples]).encode()

    def fingerprint(self, round: int) -> int:
        with Ledger(self.folder, write=False) as ledger:
            return toy_fingerprint([packet for _, packet in ledger.packets(0, round)])

    def object(self, name: str) -> bytes | Path:
        raise KeyError(name)


class Killed(BaseException):
    """The process of an inner hub ends here."""


@dataclass
class VectorPeer(ToyPeer):
    """A peer with a model: a vector."""

    local: Worker = None  # type: ignore[assignment]
    all: Tensor = field(default_factory=lambda: torch.zeros(P))  # its steps
    sent: DecodedPacket | None = None
    accepted: dict[int, DecodedPacket] = field(default_factory=dict)  # by round, until x' is there

    def __post_init__(self) -> None:
        x = torch.zeros(P)
        self.local = Worker(x.clone(), GlobalModel(x, MIX, SEED))
        self.pack = self.packed
        self.staleness = 0

    def train(self, opened: messages.Round) -> None:
        super().train(opened)
        for sample in self.pending.get(opened.round, []):
            step = step_of(sample)
            self.local.x.add_(step)
            self.all.add_(step)

    def packed(self, round: int, ids: list[int]) -> bytes:
        self.sent = self.local.start(round=round)
        return self.sent.packet

    def exchange(self, opened: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        committed = super().exchange(opened, packet, report)
        if self.link.name in committed.accepted:
            assert self.sent is not None
            self.accepted[opened.round] = self.sent
        return committed

    def catch_up(self, round: int) -> None:
        before = len(self.packets)
        super().catch_up(round)
        for number, packet in enumerate(self.packets[before:], before):
            self.local.finish(packet, self.accepted.pop(number, None))

    @property
    def x(self) -> Tensor:
        """x'."""
        return self.local.global_model.vector

    @property
    def residual(self) -> Tensor:
        return self.local.x - self.x


class Inner:
    """One inner hub, which can be killed and started again."""

    def __init__(self, tree: Tree, name: str, at: Callable[[str, int], bool]) -> None:
        self.tree, self.at = tree, at
        above, _, self.name = name.rpartition("/")
        self.parent: MemorySwarm | Inner = tree.hubs[above] if above else tree.root
        self.keys = RunKeys.generate()
        self.url = self.keys.url("memory", 1, tree.settings.run)
        self.wire = MemoryHubWire()
        self.peer_wires: list[MemoryPeerWire] = []
        self.events: list[Event] = []
        self.dying, self.gone = threading.Event(), threading.Event()

    def start(self) -> None:
        folder = self.tree.folder / self.name
        settings = dc_replace(self.tree.settings, samples=TOTAL)
        self.ledger = Ledger(folder, run=settings.run, samples=TOTAL)
        self.work = TreeWork(folder, self._at)
        self.work.residual.recover(self.ledger.next_round)
        wire = MemoryPeerWire(self.parent.wire, f"key-of-{self.name}")
        self.link = PeerLink(
            self.parent.url,
            PeerIdentity(self.name, "memory"),
            LinkLimits(patience=10.0, flows=1),
            wire=wire,
        )
        self.uplink = wire
        if isinstance(self.parent, Inner):
            self.parent.peer_wires.append(wire)
        self.link.connect(10.0)
        self.link.bounds = BOUNDS
        self.inner = InnerHub(self.link, self.ledger, self.work, self._hub)
        self.inner.start()
        self._listener = threading.Thread(target=self._listen, args=(self.inner.hub,), daemon=True)
        self._listener.start()

    def _hub(self, delegate: InnerHub) -> Hub:
        settings = dc_replace(self.tree.settings, samples=TOTAL, recover_s=2.0)
        return Hub(("memory", 0), self.keys, self.ledger, settings, delegate, wire=self.wire)

    def _listen(self, hub: Hub) -> None:
        self.events += [event for event in hub.events() if event is not None]

    def _at(self, step: str, round: int) -> None:
        if self.at(step, round):
            self.dying.set()
            self.gone.wait()
            raise Killed

    def darken(self, seconds: float) -> None:
        """Cut the line to the parent for so long."""
        away, parent, up = MemoryHubWire(), self.uplink.hub, self.uplink
        away.close()
        up.hub = away
        for flow, conn in list(up.conns.items()):
            parent.drop(conn)
            up.inbox.put((flow, conn, None))
        threading.Timer(seconds, lambda: setattr(up, "hub", parent)).start()

    def kill_and_restart(self) -> None:
        """Wait until `at` has a step at which it is to die. Nobody hears a goodbye, and what is on the disk
        at that instant is all that remains."""
        assert self.dying.wait(20.0)
        hub, folder = self.inner.hub, self.tree.folder / self.name
        files = {path: path.read_bytes() for path in folder.iterdir() if path.name not in NOT_KEPT}
        hub._call(lambda: setattr(hub, "_end_at", 0.0))
        self.link.abandon()
        self.uplink.close()
        self.gone.set()
        assert hub.join(10.0)
        self.inner.close()
        self.work.residual.close()
        self.ledger.close()
        for path in folder.iterdir():
            path.unlink()
        for path, data in files.items():
            path.write_bytes(data)
        self.wire, self.dying, self.gone = MemoryHubWire(), threading.Event(), threading.Event()
        for wire in self.peer_wires:
            wire.hub = self.wire
        self.start()

    def close(self) -> None:
        self.inner.close()
        self.inner.hub.join(10.0)
        self._listener.join(10.0)
        self.work.residual.close()
        self.ledger.close()


class Tree:
    """A root, inner hubs by name ("h0/h2" is below "h0", which comes before it), and peers."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        settings: RunSettings = QUICK,
        at: Callable[[str, str, int], bool] = lambda name, step, round: False,
    ) -> None:
        self.folder, self.settings = folder, settings
        self.work = RootWork(folder / "root")
        below = [name for name in names if "/" not in name]
        root = dc_replace(settings, first_peers=len(below), min_peers=len(below))
        self.root = MemorySwarm(root, self.work, folder / "root")
        self.work.durable.recover(self.root.ledger)
        self.hubs: dict[str, Inner] = {}
        for name in names:
            self.hubs[name] = Inner(self, name, partial(at, name))
        self.peers: dict[str, VectorPeer] = {}
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Tree:
        self.root.__enter__()
        for hub in self.hubs.values():
            hub.start()
        return self

    def peer(self, hub: str, name: str) -> VectorPeer:
        """Start a peer of this inner hub."""
        inner = self.hubs[hub]
        wire = MemoryPeerWire(inner.wire, f"key-of-{name}")
        inner.peer_wires.append(wire)
        link = PeerLink(
            inner.url, PeerIdentity(name, "memory"), LinkLimits(patience=10.0, flows=1), wire=wire
        )
        peer = self.peers[name] = VectorPeer(link)
        self.threads.append(peer.start())
        return peer

    def wait(self, timeout: float = 60.0) -> list[Event]:
        """Wait for the end of the run and of its peers."""
        events = self.root.wait(timeout)
        for thread in self.threads:
            thread.join(timeout)
            assert not thread.is_alive()
        return events

    def audit(self) -> None:
        """Check every law: samples counted once, x' the same to the bit everywhere, nothing lost."""
        with Ledger(self.folder / "root", write=False) as ledger:
            ledger.verify(complete=True)
            packets = [packet for _, packet in ledger.packets()]
        for name in self.hubs:
            with Ledger(self.folder / self.hubs[name].name, write=False) as ledger:
                ledger.verify()
                assert [packet for _, packet in ledger.packets()] == packets, name
        total = error_of(self.work.durable.aggregator).clone()
        first = next(iter(self.peers.values()))
        total += first.x
        for name, peer in self.peers.items():
            assert peer.error is None, (name, peer.error)
            assert peer.packets == packets, name
            assert torch.equal(peer.x, first.x), name
            total += peer.residual - peer.all
        for hub in self.hubs.values():
            total += error_of(hub.work.residual.aggregator)
        assert total.abs().max() < 1e-3, "nothing is lost, and nothing counts twice"

    def __exit__(self, *_: object) -> None:
        for peer in self.peers.values():
            peer.link.close()
        for hub in self.hubs.values():
            hub.close()
        self.root.__exit__()
        self.work.durable.close()
