"""Counters of bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrafficDelta:
    """Bytes moved within a period."""

    up: int = 0  # peer to hub
    down: int = 0
    fetched: int = 0  # of `down`: before the peer was ready


@dataclass
class Traffic:
    """Bytes on the wire of one session, ZMTP and CURVE framing included."""

    up: int = 0  # peer to hub
    down: int = 0
    ready: int | None = None  # `down` when the peer had caught up; None: it has not
    told: TrafficDelta | None = None  # sums at the last `tell`

    @property
    def sums(self) -> TrafficDelta:
        return TrafficDelta(self.up, self.down, self.down if self.ready is None else self.ready)

    def tell(self) -> TrafficDelta:
        """Return the bytes since the last call."""
        now, before = self.sums, self.told or TrafficDelta()
        self.told = now
        return TrafficDelta(now.up - before.up, now.down - before.down, now.fetched - before.fetched)
