"""A round whose shards peers aggregate, as its hub knows it: its state, and the barrier at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from transport.actions import Abandoned
from transport.protocol import UpdateRejected
from transport.transfer import ChunkBuffer

from .bodies import AggregatorInfo, Close, HandoffOffer
from .residual_handoffs import Deliveries

LONGEST = 20  # times the patience; then an aggregator is lost though its bytes move
Pair = tuple[str, str]  # sessions: aggregator, member


@dataclass
class ShardRound:
    """The round in progress: who aggregates what, and whose parts are where."""

    round: int
    members: Mapping[str, str]  # session -> name
    hub_shards: tuple[int, ...]
    aggregators: dict[str, AggregatorInfo]  # by session, and in the order of names
    parts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # session -> those that it has reported
    delivered: dict[Pair, str] = field(default_factory=dict)  # digest of the part that the aggregator reports
    at_hub: dict[Pair, str] = field(default_factory=dict)  # digest of the part that lies at the hub for it
    lost: set[str] = field(default_factory=set)  # aggregators that are gone or silent
    closes: dict[str, Close] = field(default_factory=dict)  # aggregator -> its newest order
    handoffs: list[HandoffOffer] = field(default_factory=list)  # that the hub adds to its error feedback

    def whole(self, session: str) -> bool:
        """Tell whether all parts that a member has reported are where they belong, and are for these
        aggregators, not for those before a restart. An aggregator has its own part."""
        names = {info.name for info in self.aggregators.values()}
        others = self.aggregators.keys() - self.lost - {session}
        return self.parts.get(session, {}).keys() <= names and all(
            self.part(a, session) in (self.delivered.get((a, session)), self.at_hub.get((a, session)))
            for a in others
        )

    def part(self, aggregator: str, member: str) -> str:
        """Return the digest of a member's part for an aggregator, as it has reported."""
        return self.parts.get(member, {}).get(self.aggregators[aggregator].name, "")

    def named(self, name: str) -> str | None:
        """Return the session of an aggregator that is not lost."""
        return next((s for s, a in self.aggregators.items() if a.name == name and s not in self.lost), None)

    def merged_by(self, aggregators: Iterable[str]) -> Deliveries:
        """Return handoff number -> shards in whose error feedback it is once the round is committed."""
        merged: dict[int, list[int]] = {}
        for aggregator in aggregators:
            for handoff in self.closes[aggregator].handoffs if aggregator in self.closes else ():
                merged.setdefault(handoff.number, []).extend(self.aggregators[aggregator].shards)
        return merged


class ShardBarrier:
    """Shard packets of one round, for which the commit thread waits. An attempt ends when every aggregator
    has answered or is lost.

    An aggregator on a thin line may fetch a handoff, or upload its packet, for minutes: while bytes move
    it is not silent.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience  # seconds after which a silent aggregator is lost
        self.attempt = 0  # counts over all rounds
        self.lost: dict[str, str] = {}  # aggregator -> why, since `begin`
        self._waited: set[str] = set()
        self._moved: dict[str, float] = {}  # aggregator -> when it last asked for, or sent, some bytes
        self._came: dict[str, bytes] = {}
        self._refused: tuple[str, UpdateRejected] | None = None  # by whom
        self._ended = False
        self._changed = threading.Condition()

    # ---- the commit thread ---------------------------------------------------------------------------------

    def ask(self, aggregators: Iterable[str]) -> int:
        """Begin an attempt, which voids packets of earlier ones. Returns its number for the aggregators."""
        with self._changed:
            self.attempt += 1
            self._waited, self._came, self._refused = set(aggregators) - self.lost.keys(), {}, None
            self._moved = {}
            return self.attempt

    def wait(self, denied: dict[str, str]) -> dict[str, bytes]:
        """Return aggregator -> the packet of its shards. Raises UpdateRejected for a part, with who refuses
        it in `denied`, and Abandoned."""
        began = time.monotonic()
        with self._changed:
            while self._waited and self._refused is None and not self._ended:
                now, until = time.monotonic(), {a: self._until(a, began) for a in self._waited}
                for aggregator in [a for a in until if until[a] <= now]:
                    took = until.pop(aggregator) - began
                    silent = took < LONGEST * self.patience
                    self.lost[aggregator] = (
                        f"nothing came of it for {self.patience:.0f} s"
                        if silent
                        else f"its packet was not here after {took:.0f} s"
                    )
                    self._waited.discard(aggregator)
                if until:
                    self._changed.wait(min(until.values()) - now)
            if self._refused is not None:
                by, rejected = self._refused
                denied[rejected.peer] = by
                raise rejected
            if self._waited:
                raise Abandoned
            return dict(self._came)

    def _until(self, aggregator: str, began: float) -> float:
        last = max(began, self._moved.get(aggregator, began))
        return min(last + self.patience, began + LONGEST * self.patience)

    def lose(self, aggregator: str, why: str) -> None:
        """Stop waiting for an aggregator; from either thread."""
        with self._changed:
            self.lost.setdefault(aggregator, why)
            self._waited.discard(aggregator)
            self._came.pop(aggregator, None)
            self._changed.notify_all()

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a closed round with no aggregator lost. The I/O thread calls this, since it reports losses
        from now on, while the commit thread may still be busy with earlier jobs."""
        with self._changed:
            self.lost = {}

    def moves(self, aggregator: str) -> None:
        """Note that it asked for some bytes, or sent some."""
        with self._changed:
            self._moved[aggregator] = time.monotonic()

    def came(self, aggregator: str, attempt: int, packet: ChunkBuffer) -> None:
        with self._changed:
            if attempt == self.attempt and aggregator in self._waited:
                self._came[aggregator] = packet.data()
                self._waited.discard(aggregator)
                self._changed.notify_all()

    def refuse(self, aggregator: str, attempt: int, peer: str, why: str) -> None:
        with self._changed:
            if attempt == self.attempt and self._refused is None:
                self._refused = aggregator, UpdateRejected(peer, why)
                self._changed.notify_all()

    def end(self) -> None:
        """Release the waiting thread: the run is over."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
