"""Choose who runs the loops over elements: Triton for CUDA tensors, numba for long host vectors, else NumPy.

Difference, selection, quantization and the way back run on a GPU. The entropy coder stays on the host, as
bytes must leave the GPU anyway, and so do the levels of 4 bits, whose fit is two thousand launches. Triton is
imported with the first CUDA tensor, and tried: it needs a C compiler and Python's headers
where it runs, and a GPU that it knows. Where it cannot launch a kernel (or is not there: Windows, macOS) the
host does the work. Set TRITON_INTERPRET=1 to run the kernels on the CPU, as the tests do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch

WORTH = 1 << 20  # elements: shorter vectors are done before numba is imported and has compiled


def usable(device: torch.device) -> bool:
    """Tell whether the Triton kernels can run on this device."""
    return device.type == "cuda" and kernels_missing(device) is None


def kernels_missing(device: torch.device) -> str | None:
    """Return why Triton cannot launch a kernel on a CUDA device, or None where it can. Each device is tried
    once, at the cost of a compilation where Triton's cache is empty."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _tried(index)


@cache
def _tried(index: int) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    device = torch.device("cuda", index)
    try:
        from compress import triton_kernels

        x, at = torch.zeros(2, device=device), torch.ones(1, dtype=torch.int64, device=device)
        triton_kernels.add(x, at, torch.ones(1, device=device), 1)
        return None if x.tolist() == [0.0, 1.0] else "a kernel of Triton gave a wrong result"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no compiler, no headers, no driver, an old GPU: each has errors of its own
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def in_threads(work: Callable[[int], object], starts: Sequence[int]) -> None:
    """Call `work` with each of these, by as many threads as torch has. It writes where no other call does,
    and leaves the interpreter's lock."""
    threads = min(torch.get_num_threads(), len(starts))
    if threads < 2:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(work, starts), maxlen=0)  # raises what a call has raised


def compiled(size: int) -> ModuleType | None:
    """Return the numba loops for a host vector of so many elements; None: NumPy does the work."""
    return _compiled() if size >= WORTH else None


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    try:
        from compress import numba_loops
    except ImportError:  # no numba for this Python or platform: NumPy gives the same bytes, later
        return None
    return numba_loops
