"""A peer that owns shards: a thread beside its training, which does what the hub says to owners.

    Round       these shards are mine; the errors of those that were go to the hub, for their next owner
    Close       fetch the parts of these peers, aggregate, upload the packet; or say who is unusable
    Committed   the aggregate is in the run, and what was left to me joins my errors; or it is not: taken back

What is aggregated and not committed, and what is left and not taken over, is the hub's to say again: to this
owner, or to another. An owner that is killed costs the errors of its shards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from .door import Door
from .errors import TransportError, UpdateRejected
from .messages import Close, Committed, Round, Unusable
from .peer import PeerLink

log = logging.getLogger(__name__)


class OwnersHalf(Protocol):
    """What an owner cannot know (settings.Work says more); called from one thread."""

    def own(self, shards: Sequence[int]) -> bytes: ...
    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes: ...
    def undo(self) -> None:
        """The newest aggregate is not in the run."""

    def inherit(self, peer: str, packet: bytes, share: float) -> None: ...


class Owning:
    """One peer's ownership. `start` after `link.connect`; `leave` before `link.leave`.

    Args:
        door: where other members can reach it; None: they go through the hub.
        limit: bytes of what one of them brings in a round.
    """

    def __init__(self, link: PeerLink, half: OwnersHalf, door: Door | None = None, limit: int = 0) -> None:
        self.link, self.half, self.door = link, half, door
        if door is not None:
            door.came, door.limit, door.buckets = self._came, limit, link.buckets
        self._parts: dict[tuple[int, str], bytes] = {}  # (round, peer), this peer too -> its part
        self._packet: tuple[int, bytes] = -1, b""  # of the newest round that was aggregated
        self._pending: Close | None = None  # aggregated, and not known to be committed
        self._left: list[tuple[str, bytes, float]] = []  # to be inherited when it is
        self._round = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cocktail-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def part(self, round: int, packet: bytes) -> None:
        """What this peer itself has for the shards it owns. Before its report."""
        with self._lock:
            self._parts[round, self.link.name] = packet

    def packet(self, round: int) -> bytes | None:
        """Of the shards that this peer owned in that round."""
        return self._packet[1] if self._packet[0] == round else None

    def _came(self, round: int, peer: str, packet: bytes) -> None:
        """Called by the door's thread."""
        with self._lock:
            self._parts[round, peer] = packet
            names = sorted(name for r, name in self._parts if r == round)
        self.link.orders.holding(round, names)

    def leave(self, timeout: float) -> bool:
        """After the last exchange: hand over the errors of all shards. Whether the hub has them."""
        self.link.orders.enough()
        self._thread.join(timeout)
        if self.door is not None:
            self.door.close()
        return not self._thread.is_alive() and self._hand_over(())

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self.link.orders.next()) is not None:
            try:
                self._obey(order)
            except (TransportError, KeyError) as error:  # the hub sees that nothing comes, and goes on
                log.debug("as an owner", exc_info=error)

    def _obey(self, order: Round | Close | Committed) -> None:
        if isinstance(order, Committed):
            self._committed(order)
            return
        if self._pending is not None and self._pending.round == order.round:
            self._take_back()  # the round is opened, or closed, again
        if isinstance(order, Close):
            self._close(order)
        elif order.exchange:  # else only the result is evaluated
            self._round = order.round
            with self._lock:
                self._parts = {key: part for key, part in self._parts.items() if key[0] >= order.round}
            if self.door is not None:
                self.door.opened(order.round, order.keys)
            mine = [owner.shards for owner in order.owners if owner.name == self.link.name]
            self._hand_over(mine[0] if mine else [])

    def _hand_over(self, shards: Sequence[int]) -> bool:
        given = self.half.own(shards)
        return not given or self.link.put(f"error/{self._round}", given) is not False

    def _close(self, close: Close) -> None:
        link, round, weights = self.link, close.round, close.weights
        self._left = [(e.peer, link.fetch(f"estate/{e.number}"), e.share) for e in close.estates]
        updates = [(peer, self._part_of(peer, round), weights[peer]) for peer in sorted(weights)]
        try:
            packet = self.half.aggregate(round, updates)
        except UpdateRejected as error:
            link.orders.unusable(Unusable(round, close.attempt, error.peer, error.reason))
            return
        self._pending, self._packet = close, (round, packet)
        if self.door is not None:
            self.door.serve(round, packet)
        link.put(f"shard/{round}/{close.attempt}", packet)

    def _part_of(self, peer: str, round: int) -> bytes:
        with self._lock:
            part = self._parts.get((round, peer))
        return self.link.fetch(f"part/{round}/{peer}") if part is None else part

    def _committed(self, committed: Committed) -> None:
        if self._pending is None or self._pending.round != committed.round:
            return
        if self.link.name in committed.lost:
            self._take_back()
            return
        for legacy in self._left:
            try:
                self.half.inherit(*legacy)
            except UpdateRejected as error:
                log.debug("an estate", exc_info=error)
        self._pending, self._left = None, []

    def _take_back(self) -> None:
        self.half.undo()
        self._pending, self._left = None, []
