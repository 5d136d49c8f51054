"""Updates brought to a device window by window: no more than a window's temporaries are allocated there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compress import PackedUpdate, Update

AT_ONCE = 1 << 20  # values on a processor, whose caches hold some of it; some 60 bytes of temporaries each
ON_GPU = 1 << 22  # values there, where a window costs some fifty launches
LEAST = 1 << 10  # values of a window, where memory is short


def each_window(
    update: PackedUpdate | Update, device: torch.device, work: Callable[[Update], object]
) -> None:
    """Call `work` with every window of an update, on a device, in order.

    Where memory runs out, the same values are offered again in smaller windows: `work` is to change nothing
    before it has all its memory. So each value is worked in once.

    Raises:
        torch.OutOfMemoryError: even the smallest window does not fit.
    """
    start, size = 0, ON_GPU if device.type == "cuda" else AT_ONCE
    while start < update.count:
        stop = min(start + size, update.count)
        try:
            work(update.window(start, stop, device))
            start = stop
        except torch.OutOfMemoryError:
            if size <= LEAST:
                raise
            size //= 4
