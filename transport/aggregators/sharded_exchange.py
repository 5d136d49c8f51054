"""The exchange of a round whose shards are aggregated by peers, from the side of one member.

    up      the packet is cut by shard: each aggregator gets its part, the hub the rest
    down    the round's packet is joined from the aggregators' packets

An aggregator serves its packet to all members but one: the member that follows it in the list gets it from
the hub, which has it anyway; so all send the same amount. What cannot go directly goes through the hub.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from transport.peer import LEAVE_S, PeerLink
from transport.protocol import Reopened, messages

from .aggregator_thread import AggregatorThread
from .shard_assignment import digest_of
from .shard_clients import ShardClients

HAND_OVER_S = 5.0  # for an aggregator to hear the hub's last messages, before it hands over


@dataclass(frozen=True)
class PacketSharding:
    """Cuts and joins packets of `shards` shards. Both functions raise ValueError for a damaged packet."""

    shards: int
    restrict: Callable[[bytes, Collection[int], int], bytes]  # (packet, these shards, of all)
    join: Callable[[Iterable[bytes], int], bytes]  # (packets, of all shards)


class ShardedExchange:
    """Exchanges updates with the aggregators of each round. One thread may exchange a round while another
    fetches the packet of an earlier one.

    Args:
        clients: connections to the other aggregators; None: all parts go through the hub.
        aggregator: this peer's own, if it can aggregate shards.
    """

    def __init__(
        self,
        link: PeerLink,
        sharding: PacketSharding,
        clients: ShardClients | None = None,
        aggregator: AggregatorThread | None = None,
    ) -> None:
        self.aggregator, self._link, self._sharding, self._clients = aggregator, link, sharding, clients
        # rounds, as they were opened last, whose packet is not fetched yet
        self._committed: dict[int, tuple[messages.Round, messages.Committed]] = {}
        self.upload_s = 0.0  # seconds that the newest upload took, directly and through the hub

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far, beside those of the link to the hub."""
        up, down = self._clients.traffic if self._clients is not None else (0, 0)
        server = self.aggregator.server if self.aggregator is not None else None
        return (up + server.bytes_up, down + server.bytes_down) if server is not None else (up, down)

    def exchange(self, round: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        """Upload the packet by shard and wait for the commit; again if the round is reopened with other
        aggregators. Raises as PeerLink.exchange, except Reopened."""
        for old in list(self._committed):  # of a session that ended before it could fetch them
            if old <= round.round - messages.MOST_IN_FLIGHT:
                self._committed.pop(old, None)
        while True:
            try:
                committed = self._upload(round, packet, report)
            except Reopened as reopened:
                round = reopened.again
            else:
                self._committed[round.round] = round, committed
                return committed

    def _upload(self, round: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        rest, parts = self._cut(round, packet)
        report = replace(report, parts={name: digest_of(part) for name, part in parts.items()})
        mine = parts.pop(self._link.name, None)
        if mine is not None and self.aggregator is not None:
            self.aggregator.part(round.round, mine)
        directly = 0.0
        if parts and self._clients is not None:
            started = time.monotonic()
            parts = self._clients.send(round.round, round.owners, parts, lambda: self._too_late(round.round))
            directly = time.monotonic() - started
        committed = self._link.exchange(round.round, rest, report, parts)
        self.upload_s = directly + self._link.upload_s
        return committed

    def _cut(self, round: messages.Round, packet: bytes) -> tuple[bytes, dict[str, bytes]]:
        """Return the hub's part, empty if it aggregates no shard, and each aggregator's."""
        if not round.owners:
            return packet, {}
        restrict, shards = self._sharding.restrict, self._sharding.shards
        parts = {a.name: restrict(packet, a.shards, shards) for a in round.owners}
        hubs = set(range(shards)).difference(*(a.shards for a in round.owners))
        return restrict(packet, hubs, shards) if hubs else b"", parts

    def _too_late(self, round: int) -> bool:
        """Return True once the round is over or this peer must leave: nothing is sent directly any more."""
        late = time.monotonic() - self._link.leave_requested.at > LEAVE_S
        return late or self._link.newest_round >= round

    def fetch(self, round: int) -> bytes | None:
        """Fetch and join the packet of a round just committed; None if it must come whole from the hub."""
        exchanged, clients = self._committed.pop(round, None), self._clients
        if exchanged is None or clients is None:
            return None
        opened, committed = exchanged
        if not any(a.address for a in opened.owners):
            return None
        moved = [a for a in opened.owners if a.name not in committed.lost]
        direct = [a for a in moved if self._link.name not in (a.name, self._follower(opened, a.name))]
        found = clients.fetch(round, direct, committed.size)
        mine = self.aggregator.packet(round) if self.aggregator is not None else None
        if mine is not None:
            found[self._link.name] = mine
        try:
            most = committed.size  # with the same header, and some of its shards
            parts = [found.get(a.name) or self._link.fetch(f"shard/{round}/{a.name}", most) for a in moved]
            if sum(len(a.shards) for a in opened.owners) < self._sharding.shards:
                parts.append(self._link.fetch(f"shard/{round}", most))
            packet = self._sharding.join(parts, self._sharding.shards)
        except (KeyError, ValueError):
            return None
        return packet if hashlib.sha256(packet).hexdigest() == committed.sha256 else None

    def _follower(self, round: messages.Round, name: str) -> str:
        """Return the member after this one, which gets its packet from the hub."""
        members = round.members
        return members[(members.index(name) + 1) % len(members)] if name in members else ""

    def leave(self, *, hand_over: bool) -> None:
        """Stop aggregating, first handing over the error feedback if the run goes on, and hang up."""
        if self.aggregator is not None:
            if hand_over:
                self.aggregator.leave(HAND_OVER_S)
            self.aggregator.close()
        if self._clients is not None:
            self._clients.close()
