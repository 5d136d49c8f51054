"""A peer that owns shards: a thread beside its training, which does what the hub says to owners.

    Round       these shards are mine; the errors of those that were go to the hub, for their next owner
    Close       fetch the parts of these peers, aggregate, write that down, upload the packet; or say who is
                unusable
    Committed   the aggregate is in the run, and what was left to me joins my errors; or it is not: taken back

What is aggregated and not committed, and what is left and not taken over, is the hub's to say again: to this
owner, or to another. An owner that was killed has its errors when it is back, and asks the hub what became of
its newest aggregate. One that cannot write any more hands over its errors, and owns nothing from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from transport.peer import HANDOFF_S, POLL_S, PeerLink
from transport.protocol import (
    Close,
    Committed,
    Round,
    TransportError,
    Unusable,
    UpdateRejected,
    WeightedPacket,
)

from .shard_assignment import digest_of
from .shard_server import ShardServer

log = logging.getLogger(__name__)

ENDS_S = 2.0  # for an aggregate that nobody waits for any more


class AggregatorBackend(Protocol):
    """What an owner cannot know (settings.Work says more); called from one thread. What it has to write down
    may raise OSError."""

    def longest(self, round: int) -> int:
        """Bytes that a part of the shards that are owned can have, at most, in this round and the next."""

    @property
    def pending(self) -> tuple[int, bytes] | None:
        """Round and packet of the newest aggregate, until `settle` or `undo`; also of before a restart."""

    def own(self, shards: Sequence[int]) -> bytes: ...
    def fits(self, size: int) -> None:
        """Of the packet of all shards; called only where members say so."""

    def handed(self) -> None:
        """The hub has all that `own` has returned."""

    def aggregate(
        self, round: int, updates: Sequence[WeightedPacket], left: Sequence[WeightedPacket]
    ) -> bytes:
        """On the disk when it returns, with what is `left` to the errors once the round is committed."""

    def took(self, packet: bytes) -> bool:
        """Is the newest aggregate in this packet of all shards?"""

    def settle(self) -> None:
        """The newest aggregate is in the run."""

    def undo(self) -> None:
        """It is not."""

    def close(self) -> None: ...


class AggregatorThread:
    """One peer's ownership. `start` after `link.connect`; `leave` before `link.leave`.

    Args:
        door: where other members can reach it; None: they go through the hub.
        told: hears why nothing can be owned here any more.
    """

    def __init__(
        self,
        link: PeerLink,
        half: AggregatorBackend,
        server: ShardServer | None = None,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.link, self.half, self.server, self._told = link, half, server, told
        if server is not None:
            server.came, server.rate_limits = self._came, link.rate_limits
        # (round, peer), this peer too -> its part, and the digest of that
        self._parts: dict[tuple[int, str], tuple[str, bytes]] = {}
        self._packet: tuple[int, bytes] = half.pending or (-1, b"")  # of the newest round that was aggregated
        self._given: list[bytes] = []  # errors that are others' now, and not at the hub
        self._round, self._owns = 0, False  # the newest round, and whether something is owned in it
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cocktail-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def part(self, round: int, packet: bytes) -> None:
        """What this peer itself has for the shards it owns. Before its report."""
        with self._lock:
            self._parts[round, self.link.name] = digest_of(packet), packet

    def packet(self, round: int) -> bytes | None:
        """Of the shards that this peer owned in that round."""
        return self._packet[1] if self._packet[0] == round else None

    def _came(self, round: int, peer: str, packet: bytes) -> None:
        """Called by the door's thread."""
        with self._lock:
            self._parts[round, peer] = digest_of(packet), packet
        self._tell(round)

    def _tell(self, round: int) -> None:
        """Say whose parts are here."""
        with self._lock:
            here = {name: digest for (r, name), (digest, _) in self._parts.items() if r == round}
        if here:
            self.link.orders.holding(round, here)

    def leave(self, timeout: float) -> bool:
        """After the last exchange, before `close`: let the round in which something is owned end, within
        `timeout`, and hand over the errors of all shards. Whether the hub has them."""
        self.link.orders.resign(last=True)
        until = min(time.monotonic() + timeout, self.link.leave_requested.at + HANDOFF_S)
        while self._thread.is_alive() and self._owns and time.monotonic() < until:
            self._thread.join(POLL_S)
        self._end(timeout)
        return not self._thread.is_alive() and self._hand_over(self.half.own(()))

    def close(self) -> None:
        """Own nothing any more. What is written down stays."""
        self._end(ENDS_S)
        if not self._thread.is_alive():  # else it is in the middle of something, and the process about to end
            self.half.close()

    def _end(self, timeout: float) -> None:
        self.link.orders.enough()
        self._thread.join(timeout)
        if self.server is not None:
            self.server.close()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self.link.orders.next()) is not None:
            try:
                self._obey(order)
            except (TransportError, KeyError) as error:  # the hub sees that nothing comes, and goes on
                log.debug("as an owner", exc_info=error)
            except OSError as error:
                self._told(f"this peer owns no shards any more: {error}")
                self.link.orders.resign(last=False, lost=True)

    def _obey(self, order: Round | Close | Committed) -> None:
        if isinstance(order, Committed):
            self._committed(order)
            return
        if self.half.pending is not None:
            if self.half.pending[0] == order.round:
                self.half.undo()  # the round is opened, or closed, again
            else:
                self._see(self.half.pending[0])  # its end was not heard
        if isinstance(order, Close):
            self._close(order)
        elif order.exchange:  # else only the result is evaluated
            self._opened(order)

    def _opened(self, order: Round) -> None:
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[0] >= order.round}
        mine = [owner.shards for owner in order.owners if owner.name == self.link.name]
        self._round, self._owns = order.round, bool(mine)
        if order.fits:
            self.half.fits(order.fits)
        given = self.half.own(mine[0] if mine else [])
        if self.server is not None:
            self.server.opened(order.round, order.keys, self.half.longest(order.round))
        self._tell(order.round)  # where it is open again; what was said before, nobody knows
        self._hand_over(given)

    def _hand_over(self, errors: bytes) -> bool:
        """Give the hub the errors of others' shards. What it does not take is offered once more."""
        again, self._given = self._given, []
        given = [*again, errors]
        for packet in filter(None, given):
            if self.link.put(f"error/{self._round}", packet) is False and packet not in again:
                self._given.append(packet)
        if any(given) and not self._given:
            self.half.handed()
        return not self._given

    def _close(self, close: Close) -> None:
        link, round, weights = self.link, close.round, close.weights
        left = [WeightedPacket(e.peer, link.fetch(f"estate/{e.number}"), e.share) for e in close.estates]
        parts = {peer: self._part_of(peer, round, close.parts.get(peer, "")) for peer in sorted(weights)}
        try:
            updates = [WeightedPacket(peer, part, weights[peer]) for peer, part in parts.items()]
            packet = self.half.aggregate(round, updates, left)
        except UpdateRejected as error:
            link.orders.unusable(Unusable(round, close.attempt, error.peer, error.reason))
            return
        self._packet = round, packet
        if self.server is not None:
            self.server.serve(round, packet)
        link.put(f"shard/{round}/{close.attempt}", packet)

    def _part_of(self, peer: str, round: int, digest: str) -> bytes:
        with self._lock:
            found, part = self._parts.get((round, peer), ("", b""))
        return part if found == digest else self.link.fetch(f"part/{round}/{peer}")

    def _committed(self, committed: Committed) -> None:
        if self.half.pending is not None and self.half.pending[0] <= committed.round:
            if committed.recalled or self.half.pending[0] < committed.round:
                self._see(self.half.pending[0])
            else:
                self._settle(digest_of(self.half.pending[1]) in committed.moved.values())
        if committed.round >= self._round:
            self._owns = False

    def _see(self, round: int) -> None:
        """Nobody said what became of the newest aggregate: look whether it is in the round's packet."""
        self._settle(self.half.took(self.link.fetch(f"packet/{round}")))

    def _settle(self, taken: bool) -> None:
        if taken:
            self.half.settle()
        else:
            self.half.undo()
