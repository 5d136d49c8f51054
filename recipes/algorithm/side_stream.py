"""A CUDA stream for the exchange, beside that of the compute: neither waits behind what the other has queued.

The exchange of a round reads x_i as it was when the round began (`mark`), and what it has changed is seen by
the compute from the join on (`turn`). On other devices than CUDA work is done at once: nothing is ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of high priority on a device. What is made on it is used and freed on it; x_i and x' are both
    streams'."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Mark what the compute's stream was asked so far, in the thread of the compute."""
        if self.stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.stream.device))
        return event

    @contextmanager
    def behind(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Do work on this stream, behind a mark."""
        if self.stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(mark)
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Do work on this stream, behind what the compute's was asked before, which then waits for it."""
        try:
            with self.behind(self.mark()):
                yield
        finally:
            self.rejoin()

    def rejoin(self) -> None:
        """Let the compute's stream wait for this one."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
