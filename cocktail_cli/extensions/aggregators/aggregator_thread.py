"""A peer that aggregates shards: a thread beside its training that obeys the hub's orders to aggregators.

    Open    aggregate these shards; upload the error feedback of shards given up, for their next aggregators
    Close   fetch the parts of these peers, aggregate, log, upload the packet; or report who is unusable
    Done    the aggregate is in the run and inherited handoffs are merged; or it is not, and is undone

The hub repeats an order whose aggregate was not committed, to this aggregator or to another. An aggregator
that was killed reads its error feedback from the disk and asks the hub whether its newest aggregate was
committed. One that cannot write any more hands over its error feedback and aggregates no shards from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, cast

import msgspec

from transport.direct import Fragment, PeerServer, Uploads
from transport.peer import HANDOFF_S, POLL_S, Newest, PeerLink
from transport.protocol import (
    SessionRenewed,
    TransportError,
    UpdateRejected,
    WeightedPacket,
    messages,
    read_msgpack,
    round_of,
)
from transport.transfer import ObjectSource, memory_source

from .bodies import ERROR, NAME, PART, SHARD, Close, Done, Holds, Open, Order, Resigns, Unusable, digest_of

if TYPE_CHECKING:
    from .durable_shards import DurableShards

log = logging.getLogger(__name__)

ENDS_S = 2.0  # to finish an aggregate that is not awaited any more
KEPT = 5  # rounds whose packet is served: members may have four in flight
MEMBERS = "members"  # of the round
ORDER = cast("type[Open | Close | Done]", Open | Close | Done)


class ShardServer:
    """Takes the parts of an aggregator, and serves its packets. Members are set later, assignment by
    assignment; `on_part` is called in the server's thread."""

    def __init__(self, server: PeerServer, on_part: Callable[[int, str, bytes], None]) -> None:
        self._server, self._on_part = server, on_part
        self._round = self._limit = 0  # parts of earlier rounds are refused, and parts of more bytes
        self.served: dict[int, ObjectSource] = {}  # round -> the packet of the shards
        server.uploads = Uploads(self._refusal, self._took)
        server.serve(SHARD, self._read, MEMBERS)

    def opened(self, round: int, members: Mapping[str, str], limit: int) -> None:
        """Accept parts of this round, of `limit` bytes at most, from `members`: name -> key."""
        self._round, self._limit = round, limit
        self._server.admit(MEMBERS, members)

    def serve(self, round: int, packet: bytes) -> None:
        """Serve the packet of this round."""
        kept = {r: source for r, source in self.served.items() if round - KEPT < r < round}
        self.served = kept | {round: memory_source(packet)}

    def _refusal(self, member: str, name: str, size: int) -> str | None:
        round = round_of(PART, name)
        # the aggregator may learn of a round late
        if round is None or not self._round <= round <= self._round + 1:
            return f"{name!r} is not wanted here, or not any more"
        return f"a part of {size} bytes, the longest has {self._limit}" if size > self._limit else None

    def _took(self, member: str, name: str, part: bytes) -> None:
        round = round_of(PART, name)
        assert round is not None, "`_refusal` let no other in"
        self._on_part(round, member, part)

    def _read(self, member: str, m: messages.Get) -> Fragment:
        round = round_of(SHARD, m.name)
        if round is None or (source := self.served.get(round)) is None:
            raise KeyError(f"{m.name} is not served here, or not any more")
        return Fragment(source.read(m.index, m.chunk), source.size, source.sha256)


class Orders:
    """The hub's orders to an aggregator, and what it answers."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._came, self._count = Newest[Open | Close | Done](), 0  # as they came, and how many
        self._resigned: Resigns | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def receive(self, body: bytes) -> None:
        """Take an order; called by the link's thread. Raises ProtocolError."""
        order = read_msgpack(body, ORDER, "an order to an aggregator")
        with self._lock:
            self._count += 1
            self._came.add(self._count, order)

    def next(self) -> Order | None:
        """Wait for the next order; None once the run is over, or the orders before `stop` have been returned.

        A request to leave is passed on to the hub, which then gives this aggregator no other round.
        """

        def there() -> bool:
            if self._link.leave_requested.is_set() and self._resigned is None:
                self.resign(Resigns())
            return bool(len(self._came)) or self._stopped or self._link.over is not None

        self._link.works_beside()
        while True:
            try:
                self._link.wait("the hub's order to an aggregator", there, inf)
            except SessionRenewed:
                continue
            except TransportError:
                return None
            with self._lock:
                order = self._came.popleft()
            if order is not None and self._resigned is not None:  # a hub may not have heard of it
                self.say(self._resigned)
            return order

    def resign(self, message: Resigns) -> None:
        """Tell the hub that this peer aggregates no shards from the next round on."""
        self._resigned = message
        self.say(message)

    def stop(self) -> None:
        """Make `next` return None once the orders received so far are handled."""
        self._stopped = True

    def say(self, message: Holds | Unusable | Resigns) -> None:
        self._link.say(NAME, msgspec.msgpack.encode(message))


