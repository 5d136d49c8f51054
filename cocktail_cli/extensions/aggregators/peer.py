"""The exchange of a round whose shards are aggregated by peers, from the side of one member.

    up      the packet is cut by shard: each aggregator gets its part, the hub the rest
    down    the round's packet is joined from the aggregators' packets

An aggregator serves its packet to all members but one: the member that follows it in the list gets it from
the hub, which has it anyway; so all send the same amount. What cannot go directly goes through the hub: an
aggregator that cannot be reached is not tried again for a while.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cocktail_cli.assembly import Exchange, PeerExtension
from transport.direct import DirectLinks, ReachablePeer, StallDetector
from transport.peer import LEAVE_S, POLL_S, PeerLink
from transport.protocol import AnnouncedAnew, ProtocolError, TransportError, messages, read_msgpack
from transport.transfer import Download

from .aggregator_thread import AggregatorThread
from .bodies import NAME, PART, SHARD, AggregatorInfo, Opened, Parts, Unmoved, digest_of

if TYPE_CHECKING:
    from recipes.training import Peer

log = logging.getLogger(__name__)

RESTS = 16  # rounds in which an unreachable aggregator is not tried again
HAND_OVER_S = 5.0  # for an aggregator to hear the hub's last messages, before it hands over
BOUNDS = {
    SHARD: "the size of the committed packet",
    PART: "the recipe's compression of this aggregator's shards",
    "handoff/": "the recipe's compression of all coordinates",
}


class ShardClients:
    """Exchanges parts and packets with aggregators; `dial` makes a link. One thread may send while another
    fetches."""

    def __init__(self, dial: Callable[[ReachablePeer], PeerLink]) -> None:
        self._links = DirectLinks(dial)
        self._rests: dict[str, int] = {}  # name -> first round in which it is tried again
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="cocktail-direct")

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        return self._links.traffic

    def send(
        self,
        round: int,
        aggregators: Sequence[AggregatorInfo],
        parts: Mapping[str, bytes],
        enough: Callable[[], bool],
    ) -> dict[str, bytes]:
        """Upload each aggregator its part until `enough()`; return the parts that did not arrive."""
        self._links.keep({aggregator.name for aggregator in aggregators})
        wanted = [a for a in self._reachable(aggregators, round) if a.name in parts]
        sent = {a.name: self._threads.submit(self._put, a, round, parts[a.name]) for a in wanted}
        while not all(future.done() for future in sent.values()):
            if enough():
                for name, future in sent.items():
                    if not future.done():
                        self._rest(name, round)
                break
            time.sleep(POLL_S / 5)
        went = {name for name, future in sent.items() if future.done() and future.result()}
        return {name: part for name, part in parts.items() if name not in went}

    def _put(self, aggregator: AggregatorInfo, round: int, part: bytes) -> bool:
        try:
            return self._links.to(aggregator).put(f"{PART}{round}", part, StallDetector().upload) is True
        except (TransportError, KeyError) as error:
            log.debug("to %s", aggregator.name, exc_info=error)
            self._rest(aggregator.name, round)
            return False

    def fetch(self, round: int, aggregators: Sequence[AggregatorInfo], most: int) -> dict[str, bytes]:
        """Fetch the packets of these aggregators' shards, each of at most `most` bytes; skip failed ones."""
        begun: dict[str, tuple[PeerLink, Download]] = {}
        for aggregator in self._reachable(aggregators, round):
            try:
                link = self._links.to(aggregator)
                begun[aggregator.name] = link, link.begin(f"{SHARD}{round}", most)
            except TransportError as error:
                log.debug("to %s", aggregator.name, exc_info=error)
                self._rest(aggregator.name, round)
        found = {}
        for name, (link, download) in begun.items():
            try:
                found[name] = link.finish(download, partial(StallDetector().download, download))
            except (TransportError, KeyError, ProtocolError) as error:
                log.debug("from %s", name, exc_info=error)
                self._rest(name, round)
        return found

    def _reachable(self, aggregators: Sequence[AggregatorInfo], round: int) -> list[AggregatorInfo]:
        return [a for a in aggregators if a.address and self._rests.get(a.name, 0) <= round]

    def _rest(self, name: str, round: int) -> None:
        self._rests[name] = round + RESTS
        self._links.drop(name)

    def close(self) -> None:
        self._links.close()
        self._threads.shutdown(wait=False)


