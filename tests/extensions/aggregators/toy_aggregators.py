"""The toy of toy_swarm.py, where peers own shards. The error of a shard is the list of rounds in which it
moved, so that a test can ask where each of them went.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from errno import ENOSPC
from functools import partial
from os import strerror
from pathlib import Path

import msgspec
from hub_swarm import HubSwarm
from memory_sockets import MemoryHubWire
from msgspec.structs import replace
from toy_swarm import ToyPeer, ToyWork, toy_settings

from cocktail_cli.extensions.aggregators import begin
from cocktail_cli.extensions.aggregators.aggregator_thread import AggregatorThread
from cocktail_cli.extensions.aggregators.bodies import NAME, Parts, digest_of
from cocktail_cli.extensions.aggregators.hub import ShardCoordinator
from cocktail_cli.extensions.aggregators.peer import BOUNDS, ShardClients, aggregators_of
from cocktail_cli.extensions.aggregators.residual_handoffs import HandoffStore
from transport import PeerLink, RunSettings, RunURL
from transport.direct import PeerServer, link_to
from transport.peer import PeerIdentity
from transport.protocol import AnnouncedAnew, CurveKeys, RunKeys, UpdateRejected, messages

SHARDS = 6
sharded_settings = toy_settings


class ShardedSwarm(HubSwarm):
    """A hub whose peers aggregate shards; those in memory are reached, and reach nobody else."""

    def __init__(
        self,
        settings: RunSettings,
        work: ShardedWork,
        folder: Path,
        port: int | None = None,
        keys: RunKeys | None = None,
    ) -> None:
        super().__init__(
            settings,
            work,
            folder,
            port,
            keys,
            lambda keys, ledger: [partial(begin, HandoffStore(ledger), work, SHARDS, 1 << 20)],
        )

    @property
    def coordinator(self) -> ShardCoordinator:
        return next(e for e in self.hub._rounds.extensions if isinstance(e, ShardCoordinator))

    def able(self, name: str) -> PeerLink:
        """A link of a peer that can aggregate."""
        self.wire.servers[f"{name}:1"] = MemoryHubWire()
        return self.link(name, reachable=f"{name}:1")


def part_of(ids: list[int], shards: Collection[int]) -> bytes:
    return json.dumps({"ids": ids, "shards": sorted(shards)}).encode()


@dataclass
class ToyHalf:
    """An aggregator's half, at the hub and at peers, where it is what a disk keeps."""

    errors: dict[int, list[int]] = field(default_factory=dict)  # shard -> rounds
    before: dict[int, list[int]] | None = None
    pending: tuple[int, bytes] | None = None
    left: Sequence[tuple[str, bytes, float]] = ()
    full: bool = False  # its disk
    handed_over: int = 0
    refuses: dict[int, str] = field(default_factory=dict)  # round -> a peer whose part is refused, once
    lock: threading.Lock = field(default_factory=threading.Lock)

    def own(self, shards: Sequence[int]) -> bytes:
        with self.lock:
            given = {s: rounds for s, rounds in self.errors.items() if s not in shards and rounds}
            self.errors = {s: self.errors.get(s, []) for s in shards}
        return json.dumps(given).encode() if given else b""

    def opens(self, size: int, rung: int) -> None:
        """Do nothing: its packets are no longer for it."""

    def longest(self, round: int) -> int:
        return 1 << 20

    def handed(self) -> None:
        self.handed_over += 1

    def aggregate(
        self,
        round: int,
        updates: Sequence[tuple[str, bytes, float]],
        left: Sequence[tuple[str, bytes, float]] = (),
    ) -> bytes:
        assert [u[0] for u in updates] == sorted(u[0] for u in updates)
        if self.full:
            raise OSError(ENOSPC, strerror(ENOSPC))
        if (peer := self.refuses.pop(round, "")) and any(name == peer for name, _, _ in updates):
            raise UpdateRejected(peer, "not a part")
        entries = []
        for peer, packet, weight in updates if self.errors else ():
            said = json.loads(packet)
            assert set(self.errors) <= set(said["shards"]), "somebody sent the part of another owner"
            entries.append([peer, said["ids"], weight])
        with self.lock:
            self.before = self.errors
            self.errors = {shard: [*rounds, round] for shard, rounds in self.errors.items()}
        packet = json.dumps({"entries": entries, "shards": sorted(self.errors)}).encode()
        self.pending, self.left = (round, packet), left
        return packet

    def took(self, packet: bytes) -> bool:
        assert self.pending is not None
        return set(json.loads(self.pending[1])["shards"]) <= set(json.loads(packet)[2])

    def settle(self) -> None:
        for legacy in self.left:
            self.inherit(*legacy)
        self.pending, self.left, self.before = None, (), None

    def undo(self) -> None:
        with self.lock:
            self.errors, self.before = self.before or self.errors, None
            self.pending, self.left = None, ()

    def close(self) -> None:
        pass

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        with self.lock:
            for shard, rounds in json.loads(packet).items():
                if int(shard) in self.errors:
                    self.errors[int(shard)] = [*self.errors[int(shard)], *rounds]