class AggregatorThread:
    """One peer's aggregator. Call `start` after `link.connect`, and `leave` before `link.leave`.

    Args:
        largest: bytes of a handoff, at most.
        server: where other members reach it.
        notify: called with the reason why this peer can aggregate no shards any more.
    """

    def __init__(
        self,
        link: PeerLink,
        backend: DurableShards,
        largest: int,
        server: PeerServer,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.link, self.backend, self.server, self._notify = link, backend, server, notify
        self.orders, self._largest = Orders(link), largest
        self._shards, server.rate_limits = ShardServer(server, self._part_arrived), link.rate_limits
        if backend.pending is not None:
            self._shards.serve(*backend.pending)
        # (round, peer), this peer too -> digest and part
        self._parts: dict[tuple[int, str], tuple[str, bytes]] = {}
        self._unsent: list[bytes] = []  # error feedback for other aggregators that the hub has not taken yet
        self._round, self._aggregates = 0, False  # the newest round, and whether it has shards here
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cocktail-aggregator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def part(self, round: int, packet: bytes) -> None:
        """Add this peer's own part, for the shards it aggregates. To be called before its report."""
        with self._lock:
            self._parts[round, self.link.name] = digest_of(packet), packet

    def packet(self, round: int) -> bytes | None:
        """Return the packet of this peer's shards in that round, if it aggregated any."""
        source = self._shards.served.get(round)
        return None if source is None else source.read(0, source.size)

    def _part_arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Take a part; called by the server's thread."""
        with self._lock:
            self._parts[round, peer] = digest_of(packet), packet
        self._report_parts(round)

    def _report_parts(self, round: int) -> None:
        """Tell the hub whose parts are here."""
        with self._lock:
            here = {name: digest for (r, name), (digest, _) in self._parts.items() if r == round}
        if here:
            self.orders.say(Holds(round, here))

    def leave(self, timeout: float) -> bool:
        """Finish the open round, within `timeout`, and hand over the error feedback of all shards.

        To be called after the last exchange, before `close`. Returns whether the hub has the error feedback.
        """
        self.orders.resign(Resigns(last=True))
        until = time.monotonic() + min(timeout, self.link.leave_requested.left(HANDOFF_S))
        while self._thread.is_alive() and self._aggregates and time.monotonic() < until:
            self._thread.join(POLL_S)
        self._end(timeout)
        return not self._thread.is_alive() and self._hand_over(self.backend.own(()))

    def close(self) -> None:
        """Stop aggregating. The files stay."""
        self._end(ENDS_S)
        if not self._thread.is_alive():  # else it is still busy, and the process about to end
            self.backend.close()

    def _end(self, timeout: float) -> None:
        self.orders.stop()
        self._thread.join(timeout)
        self.server.close()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self.orders.next()) is not None:
            try:
                self._handle(order)
            except (TransportError, KeyError) as error:  # the hub gets no packet and goes on
                log.debug("as an aggregator", exc_info=error)
            except OSError as error:
                self._notify(f"this peer aggregates no shards any more: {error}")
                self.orders.resign(Resigns(lost=True))

    def _handle(self, order: Order) -> None:
        if isinstance(order, Done):
            self._done(order)
            return
        if self.backend.pending is not None:
            if self.backend.pending[0] == order.round:
                self.backend.undo()  # the round is reopened, or closed again
            else:
                self._settle_by_packet(self.backend.pending[0])  # the end of its round was not received
        if isinstance(order, Close):
            self._close(order)
        elif isinstance(order, Open):
            self._opened(order)

    def _opened(self, order: Open) -> None:
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[0] >= order.round}
        self._round, self._aggregates = order.round, bool(order.shards)
        self.backend.opens(order.fits, order.rung)
        given = self.backend.own(order.shards)
        self._shards.opened(order.round, order.keys, self.backend.longest(order.round))
        self._report_parts(order.round)  # of a reopened round the hub does not know the parts reported before
        self._hand_over(given)

    def _hand_over(self, errors: bytes) -> bool:
        """Upload the error feedback of shards given up. What the hub does not take is offered once more."""
        again, self._unsent = self._unsent, []
        given = [*again, errors]
        for packet in filter(None, given):
            if self.link.put(f"{ERROR}{self._round}", packet) is False and packet not in again:
                self._unsent.append(packet)
        if any(given) and not self._unsent:
            self.backend.handed()
        return not self._unsent

    def _close(self, close: Close) -> None:
        link, round, weights = self.link, close.round, close.weights
        left = [
            WeightedPacket(one.peer, link.fetch(f"handoff/{one.number}", self._largest), one.share)
            for one in close.handoffs
        ]
        parts = {peer: self._part_of(peer, round, close.parts.get(peer, "")) for peer in sorted(weights)}
        try:
            updates = [WeightedPacket(peer, part, weights[peer]) for peer, part in parts.items()]
            packet = self.backend.aggregate(round, updates, left)
        except UpdateRejected as error:
            self.orders.say(Unusable(round, close.attempt, error.peer, error.reason))
            return
        self._shards.serve(round, packet)
        link.put(f"{SHARD}{round}/{close.attempt}", packet)

    def _part_of(self, peer: str, round: int, digest: str) -> bytes:
        with self._lock:
            found, part = self._parts.get((round, peer), ("", b""))
        if found == digest:
            return part
        return self.link.fetch(f"{PART}{round}/{peer}", self.backend.longest(round))

    def _done(self, done: Done) -> None:
        if self.backend.pending is not None and self.backend.pending[0] <= done.round:
            if self.backend.pending[0] == done.round:
                self._settle(digest_of(self.backend.pending[1]) == done.packet)
            else:  # the end of an earlier round was not received
                self._settle_by_packet(self.backend.pending[0])
        if done.round >= self._round:
            self._aggregates = False

    def _settle_by_packet(self, round: int) -> None:
        """Settle or undo the newest aggregate by whether it is in the round's packet."""
        assert self.link.bounds is not None, "the link knows the bounds before an aggregator starts"
        packet = self.link.fetch(f"packet/{round}", self.link.bounds.packet(round))
        self._settle(self.backend.took(packet))

    def _settle(self, taken: bool) -> None:
        if taken:
            self.backend.settle()
        else:
            self.backend.undo()
