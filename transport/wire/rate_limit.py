"""Token buckets, and a queue in which origins have turns: the bandwidth a peer may use, and how often a hub
accepts a costly request.

A bucket fills at its rate, up to some seconds of it, and may go into debt. While a peer's bucket is in debt,
bulk waits: one bucket limits the chunks sent, the other the chunks requested. Control messages never wait,
but are counted. The clock is an argument.

The queue serves origins in turn, and at each origin those who have something waiting. Whoever puts in most
waits longest: one of many who share an address delays them, and nobody elsewhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

INFINITE = float("inf")
SLACK_S = 0.05  # lets a thread that wakes late catch up; more would be a burst
MAX_NAMES = 4096  # of buckets kept


class TokenBucket:
    """One token bucket, shared by threads: bytes of one direction of a peer, or another rate.

    Args:
        rate: tokens a second; None: no limit.
        slack_s: seconds of the rate that the bucket holds.
    """

    def __init__(self, rate: float | None, slack_s: float = SLACK_S) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a rate of {rate} bytes a second")
        self.rate, self._slack_s = rate, slack_s
        self._lock = threading.Lock()
        self._level = 0.0  # tokens at `_at`; below 0: the debt
        self._at = -INFINITE  # seconds

    def level(self, now: float) -> float:
        """Return the tokens there are. If above 0, more than these may be taken: the rest is debt."""
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
        """Take tokens, for bytes sent or certain to arrive. A negative `size` returns some."""
        if self.rate is not None:
            with self._lock:
                self._level = self._filled(now) - size

    def open_at(self, now: float) -> float:
        """Return the time at which the level is above 0 again; `now` if it is."""
        if self.rate is None or self.level(now) > 0:
            return now
        return now + 0.001 - self._level / self.rate


class TokenBuckets:
    """Token buckets of one rate by name: `rate` a second, `at_once` in a burst."""

    def __init__(self, rate: float, at_once: float) -> None:
        self._rate, self._slack_s = rate, at_once / rate
        self._buckets: dict[Hashable, TokenBucket] = {}  # the last used last

    def take(self, name: Hashable, now: float, size: float = 1.0) -> bool:
        """Take tokens if the bucket is not in debt; returns whether they were taken."""
        bucket = self._of(name)
        if bucket.level(now) <= 0:
            return False
        bucket.take(size, now)
        return True

    def fine(self, name: Hashable, now: float, size: float) -> None:
        """Take tokens even if that makes a debt."""
        self._of(name).take(size, now)

    def forget(self, name: Hashable) -> None:
        self._buckets.pop(name, None)

    def _of(self, name: Hashable) -> TokenBucket:
        bucket = self._buckets.pop(name, None) or TokenBucket(self._rate, self._slack_s)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_NAMES:
            del self._buckets[next(iter(self._buckets))]
        return bucket


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth that a volunteer lends, in bytes a second; None: no limit."""

    up: float | None = None
    down: float | None = None


class RateLimits:
    """The rate limits of one peer, both directions."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.lent = bandwidth  # what the buckets let through
        self.up, self.down = TokenBucket(bandwidth.up), TokenBucket(bandwidth.down)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by who pays for them, and those by their origin."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self.count = 0  # of items

    def put(self, origin: str, payer: str, item: T) -> None:
        """Append an item to those of its payer."""
        self._origins.setdefault(origin, OrderedDict()).setdefault(payer, deque()).append(item)
        self.count += 1

    def waiting(self, origin: str, payer: str) -> int:
        """Count the items of a payer."""
        payers = self._origins.get(origin)
        return len(payers[payer]) if payers is not None and payer in payers else 0

    def take(self) -> T:
        """Pop the next item. Raises IndexError where there is none."""
        if not self._origins:
            raise IndexError("nothing waits")
        origin, payers = next(iter(self._origins.items()))
        payer, items = next(iter(payers.items()))
        item = items.popleft()
        self.count -= 1
        del payers[payer]
        if items:
            payers[payer] = items  # behind the others of its origin
        if payers:
            self._origins.move_to_end(origin)
        else:
            del self._origins[origin]
        return item

    def drop(self, origin: str, payer: str) -> None:
        """Forget the items of a payer."""
        payers = self._origins.get(origin, OrderedDict())
        self.count -= len(payers.pop(payer, ()))
        if origin in self._origins and not payers:
            del self._origins[origin]
