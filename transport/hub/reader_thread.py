"""The hub's reader thread: reads objects for peers, what a round waits for first.

Everything else (files, and ranges of the log, for those who join) is read for one origin after the other, and
while rounds go on within a rate in all. So whoever fetches much delays others who fetch much, and no round.
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
                if len(self._others):
                    wait = max(0.0, self._bucket.open_at(now) - now) if self._busy() else 0.0
                    if not wait:
                        reading = self._others.take()
                        self._bucket.take(reading.size, now)
                        return reading.job
                self._changed.wait(wait)
            return None