@dataclass
class ShardedWork(ToyWork):
    """The hub's side."""

    half: ToyHalf = field(default_factory=lambda: ToyHalf({shard: [] for shard in range(SHARDS)}))
    moved: list[list[int]] = field(default_factory=list)  # round -> shards

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        same = set(shards) == set(self.half.errors)
        if errors := self.half.own(shards):
            keep(errors)
        return not same

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        return self.half.aggregate(round, updates)

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        said = {int(shard): rounds for shard, rounds in json.loads(packet).items() if int(shard) in shards}
        return json.dumps(said).encode(), sorted(said)

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self.half.inherit(peer, packet, share)

    def joined(
        self, round: int, hubs: Sequence[int], own: bytes, parts: Sequence[tuple[str, Sequence[int], bytes]]
    ) -> bytes:
        moved, entries = list[int](), []
        for aggregator, shards, packet in [("", hubs, own), *parts] if hubs else parts:
            if packet == b"bad":
                raise UpdateRejected(aggregator, "not a packet of shards")
            said = json.loads(packet)
            assert said["shards"] == sorted(shards)
            assert not entries or entries == said["entries"], "owners aggregated different updates"
            entries, moved = said["entries"], [*moved, *shards]
        return json.dumps([round, entries, sorted(moved)]).encode()

    def committed(self, round: int, packet: bytes) -> None:
        super().committed(round, packet)
        self.moved.append(json.loads(packet)[2])


@dataclass
class AggregatingPeer(ToyPeer):
    """A volunteer that can be reached."""

    half: ToyHalf = field(default_factory=ToyHalf)
    owning: AggregatorThread | None = None
    handed_over: bool | None = None
    told: list[str] = field(default_factory=list)
    owned: list[list[int]] = field(default_factory=list)  # its shards, each round it took part in
    door: PeerServer | None = None
    direct: ShardClients | None = None

    def join(self) -> None:
        if self.owning is None:
            self.link.bounds_of_extensions |= BOUNDS
            self.link.void_if(lambda old, new: aggregators_of(old) != aggregators_of(new))
            if self.door is None:  # nobody knows of it
                self.door = PeerServer(MemoryHubWire(), self.link.url.run)
                self.door.start()
            self.owning = AggregatorThread(self.link, self.half, 1 << 20, self.door, self.told.append)
            self.link.listen({NAME: self.owning.orders.receive})
            self.owning.start()
        super().join()

    def exchange(self, opened: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        while True:
            try:
                return self.cut_and_exchange(opened, packet, report)
            except AnnouncedAnew as anew:
                opened = anew.round

    def cut_and_exchange(
        self, opened: messages.Round, packet: bytes, report: messages.Report
    ) -> messages.Committed:
        ids, parts, left = json.loads(packet), {}, set(range(SHARDS))
        for aggregator in aggregators_of(opened):
            parts[aggregator.name] = part_of(ids, aggregator.shards)
            left -= set(aggregator.shards)
        body = msgspec.msgpack.encode(Parts({name: digest_of(part) for name, part in parts.items()}))
        report = replace(report, extra={NAME: body})
        mine = parts.pop(self.link.name, None)
        self.owned.append(
            [shard for a in aggregators_of(opened) if a.name == self.link.name for shard in a.shards]
        )
        if mine is not None:
            assert self.owning is not None
            self.owning.part(opened.round, mine)
        if self.direct is not None:
            r = opened.round
            late = partial(self.is_late, r)
            parts = self.direct.send(r, aggregators_of(opened), parts, late)
        beside = {f"part/{opened.round}/{name}": part for name, part in parts.items()}
        return self.link.exchange(opened.round, part_of(ids, left), report, beside)

    def is_late(self, round: int) -> bool:
        return self.link.newest_round >= round

    def part(self) -> None:
        if self.link.leave_requested.is_set() and self.owning is not None:
            self.handed_over = self.owning.leave(5.0)

    def shut(self) -> None:
        """Its door, and its ways to those of others."""
        if self.direct is not None:
            self.direct.close()
        if self.door is not None:
            self.door.close()


def reachable(url: RunURL, name: str) -> AggregatingPeer:
    """With a door on the loopback."""
    keys = CurveKeys.generate()
    door, port = PeerServer.open(("127.0.0.1", 0), keys, url)
    link = PeerLink(url, PeerIdentity(name, keys=keys, reachable=f"127.0.0.1:{port}"))
    return AggregatingPeer(link, door=door, direct=ShardClients(partial(link_to, link, keys)))


def links(swarm: ShardedSwarm, *names: str) -> list[PeerLink]:
    return [swarm.able(name) for name in names]
