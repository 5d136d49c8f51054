"""Token buckets: the bandwidth a peer may use, so that the others in the house keep theirs, and how often a
hub lets somebody do what costs it something. The clock is an argument.

A bucket fills at its rate, up to some seconds of it, and may go into debt. While a peer's is in debt, bulk
waits: chunks are sent as the bucket for uploads allows, and asked for as the one for downloads does. Control
messages wait for nothing, but count.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

INFINITE = float("inf")
SLACK_S = 0.05  # a thread that wakes a little late catches up; more would be a burst
MAX_NAMES = 4096  # names of which a hub knows what they took


class TokenBucket:
    """Bytes in one direction, over all connections of a peer; or whatever else has a rate. `rate` is of a
    second, `slack_s` of them are kept; None: no limit.

    Links to owners and an owner's door have threads of their own and this bucket in common.
    """

    def __init__(self, rate: float | None, slack_s: float = SLACK_S) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a rate of {rate} bytes a second")
        self.rate, self._slack_s = rate, slack_s
        self._lock = threading.Lock()
        self._level = 0.0  # bytes that may go now; below 0: the debt
        self._at = -INFINITE  # when that was so

    def level(self, now: float) -> float:
        """Bytes that may go now; not above 0: none. More than these may go at once, and are owed then."""
        with self._lock:
            return self._filled(now)

    def _filled(self, now: float) -> float:
        if self.rate is None:
            return INFINITE
        filled = max(0.0, now - self._at) * self.rate  # infinite the first time: it starts full
        self._level = min(self._slack_s * self.rate, self._level + filled)
        self._at = max(self._at, now)
        return self._level

    def take(self, size: float, now: float) -> None:
        """So many bytes went, or are sure to come. Below 0: fewer came than were expected."""
        if self.rate is not None:
            with self._lock:
                self._level = self._filled(now) - size

    def open_at(self, now: float) -> float:
        """When something may go again; `now` or before: it may."""
        if self.rate is None or self.level(now) > 0:
            return now
        return now + 0.001 - self._level / self.rate


class TokenBuckets:
    """A bucket of the same rate for each of many, by name: so much a second, so much at once."""

    def __init__(self, rate: float, at_once: float) -> None:
        self._rate, self._slack_s = rate, at_once / rate
        self._buckets: dict[Hashable, TokenBucket] = {}  # who took last comes last

    def take(self, name: Hashable, now: float, size: float = 1.0) -> bool:
        """May it? Then so much is taken."""
        bucket = self._of(name)
        if bucket.level(now) <= 0:
            return False
        bucket.take(size, now)
        return True

    def fine(self, name: Hashable, now: float, size: float) -> None:
        """So much is taken, whatever there is."""
        self._of(name).take(size, now)

    def _of(self, name: Hashable) -> TokenBucket:
        bucket = self._buckets.pop(name, None) or TokenBucket(self._rate, self._slack_s)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_NAMES:
            del self._buckets[next(iter(self._buckets))]
        return bucket


@dataclass(frozen=True)
class Bandwidth:
    """What the owner of this machine lends, in bytes a second each way; None: all there is."""

    up: float | None = None
    down: float | None = None


class RateLimits:
    """Both directions of one peer."""

    def __init__(self, lent: Bandwidth) -> None:
        self.up, self.down = TokenBucket(lent.up), TokenBucket(lent.down)
