"""malloc tuning for the hub process.

Each round allocates N packets in chunks and frees them at its close. By default glibc returns such memory to
the system, which maps and clears it again in the next round, page by page: a third of the time that a hub
spends beside ZeroMQ (recipes/LOG.md). So up to KEPT bytes of freed memory stay in the process.

What one crowd of peers has needed goes back nevertheless: every TRIM_S seconds all free pages do, which costs
the next round a few milliseconds of page faults.

That concerns the first heap. Each thread would have further heaps of 64 MB, returned to the system whenever
empty: a sixth of the time for decoding packets. So all threads share the first heap.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
KEPT = 256 << 20  # bytes, at the end of a heap
TRIM_S = 30.0
LARGEST = 32 << 20  # bytes of an allocation that a heap serves; glibc's maximum


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. Returns False where the C library is not glibc."""
    if sys.platform != "linux":
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError):  # musl has none, and no thresholds
        return False
    options = (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT), (M_ARENA_MAX, 1)
    applied = [mallopt(*option) for option in options]
    threading.Thread(target=_return_pages, args=(trim,), name="cocktail-malloc", daemon=True).start()
    return all(applied)


def _return_pages(trim: Callable[[int], int]) -> None:
    while True:
        time.sleep(TRIM_S)
        trim(0)
