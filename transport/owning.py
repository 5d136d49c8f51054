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
import time
from collections.abc import Sequence
from typing import Protocol

from .door import Door
from .errors import TransportError, UpdateRejected
from .messages import Close, Committed, Round, Unusable
from .owners import digest_of
from .peer import LEGACY_S, LOOK_S, PeerLink

log = logging.getLogger(__name__)


class OwnersHalf(Protocol):
    """What an owner cannot know (settings.Work says more); called from one thread."""

    def own(self, shards: Sequence[int]) -> bytes: ...
    def fits(self, size: int) -> None:
        """Of the packet of all shards; called only where members say so."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes: ...
    def took(self, packet: bytes, ours: bytes) -> bool:
        """Is `ours`, the newest aggregate, in the packet of all shards?"""

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
        # (round, peer), this peer too -> its part, and the digest of that
        self._parts: dict[tuple[int, str], tuple[str, bytes]] = {}
        self._packet: tuple[int, bytes] = -1, b""  # of the newest round that was aggregated
        self._pending: Close | None = None  # aggregated, and not known to be committed
        self._left: list[tuple[str, bytes, float]] = []  # to be inherited when it is
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
        """After the last exchange: let the round in which something is owned end, within `timeout`, and hand
        over the errors of all shards. Whether the hub has them."""
        self.link.orders.resign(last=True)
        until = min(time.monotonic() + timeout, self.link.leave_requested.at + LEGACY_S)
        while self._thread.is_alive() and self._owns and time.monotonic() < until:
            self._thread.join(LOOK_S)
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
        if self._pending is not None:
            if self._pending.round == order.round:
                self._take_back()  # the round is opened, or closed, again
            else:
                self._see(self._pending.round)  # its end was not heard
        if isinstance(order, Close):
            self._close(order)
        elif order.exchange:  # else only the result is evaluated
            self._opened(order)

    def _opened(self, order: Round) -> None:
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[0] >= order.round}
        if self.door is not None:
            self.door.opened(order.round, order.keys)
        mine = [owner.shards for owner in order.owners if owner.name == self.link.name]
        self._round, self._owns = order.round, bool(mine)
        if order.fits:
            self.half.fits(order.fits)
        self._tell(order.round)  # where it is open again; what was said before, nobody knows
        self._hand_over(mine[0] if mine else [])

    def _hand_over(self, shards: Sequence[int]) -> bool:
        """Own these from now on. What the hub does not take of the others' errors is offered once more."""
        again, self._given = self._given, []
        given = [*again, self.half.own(shards)]
        for packet in filter(None, given):
            if self.link.put(f"error/{self._round}", packet) is False and packet not in again:
                self._given.append(packet)
        return not self._given

    def _close(self, close: Close) -> None:
        link, round, weights = self.link, close.round, close.weights
        self._left = [(e.peer, link.fetch(f"estate/{e.number}"), e.share) for e in close.estates]
        parts = {peer: self._part_of(peer, round, close.parts.get(peer, "")) for peer in sorted(weights)}
        try:
            packet = self.half.aggregate(round, [(peer, part, weights[peer]) for peer, part in parts.items()])
        except UpdateRejected as error:
            link.orders.unusable(Unusable(round, close.attempt, error.peer, error.reason))
            return
        self._pending, self._packet = close, (round, packet)
        if self.door is not None:
            self.door.serve(round, packet)
        link.put(f"shard/{round}/{close.attempt}", packet)

    def _part_of(self, peer: str, round: int, digest: str) -> bytes:
        with self._lock:
            found, part = self._parts.get((round, peer), ("", b""))
        return part if found == digest else self.link.fetch(f"part/{round}/{peer}")

    def _committed(self, committed: Committed) -> None:
        if self._pending is not None and self._pending.round <= committed.round:
            if committed.recalled or self._pending.round < committed.round:
                self._see(self._pending.round)
            else:
                self._settle(self.link.name not in committed.lost)
        if committed.round >= self._round:
            self._owns = False

    def _see(self, round: int) -> None:
        """Nobody said what became of the newest aggregate: look whether it is in the round's packet."""
        self._settle(self.half.took(self.link.fetch(f"packet/{round}"), self._packet[1]))

    def _settle(self, taken: bool) -> None:
        if not taken:
            self._take_back()
            return
        left, self._pending, self._left = self._left, None, []
        for legacy in left:
            try:
                self.half.inherit(*legacy)
            except UpdateRejected as error:
                log.debug("an estate", exc_info=error)

    def _take_back(self) -> None:
        self.half.undo()
        self._pending, self._left = None, []
