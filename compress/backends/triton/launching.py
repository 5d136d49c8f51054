"""Launch a kernel on the device of its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


def launch(kernel: Any, blocks: int, first: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch `blocks` programs of a kernel whose first argument is a tensor, where that tensor is.

    Triton itself launches on the calling thread's current device, and each thread has one of its own.
    """
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[(blocks,)](first, *arguments, **options)
