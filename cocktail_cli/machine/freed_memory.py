"""Memory that this process has freed, given back to the system.

glibc gives each thread a heap, and returns of it only what lies above the last block in use. A session of a
peer has threads of its own, so each left megabytes in heaps that no later session used (recipes/LOG.md).
"""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> bool:
    """Return to the system the free pages of all heaps. False where the C library is not glibc."""
    if sys.platform != "linux":
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # musl has none
        return False
    trim(0)
    return True
