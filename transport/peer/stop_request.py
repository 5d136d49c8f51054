"""A wish to leave, and since when."""

from __future__ import annotations

import threading
import time
from math import inf


class StopRequest(threading.Event):
    """A signal handler may set it."""

    at = inf  # monotonic seconds

    def set(self) -> None:
        self.at = min(self.at, time.monotonic())
        super().set()
