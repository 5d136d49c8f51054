"""The swarm of sim_swarm.py where peers aggregate shards, some that others reach, some the hub alone.

No timeout gives up an aggregator here: one that is asked and alive must answer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
from msgspec.structs import replace
from sim_swarm import TOKEN, SimPeer, SimSwarm
from toy_swarm import toy_settings

from cocktail_cli.extensions.aggregators.aggregator_thread import ORDER
from cocktail_cli.extensions.aggregators.bodies import (
    NAME,
    AggregatorInfo,
    Close,
    Holds,
    Open,
    Order,
    Parts,
    digest_of,
)
from cocktail_cli.extensions.aggregators.hub import ShardCoordinator
from cocktail_cli.extensions.aggregators.peer import aggregators_of
from cocktail_cli.extensions.aggregators.residual_handoffs import PendingHandoff
from transport import actions as do
from transport.hub import HubParts
from transport.peer import PeerState, SessionState
from transport.protocol import messages

SHARDS = 4
KINDS = {"hub": "hub:1", "door": "h:1", "none": ""}  # who reaches the first peer, the second, the third, ...


class SimAggregator(SimPeer):
    """A peer that may aggregate shards: its training thread and its aggregator thread."""

    swarm: ShardedSim

    def __init__(self, swarm: ShardedSim, name: str, staleness: int, kind: str) -> None:
        super().__init__(swarm, name, staleness)
        self.kind, address = kind, KINDS[kind]
        hello = messages.Hello(messages.PROTOCOL, TOKEN, swarm.settings.run, name, address=address)
        self.state = PeerState(hello)
        self.state.voids = lambda old, new: aggregators_of(old) != aggregators_of(new)
        self.orders = deque[Order]()
        self.state.listen({NAME: lambda body: self.orders.append(msgspec.msgpack.decode(body, type=ORDER))})
        self.brought: set[str] = set()  # aggregators that have their part, "": the hub
        self.parts: dict[tuple[int, str], str] = {}  # (round, peer) -> digest, at its door and its own

    @property
    def name(self) -> str:
        assert self.state.welcome is not None
        return self.state.welcome.name

    def part_for(self, aggregator: AggregatorInfo) -> str:
        """The digest of it."""
        ids = [i for lease in self.sent for i in self.pending[lease]]
        return digest_of(json.dumps([ids, aggregator.shards]).encode())

    def report(self, opened: messages.Round) -> messages.Report:
        assert self.state.welcome is not None
        ids = [i for lease in self.sent for i in self.pending[lease]]
        self.swarm.packets[self.state.welcome.session, opened.round] = ids
        self.brought = set()
        parts = {aggregator.name: self.part_for(aggregator) for aggregator in aggregators_of(opened)}
        if self.name in parts:
            self.parts[opened.round, self.name] = parts[self.name]
        extra = {NAME: msgspec.msgpack.encode(Parts(parts))} if parts else {}
        return replace(super().report(opened), extra=extra)

    def work(self) -> None:
        state = self.state
        if self.dead or state.link is not SessionState.JOINED:
            return
        while self.orders:
            self.obey(self.orders.popleft())
        if self.round is not None and state.sessions == self.session:
            if state.offer_again:
                self.brought = set()
            if (again := state.take_anew()) is not None:
                self.round, self.uploaded = again, False
                self.say(state.report(self.report(again)))
        super().work()

    def upload(self) -> None:
        assert self.round is not None
        r, aggregators = self.round.round, aggregators_of(self.round)
        for aggregator in aggregators:
            if aggregator.name not in self.brought and self.bring(aggregator, r):
                self.brought.add(aggregator.name)
        super().upload()
        if sum(len(aggregator.shards) for aggregator in aggregators) == SHARDS:
            self.uploaded = self.uploaded and len(self.brought) == len(aggregators)

    def bring(self, aggregator: AggregatorInfo, r: int) -> bool:
        swarm, digest = self.swarm, self.part_for(aggregator)
        assert self.state.welcome is not None
        if aggregator.name == self.name:
            return True
        alive = [p for p in swarm.peers if isinstance(p, SimAggregator) and not p.dead]
        there = [p for p in alive if p.aggregates_as(aggregator)]
        if aggregator.address == KINDS["door"] and there:
            there[0].take(r, self.name, digest)
            return True
        session, of = self.state.welcome.session, swarm.coordinator.now
        if of is None or swarm.hub.uploads.refusal(session, f"part/{r}/{aggregator.name}", 100) is not None:
            return False
        whose, sender = of.named(aggregator.name), swarm.hub.members.get(session)
        assert whose is not None, "or it would have been refused"
        assert sender is not None
        swarm.passed[whose, self.name] = digest
        swarm.tell(lambda shards: shards.part_uploaded(sender, whose, digest, swarm.now))
        return True

    def aggregates_as(self, aggregator: AggregatorInfo) -> bool:
        return self.state.welcome is not None and self.name == aggregator.name

    def take(self, r: int, peer: str, digest: str) -> None:
        """At the door."""
        self.parts[r, peer] = digest
        self.hold(r)

    def hold(self, r: int) -> None:
        here = {name: digest for (round, name), digest in self.parts.items() if round == r}
        if here and self.state.link is SessionState.JOINED:
            self.say([messages.Extension(NAME, msgspec.msgpack.encode(Holds(r, here)))])

    def obey(self, order: Order) -> None:
        if isinstance(order, Open):
            self.parts = {key: digest for key, digest in self.parts.items() if key[0] >= order.round}
            self.hold(order.round)
        elif isinstance(order, Close):
            assert self.state.welcome is not None
            session, of = self.state.welcome.session, self.swarm.coordinator.now
            name = f"shard/{order.round}/{order.attempt}"
            if of is None or self.swarm.hub.uploads.refusal(session, name, 9) is not None:
                return  # the hub has gone on, or is another one
            for peer, digest in order.parts.items():
                has = (self.parts.get((order.round, peer)), self.swarm.passed.get((session, peer)))
                assert digest in has, f"{self.name} was asked for a part of {peer} that it cannot have"
            self.swarm.shard_came(session)


class ShardedSim(SimSwarm):
    """SimSwarm with the shell's work for aggregators."""

    def __init__(self, staleness: int = 1) -> None:
        waits = {"step_timeout": 20.0, "start_timeout": 300.0, "peer_timeout": 90.0}
        # (aggregator's session, peer) -> digest of what is here for it
        self.passed: dict[tuple[str, str], str] = {}
        super().__init__(staleness, toy_settings(samples=13, global_batch=4, **waits), [self.begin])
        self.asked: do.Commit | None = None  # the aggregators are
        self.attempt = self.handoffs = 0

    def begin(self, hub: HubParts) -> ShardCoordinator:
        nothing = SimpleNamespace(rows={})
        self.coordinator = ShardCoordinator(hub, nothing, nothing, SHARDS, 0)  # type: ignore[arg-type]
        self.coordinator.watch(SimpleNamespace(later=lambda job: self.passed.clear()))  # type: ignore[arg-type]
        return self.coordinator

    @property
    def lost(self) -> set[str]:
        return {*self.coordinator.barrier.lost}

    def new_peer(self, name: str) -> SimPeer:
        return SimAggregator(self, name, self.staleness, [*KINDS][len(self.peers) % len(KINDS)])

    def tell(self, change: Callable[[ShardCoordinator], None]) -> None:
        self.apply(lambda _: change(self.coordinator))

    def job(self) -> None:
        if self.asked is not None:
            self.finish()
        elif self.jobs and isinstance(reach := self.jobs[0], do.Reach):
            self.jobs.popleft()
            name = next((s.name for s in self.hub.members if s.id == reach.session), "")
            ok = any(not peer.dead and peer.state.hello.name == name for peer in self.peers)
            self.tell(lambda _: self.hub.reached(reach.session, ok))
        elif self.jobs and isinstance(left := self.jobs[0], do.Inherit):
            self.jobs.popleft()
            self.handoffs += 1
            self.coordinator.store.rows[self.handoffs] = PendingHandoff(
                left.peer, left.share, frozenset(range(SHARDS))
            )
        else:
            super().job()

    def commit(self, job: do.Commit) -> None:
        self.came, self.attempt = set(), self.attempt + 1
        self.asked, weights = job, {claim.peer: 1.0 for claim in job.claims}
        self.tell(lambda shards: shards.close(job.round, self.attempt, weights))
        self.finish()

    def shard_came(self, session: str) -> None:
        if self.asked is not None and session in self.wanted and session not in self.lost:
            self.came.add(session)

    @property
    def wanted(self) -> set[str]:
        """The aggregators of the round, as it has closed."""
        assert self.coordinator.now is not None
        return {*self.coordinator.now.aggregators}

    def finish(self) -> None:
        """Commit once every aggregator has answered or is lost."""
        job = self.asked
        of = self.coordinator.now
        if job is not None and of is not None and not self.wanted - of.lost - self.came - self.lost:
            self.asked = None
            self.came -= self.lost
            if self.came or of.hub_shards:
                self.coordinator.moved = dict.fromkeys(self.came, "digest")
                super().commit(job)
            else:
                done = do.CommitDone(round=job.round)
                self.apply(lambda now: self.hub.rounds.committed(done, now))

    def restart_hub(self) -> None:
        self.asked = None
        self.passed.clear()
        reported = dict(self.packets)  # what is at an aggregator's door is there still
        super().restart_hub()
        self.packets = reported

    def fingerprint(self) -> object:
        brought = [len(peer.brought) for peer in self.peers if isinstance(peer, SimAggregator)]
        return super().fingerprint(), self.asked is None, len(self.came), brought
