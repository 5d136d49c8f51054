"""Waits of tests for what threads and processes do."""

import time
from collections.abc import Callable


def until(there: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until something is there; a busy machine may take long, a good one does not."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, f"waited {seconds:.0f} s in vain"
        time.sleep(0.005)
