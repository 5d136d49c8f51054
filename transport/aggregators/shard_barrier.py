"""The barrier where the hub's commit thread waits for the shard packets of aggregators."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from transport.actions import Abandoned
from transport.protocol import UpdateRejected
from transport.transfer import ChunkBuffer


class ShardBarrier:
    """Shard packets of one round. An attempt ends when every aggregator has answered or is lost."""

    def __init__(self, patience: float) -> None:
        self.patience = patience  # seconds after which a silent aggregator is lost
        self.attempt = 0  # counts over all rounds
        self.lost: dict[str, str] = {}  # aggregator -> why, since `begin`
        self._waited: set[str] = set()
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
            return self.attempt

    def wait(self) -> dict[str, bytes]:
        """Return aggregator -> the packet of its shards. Raises UpdateRejected for a part, Abandoned."""
        until = time.monotonic() + self.patience
        with self._changed:
            while self._waited and self._refused is None and not self._ended:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    for aggregator in self._waited:
                        self.lost[aggregator] = f"nothing came of it for {self.patience:.0f} s"
                    self._waited = set()
            if self._refused is not None:
                raise self._refused
            if self._waited:
                raise Abandoned
            return dict(self._came)

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
