"""The hub's reader thread: reads objects for peers, what a round waits for first.

Everything else (files, and ranges of the log, for those who join) is read for one origin after the other,
while rounds go on within a rate in all. What is sent to newcomers and has not arrived is known at each look
at all connections; until the next one no more is read than there is room for. So whoever fetches much, or
reads nothing of it, delays others who fetch much, and neither a round nor the hub's memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from transport.wire import FairQueue, TokenBucket

BESIDE_ROUNDS = 128 << 20  # bytes a second that are read for joiners, all together, while rounds go on
BURST_S = 0.25  # seconds of that rate at once
ROOM, LEAST = 32 << 20, 4 << 20  # bytes that are on their way to newcomers; that are read between two looks

log = logging.getLogger(__name__)
Job = Callable[[], object]


@dataclass(frozen=True)
class Reading:
    """A reading that is asked for."""

    job: Job
    size: int  # bytes
    urgent: bool  # a round waits for it
    origin: str
    payer: str  # session


class ReaderThread:
    """One thread. `busy`: tells whether rounds go on."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._urgent = deque[Job]()
        self._others = FairQueue[Reading]()
        self._bucket = TokenBucket(BESIDE_ROUNDS, BURST_S)
        self._changed = threading.Condition()
        self._room = ROOM  # bytes that are left until the next look
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cocktail-reader", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job of the hub's own, after those that are urgent already."""
        with self._changed:
            self._urgent.append(job)
            self._changed.notify()

    def read(self, reading: Reading) -> None:
        with self._changed:
            if reading.urgent:
                self._urgent.append(reading.job)
            else:
                self._others.put(reading.origin, reading.payer, reading)
            self._changed.notify()

    def replenish(self, held: int) -> None:
        """Make room for more, where so many bytes are on their way to newcomers."""
        with self._changed:
            self._room = max(LEAST, ROOM - held)
            if len(self._others):
                self._changed.notify()

    def forget(self, origin: str, payer: str) -> None:
        """Drop what a session that is over has asked for, but for what is urgent."""
        with self._changed:
            self._others.drop(origin, payer)

    def shutdown(self) -> None:
        """End the thread after the job under way; others are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # a job answers its peer itself; this one's error concerns nobody else
                log.debug("in the reader thread", exc_info=True)

    def _next(self) -> Job | None:
        """Wait for the next job; None: the thread is to end."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                if self._urgent:
                    return self._urgent.popleft()
                wait: float | None = None
                if len(self._others) and self._room > 0:
                    wait = max(0.0, self._bucket.open_at(now) - now) if self._busy() else 0.0
                    if not wait:
                        reading = self._others.take()
                        self._bucket.take(reading.size, now)
                        self._room -= reading.size
                        return reading.job
                self._changed.wait(wait)
            return None