class ShardedPeer(PeerExtension):
    """Exchanges updates with the aggregators of each round. One thread may exchange a round while another
    fetches the packet of an earlier one.

    Args:
        shards: of the global model.
        clients: connections to other aggregators.
        begin: makes this peer's own aggregator, for so many parameters; None: it has none.
    """

    name, serves = NAME, True

    def __init__(
        self,
        link: PeerLink,
        shards: int,
        clients: ShardClients,
        begin: Callable[[int], AggregatorThread] | None = None,
    ) -> None:
        self._link, self._shards, self._clients, self._begin = link, shards, clients, begin
        self.aggregator: AggregatorThread | None = None
        self._by: Exchange = link
        self._opened: dict[int, Opened] = {}  # by round, as they were opened last: the newest ones
        self._committed: dict[int, messages.Committed] = {}  # of them
        self.upload_s = 0.0  # seconds that the newest upload took, directly and through the hub
        link.bounds_of_extensions |= BOUNDS
        link.void_if(lambda old, new: aggregators_of(old) != aggregators_of(new))

    def exchange_by(self, inner: Exchange) -> Exchange:
        self._by = inner
        return self

    def built(self, files: Mapping[str, Path], peer: Peer) -> None:
        """Begin to aggregate, if others reach this peer."""
        if self._begin is not None:
            self.aggregator = self._begin(peer.trainer.layout.size)
            self.aggregator.start()

    def received(self, body: bytes) -> None:
        if self.aggregator is not None:
            self.aggregator.orders.receive(body)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far, beside those of the link to the hub."""
        up, down = self._clients.traffic
        if self.aggregator is None:
            return up, down
        return up + self.aggregator.server.bytes_up, down + self.aggregator.server.bytes_down

    def took_round(self, round: messages.Round, asked: float, now: float) -> None:
        self._opened[round.round] = opened(round)
        for old in [r for r in self._opened if r <= round.round - messages.MOST_IN_FLIGHT]:
            del self._opened[old]  # a session may end before it has fetched its packet
            self._committed.pop(old, None)

    def exchange(
        self, round: int, packet: bytes, report: messages.Report, beside: Mapping[str, bytes] = {}
    ) -> messages.Committed:
        """Upload the packet by shard and wait for the commit; once more if the round is announced anew with
        other aggregators. Raises as PeerLink.exchange, except AnnouncedAnew."""
        while True:
            try:
                of = self._opened.get(round, Opened([]))
                self._committed[round] = self._upload(of, packet, report, beside)
                return self._committed[round]
            except AnnouncedAnew as anew:
                self._opened[round] = opened(anew.round)

    def _upload(
        self, of: Opened, packet: bytes, report: messages.Report, beside: Mapping[str, bytes]
    ) -> messages.Committed:
        round, link = report.round, self._link
        rest, parts = self._cut(of.aggregators, packet)
        if parts:
            digests = {name: digest_of(part) for name, part in parts.items()}
            body = msgspec.msgpack.encode(Parts(digests))
            report = msgspec.structs.replace(report, extra={**report.extra, NAME: body})
        mine = parts.pop(link.name, None)
        if mine is not None and self.aggregator is not None:
            self.aggregator.part(round, mine)
        link.prefetch_part(None if of.aggregators else lambda committed: None)
        started = time.monotonic()
        if parts:
            parts = self._clients.send(round, of.aggregators, parts, lambda: self._too_late(round))
        directly = time.monotonic() - started
        beside = {**beside, **{f"{PART}{round}/{name}": part for name, part in parts.items()}}
        committed = self._by.exchange(round, rest, report, beside)
        self.upload_s = directly + self._by.upload_s
        return committed

    def _cut(self, aggregators: Sequence[AggregatorInfo], packet: bytes) -> tuple[bytes, dict[str, bytes]]:
        """Return the hub's part, without shards if it aggregates none, and each aggregator's."""
        from recipes.algorithm import select_shards

        if not aggregators:
            return packet, {}
        parts = {one.name: select_shards(packet, one.shards, self._shards) for one in aggregators}
        hubs = set(range(self._shards)).difference(*(one.shards for one in aggregators))
        return select_shards(packet, hubs, self._shards), parts

    def _too_late(self, round: int) -> bool:
        """Return True once the round is over or this peer must leave: nothing is sent directly any more."""
        late = self._link.leave_requested.left(LEAVE_S) < 0
        return late or self._link.newest_round >= round

    def fetch(self, round: int) -> bytes | None:
        """Fetch and join the packet of a round just committed; None if it must come whole from the hub."""
        from .durable_shards import merge_packets

        committed, of = self._committed.pop(round, None), self._opened.get(round, Opened([]))
        if committed is None or NAME not in committed.extra or not of.aggregators:
            return None
        unmoved = read_msgpack(committed.extra[NAME], Unmoved, "which shards have not moved").aggregators
        moved = [one for one in of.aggregators if one.name not in unmoved]
        direct = [one for one in moved if self._link.name not in (one.name, follower(of, one.name))]
        found = self._clients.fetch(round, direct, committed.size)
        if self.aggregator is not None and (mine := self.aggregator.packet(round)) is not None:
            found[self._link.name] = mine
        try:
            most = committed.size  # with the same header, and some of its shards
            parts = [found.get(a.name) or self._link.fetch(f"{SHARD}{round}/{a.name}", most) for a in moved]
            if sum(len(one.shards) for one in of.aggregators) < self._shards:
                parts.append(self._link.fetch(f"{SHARD}{round}", most))
            packet = merge_packets(parts, self._shards)
        except (KeyError, ValueError):
            return None
        return packet if hashlib.sha256(packet).hexdigest() == committed.sha256 else None

    def leave(self) -> None:
        """Stop aggregating, first handing over the error feedback if the run goes on, and hang up."""
        if self.aggregator is not None:
            if self._link.over is None:
                self.aggregator.leave(HAND_OVER_S)
            self.aggregator.close()
        self._clients.close()


def opened(round: messages.Round) -> Opened:
    """Return who aggregates in a round, and its members. Raises ProtocolError."""
    body = round.extra.get(NAME)
    found = read_msgpack(body, Opened, "who aggregates") if body else Opened([])
    return found if found.members else msgspec.structs.replace(found, members=round.members)


def aggregators_of(round: messages.Round) -> list[AggregatorInfo]:
    return opened(round).aggregators


def follower(of: Opened, name: str) -> str:
    """Return the member after this one, which gets its packet from the hub."""
    members = of.members
    return members[(members.index(name) + 1) % len(members)] if name in members else ""
