"""What glibc's allocator is told where a process runs a hub.

A round brings N packets, in chunks, and all of it is freed at its close. As it stands glibc gives such memory
back to the system, which maps and clears it anew in the next round, a page at a time: a third of what a hub
spends beside ZeroMQ (recipes/LOG.md). So what was freed is kept, up to KEPT, for the next round.

That holds for the first heap. Each thread would have others of its own, of 64 MB, which go back to the system
whenever one is empty: a sixth of what opening packets takes. So all threads share the first.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
KEPT = 256 << 20  # bytes, at the end of a heap
LARGEST = 32 << 20  # bytes that come from a heap, not from the system; glibc takes no more


def keep_freed_memory() -> bool:
    """For the whole process, so it is for whoever starts one to call. False: its C library is not glibc."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl has none, and no thresholds
        return False
    asked = (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT), (M_ARENA_MAX, 1)
    told = [mallopt(*one) for one in asked]
    return all(told)
