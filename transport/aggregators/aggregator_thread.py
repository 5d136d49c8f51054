"""A peer that aggregates shards: a thread beside its training that obeys the hub's orders to aggregators.

    Round       aggregate these shards; upload the error feedback of shards given up, for their next
    aggregators Close       fetch the parts of these peers, aggregate, log, upload the packet; or report who
    is unusable Committed   the aggregate is in the run and inherited handoffs are merged; or it is not, and
    is undone

The hub repeats an order whose aggregate was not committed, to this aggregator or to another. An aggregator
that was killed reads its error feedback from the disk and asks the hub whether its newest aggregate was
committed. One that cannot write any more hands over its error feedback and aggregates no shards from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from transport.direct import PeerServer
from transport.peer import HANDOFF_S, POLL_S, PeerLink, SizeBounds
from transport.protocol import TransportError, UpdateRejected, WeightedPacket, messages

from .shard_assignment import digest_of
from .shard_server import KEPT, ShardServer

log = logging.getLogger(__name__)

ENDS_S = 2.0  # to finish an aggregate that is not awaited any more


class AggregatorBackend(Protocol):
    """The model side of an aggregator, implemented by its caller; see HubDelegate. Called from one thread.
    Methods that write to the disk may raise OSError."""

    def longest(self, round: int) -> int:
        """Return the maximum bytes of a part for the shards here, in this round and the next."""

    @property
    def pending(self) -> tuple[int, bytes] | None:
        """Round and packet of the newest aggregate until `settle` or `undo`, also after a restart."""

    def own(self, shards: Sequence[int]) -> bytes:
        """Aggregate exactly these shards. Returns the error feedback of those given up, if any."""

    def fits(self, size: int) -> None:
        """Limit the packet of all shards to `size` bytes; called only where members say so."""

    def handed(self) -> None:
        """Note that the hub has all that `own` has returned."""

    def aggregate(
        self, round: int, updates: Sequence[WeightedPacket], left: Sequence[WeightedPacket]
    ) -> bytes:
        """Aggregate, and log it with the handoffs in `left`, which are merged once the round is committed."""

    def took(self, packet: bytes) -> bool:
        """Return whether the newest aggregate is in this packet of all shards."""

    def settle(self) -> None:
        """Note that the newest aggregate was committed."""

    def undo(self) -> None:
        """Roll back the newest aggregate: it was not committed."""

    def close(self) -> None: ...


class AggregatorThread:
    """One peer's aggregator. Call `start` after `link.connect`, and `leave` before `link.leave`.

    Args:
        server: where other members reach it; None: they go through the hub.
        notify: called with the reason why this peer can aggregate no shards any more.
    """

    def __init__(
        self,
        link: PeerLink,
        backend: AggregatorBackend,
        server: PeerServer | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.link, self.backend, self.server, self._notify = link, backend, server, notify
        self._shards: ShardServer | None = None  # at that server
        if server is not None:
            self._shards, server.rate_limits = ShardServer(server, self._part_arrived), link.rate_limits
        # (round, peer), this peer too -> digest and part
        self._parts: dict[tuple[int, str], tuple[str, bytes]] = {}
        # by round, of the newest ones aggregated
        self._packets: dict[int, bytes] = dict([backend.pending]) if backend.pending is not None else {}
        self._unsent: list[bytes] = []  # error feedback for other aggregators that the hub has not taken yet
        self._round, self._aggregates = 0, False  # the newest round, and whether it has shards here
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cocktail-aggregator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def _bounds(self) -> SizeBounds:
        assert self.link.bounds is not None, "the link knows the bounds before an aggregator starts"
        return self.link.bounds

    def part(self, round: int, packet: bytes) -> None:
        """Add this peer's own part, for the shards it aggregates. To be called before its report."""
        with self._lock:
            self._parts[round, self.link.name] = digest_of(packet), packet

    def packet(self, round: int) -> bytes | None:
        """Return the packet of this peer's shards in that round, if it aggregated any."""
        return self._packets.get(round)

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
            self.link.orders.report_parts(round, here)

    def leave(self, timeout: float) -> bool:
        """Finish the open round, within `timeout`, and hand over the error feedback of all shards.

        To be called after the last exchange, before `close`. Returns whether the hub has the error feedback.
        """
        self.link.orders.resign(last=True)
        until = min(time.monotonic() + timeout, self.link.leave_requested.at + HANDOFF_S)
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
        self.link.orders.stop()
        self._thread.join(timeout)
        if self.server is not None:
            self.server.close()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self.link.orders.next()) is not None:
            try:
                self._handle(order)
            except (TransportError, KeyError) as error:  # the hub gets no packet and goes on
                log.debug("as an aggregator", exc_info=error)
            except OSError as error:
                self._notify(f"this peer aggregates no shards any more: {error}")
                self.link.orders.resign(last=False, lost=True)

    def _handle(self, order: messages.Round | messages.Close | messages.Committed) -> None:
        if isinstance(order, messages.Committed):
            self._committed(order)
            return
        if self.backend.pending is not None:
            if self.backend.pending[0] == order.round:
                self.backend.undo()  # the round is reopened, or closed again
            else:
                self._settle_by_packet(self.backend.pending[0])  # the end of its round was not received
        if isinstance(order, messages.Close):
            self._close(order)
        elif order.exchange:  # without an exchange the round only evaluates
            self._opened(order)

    def _opened(self, order: messages.Round) -> None:
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[0] >= order.round}
        mine = [owner.shards for owner in order.owners if owner.name == self.link.name]
        self._round, self._aggregates = order.round, bool(mine)
        if order.fits:
            self.backend.fits(order.fits)
        given = self.backend.own(mine[0] if mine else [])
        if self._shards is not None:
            self._shards.opened(order.round, order.keys, self.backend.longest(order.round))
        self._report_parts(order.round)  # of a reopened round the hub does not know the parts reported before
        self._hand_over(given)

    def _hand_over(self, errors: bytes) -> bool:
        """Upload the error feedback of shards given up. What the hub does not take is offered once more."""
        again, self._unsent = self._unsent, []
        given = [*again, errors]
        for packet in filter(None, given):
            if self.link.put(f"error/{self._round}", packet) is False and packet not in again:
                self._unsent.append(packet)
        if any(given) and not self._unsent:
            self.backend.handed()
        return not self._unsent

    def _close(self, close: messages.Close) -> None:
        link, round, weights = self.link, close.round, close.weights
        most = self._bounds.handoff()
        left = [
            WeightedPacket(e.peer, link.fetch(f"estate/{e.number}", most), e.share) for e in close.estates
        ]
        parts = {peer: self._part_of(peer, round, close.parts.get(peer, "")) for peer in sorted(weights)}
        try:
            updates = [WeightedPacket(peer, part, weights[peer]) for peer, part in parts.items()]
            packet = self.backend.aggregate(round, updates, left)
        except UpdateRejected as error:
            link.orders.report_unusable(messages.Unusable(round, close.attempt, error.peer, error.reason))
            return
        kept = {r: one for r, one in self._packets.items() if r > round - KEPT}
        self._packets = kept | {round: packet}
        if self._shards is not None:
            self._shards.serve(round, packet)
        link.put(f"shard/{round}/{close.attempt}", packet)

    def _part_of(self, peer: str, round: int, digest: str) -> bytes:
        with self._lock:
            found, part = self._parts.get((round, peer), ("", b""))
        if found == digest:
            return part
        return self.link.fetch(f"part/{round}/{peer}", self.backend.longest(round))

    def _committed(self, committed: messages.Committed) -> None:
        if self.backend.pending is not None and self.backend.pending[0] <= committed.round:
            told = self.link.name in committed.lost or self.link.name in committed.moved
            if told and self.backend.pending[0] == committed.round:
                self._settle(digest_of(self.backend.pending[1]) in committed.moved.values())
            else:  # the hub was restarted, or the end of an earlier round was not received
                self._settle_by_packet(self.backend.pending[0])
        if committed.round >= self._round:
            self._aggregates = False

    def _settle_by_packet(self, round: int) -> None:
        """Settle or undo the newest aggregate by whether it is in the round's packet."""
        packet = self.link.fetch(f"packet/{round}", self._bounds.packet(round))
        self._settle(self.backend.took(packet))

    def _settle(self, taken: bool) -> None:
        if taken:
            self.backend.settle()
        else:
            self.backend.undo()
