"""Launch a kernel on the device of its tensors, and bring it what the host has, which nobody waits for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from compress.backends.dispatch import brought


def launch(kernel: Any, blocks: int, first: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch `blocks` programs of a kernel whose first argument is a tensor, where that tensor is.

    Triton itself launches on the calling thread's current device, and each thread has one of its own.
    """
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[(blocks,)](first, *arguments, **options)


def array_brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Bring an array to a device, through pinned memory, so that its stream is not waited for."""
    return brought(
        torch.from_numpy(array.copy() if device.type == "cpu" or not array.flags.writeable else array), device
    )
