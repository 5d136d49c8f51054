"""The request to leave, and the time it was made."""

from __future__ import annotations

import threading
import time
from math import inf


class StopRequest(threading.Event):
    """An event with the time it was first set; a signal handler may set it."""

    at = inf  # monotonic seconds

    def set(self) -> None:
        self.at = min(self.at, time.monotonic())
        super().set()
