"""Triton kernels for CUDA: the same packets from tensors that are on a GPU, decoded there to the same bits.

Only what touches every element runs here: difference, selection, quantization, and the way back. Fitting
the levels (a few thousand bins) and the entropy coder (bytes that must leave the GPU anyway) stay on the
host. Triton is imported when the first tensor on a GPU is met; without it (Windows, macOS) the host does
the work. Set TRITON_INTERPRET=1 to run the kernels on the CPU, as the tests do.

The host has compiled loops too, `compress/compiled.py`; who uses which is decided here.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch

WORTH = 1 << 20  # elements: shorter vectors are done before numba is imported and has compiled


def usable(x: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor without being asked to."""
    return x.is_cuda and find_spec("triton") is not None


def compiled(size: int) -> ModuleType | None:
    """`compress.compiled` for a vector of so many elements on the host; None: NumPy does the work."""
    return _compiled() if size >= WORTH else None


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    try:
        from . import numba_loops
    except ImportError:  # no numba for this Python or platform: NumPy gives the same bytes, later
        return None
    return numba_loops
