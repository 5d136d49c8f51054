"""Triton kernels for CUDA: the same packets from tensors that are on a GPU, decoded there to the same bits.

Only what touches every element runs here: difference, selection, quantization, and the way back. Fitting
the levels (a few thousand bins) and the entropy coder (bytes that must leave the GPU anyway) stay on the
host. Triton is imported when the first tensor on a GPU is met; without it (Windows, macOS) the host does
the work. Set TRITON_INTERPRET=1 to run the kernels on the CPU, as the tests do.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def usable(x: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor without being asked to."""
    return x.is_cuda and find_spec("triton") is not None
