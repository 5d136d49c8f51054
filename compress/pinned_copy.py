"""Copies from the host to a device that nobody waits for."""

from __future__ import annotations

import numpy as np
import torch


def brought(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor of the host to a device. A GPU gets it through pinned memory, and nobody waits for it:
    give it windows, since pinned memory is taken in powers of two."""
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def array_brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Bring an array like `brought`."""
    own = array.copy() if device.type == "cpu" or not array.flags.writeable else array
    return brought(torch.from_numpy(own), device)
