"""The barrier where the hub's commit thread waits for the shard packets of aggregators."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from transport.actions import Abandoned
from transport.protocol import UpdateRejected
from transport.transfer import ChunkBuffer

LONGEST = 20  # times the patience; then an aggregator is lost though its bytes move


class ShardBarrier:
    """Shard packets of one round. An attempt ends when every aggregator has answered or is lost.

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
        self._refused: UpdateRejected | None = None
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

    def wait(self) -> dict[str, bytes]:
        """Return aggregator -> the packet of its shards. Raises UpdateRejected for a part, Abandoned."""
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
                raise self._refused
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
                self._refused = UpdateRejected(peer, why, aggregator)
                self._changed.notify_all()

    def end(self) -> None:
        """Release the waiting thread: the run is over."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
