"""Copies between the host and a device that nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import torch

K = TypeVar("K")


def brought(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor of the host to a device. A GPU gets it through pinned memory, and nobody waits for it:
    give it windows, since pinned memory is taken in powers of two."""
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    try:
        x = x.pin_memory()
    except RuntimeError:  # the system lets no more be pinned: it is waited for
        return x.to(device)
    return x.to(device, non_blocking=True)


def staging(size: int, device: torch.device) -> torch.Tensor:
    """Allocate (size,) float32 on the host for what is to be brought to a device: pinned, if it may be."""
    try:
        return torch.empty(size, pin_memory=device.type == "cuda")
    except RuntimeError:
        return torch.empty(size)


def array_brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Bring an array like `brought`."""
    own = array.copy() if device.type == "cpu" or not array.flags.writeable else array
    return brought(torch.from_numpy(own), device)


def read_back(*parts: torch.Tensor) -> list[np.ndarray]:
    """Read the bytes of vectors on one device, (b,) uint8 each: a GPU is waited for once."""
    raw = [part.view(torch.uint8) for part in parts]
    if not parts[0].is_cuda:
        return [part.numpy() for part in raw]
    ends = np.cumsum([len(part) for part in raw])
    return np.split(torch.cat(raw).cpu().numpy(), ends[:-1])


def read_each(wanted: Mapping[K, Sequence[torch.Tensor]]) -> dict[K, list[np.ndarray]]:
    """Read the vectors of several readers like `read_back`, those of each device together."""
    found: dict[K, list[np.ndarray]] = {}
    for device in {parts[0].device for parts in wanted.values()}:
        here = {reader: parts for reader, parts in wanted.items() if parts[0].device == device}
        read = iter(read_back(*chain.from_iterable(here.values())))
        found |= {reader: [*islice(read, len(parts))] for reader, parts in here.items()}
    return found


class Arriving:
    """A number, () int64, that leaves its device while the host goes on."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._copied = number, None
        if number.is_cuda:
            self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(number.device))

    def value(self) -> int:
        """Return the number: this waits for its copy, and for nothing that was queued behind it."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)
