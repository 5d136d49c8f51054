"""The memory that a peer shares with its workers: x', and a window through which the rest is exchanged.

    x' (P,) float32 | coordinates (WINDOW,) int64 | values (WINDOW,) float32

A file without a name: it is gone when the last of them is, however that ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Literal, get_args

import torch

WINDOW = 1 << 22  # coordinates
PAGE = 1 << 12

# The methods of FsdpWorker that a peer calls over a pipe: a request is a name and the method's keywords
Request = Literal[
    "load",
    "restore",
    "zero",
    "attempt",
    "backward",
    "partly",
    "clip",
    "step",
    "use_global_model",
    "score",
    "use_local_model",
    "add",
    "distance",
    "states",
    "expect",
    "take",
    "read",
    "write",
    "noise_state",
    "bytes",
]
REQUESTS = frozenset(get_args(Request))


class SharedMemory:
    """One process's view of it.

    Args:
        file: its descriptor, of `anonymous_file`.
        parameters: P; the file grows to what that takes.
    """

    def __init__(self, file: int, parameters: int) -> None:
        ends = [0]
        for size in (4 * parameters, 8 * WINDOW, 4 * WINDOW):
            ends.append(ends[-1] + size + -size % PAGE)
        if os.fstat(file).st_size < ends[-1]:
            os.ftruncate(file, ends[-1])
        memory = mmap.mmap(file, ends[-1])
        self.global_model = torch.frombuffer(memory, dtype=torch.float32, count=parameters)  # x'   (P,)
        self.where = torch.frombuffer(memory, dtype=torch.int64, count=WINDOW, offset=ends[1])
        self.values = torch.frombuffer(memory, dtype=torch.float32, count=WINDOW, offset=ends[2])


def anonymous_file() -> int:
    """Create an empty file in memory, or where the system cannot, on the disk; return its descriptor."""
    if hasattr(os, "memfd_create"):  # not in /dev/shm, which containers make small
        return os.memfd_create("cocktail")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def windows(start: int, stop: int, size: int = WINDOW) -> Iterator[tuple[int, int]]:
    """Divide start .. stop - 1 into windows of `size`."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)
