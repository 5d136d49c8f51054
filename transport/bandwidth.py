"""The bandwidth a peer may use, so that the others in the house keep theirs. The clock is an argument.

Token buckets: a bucket fills at its rate, up to SLACK_S seconds of it, and may go into debt. While it is in
debt, bulk waits: chunks are sent as the bucket for uploads allows, and asked for as the one for downloads
does. Control messages wait for nothing, but count.
"""

from __future__ import annotations

from dataclasses import dataclass

INFINITE = float("inf")
SLACK_S = 0.05  # a thread that wakes a little late catches up; more would be a burst


class Bucket:
    """Bytes in one direction, over all connections of a peer. `rate` in bytes a second; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a rate of {rate} bytes a second")
        self.rate = rate
        self._level = 0.0  # bytes that may go now; below 0: the debt
        self._at = -INFINITE  # when that was so

    def level(self, now: float) -> float:
        """Bytes that may go now; not above 0: none. More than these may go at once, and are owed then."""
        if self.rate is None:
            return INFINITE
        filled = max(0.0, now - self._at) * self.rate  # infinite the first time: it starts full
        self._level = min(SLACK_S * self.rate, self._level + filled)
        self._at = max(self._at, now)
        return self._level

    def take(self, size: float, now: float) -> None:
        """So many bytes went, or are sure to come. Below 0: fewer came than were expected."""
        if self.rate is not None:
            self._level = self.level(now) - size

    def open_at(self, now: float) -> float:
        """When something may go again; `now` or before: it may."""
        if self.rate is None or self.level(now) > 0:
            return now
        return now + 0.001 - self._level / self.rate


@dataclass(frozen=True)
class Bandwidth:
    """What the owner of this machine lends, in bytes a second each way; None: all there is."""

    up: float | None = None
    down: float | None = None
