"""Progress as events, at a bounded rate, with speed and time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .events import Event, Progressed

EVERY_S = 0.5  # least seconds between two events
KNOWN_S = 1.0  # seconds before a rate is reported
OF_LATE_S = 10.0  # seconds over which the rate is averaged: a line may slow down


class ProgressMeter:
    """A callback `(done, total)` that emits Progressed events; a total of 0 means unknown."""

    def __init__(self, tell: Callable[[Event], None], state: str, unit: str) -> None:
        self.tell, self.state, self.unit = tell, state, unit
        self.told = time.monotonic()
        self.marks = deque[tuple[float, int]]()  # (time, done), from the first call on
        self.begun = False  # an event was emitted, so the end must be as well

    def __call__(self, done: int, total: int = 0) -> None:
        now = time.monotonic()
        if not self.marks:
            self.marks.append((now, done))
        if now < self.told + EVERY_S and not (self.begun and done == total):
            return
        self.told, self.begun = now, True
        self.marks.append((now, done))
        while len(self.marks) > 2 and self.marks[1][0] <= now - OF_LATE_S:
            self.marks.popleft()
        began, had = self.marks[0]
        rate = (done - had) / (now - began) if now - began >= KNOWN_S else 0.0
        eta = max(0, total - done) / rate if rate > 0 and total else None  # a total may grow
        self.tell(Progressed(self.state, done, total, self.unit, round(rate, 1), eta))
