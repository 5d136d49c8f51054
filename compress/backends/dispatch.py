"""Choose who runs the loops over elements: Triton for CUDA tensors, numba for long host vectors, else NumPy.

Only what touches every element runs on a GPU: difference, selection, quantization, and the way back. Fitting
the levels (a few thousand bins) and the entropy coder (bytes that must leave the GPU anyway) stay on the
host. Triton is imported with the first CUDA tensor; without it (Windows, macOS) the host does the work. Set
TRITON_INTERPRET=1 to run the kernels on the CPU, as the tests do.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch

WORTH = 1 << 20  # elements: shorter vectors are done before numba is imported and has compiled


def usable(x: torch.Tensor) -> bool:
    """Tell whether the Triton kernels can take this tensor."""
    return x.is_cuda and find_spec("triton") is not None


def compiled(size: int) -> ModuleType | None:
    """Return the numba loops for a host vector of so many elements; None: NumPy does the work."""
    return _compiled() if size >= WORTH else None


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    try:
        from . import numba_loops
    except ImportError:  # no numba for this Python or platform: NumPy gives the same bytes, later
        return None
    return numba_loops
