"""A peer's part of the diagnosis: it measures how it spends its time, for its next Report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cocktail_cli.assembly import PeerExtension
from cocktail_cli.measures import NvidiaGpus, nvidia_gpus

from .machine_load import GpuLoad, LoadMeter
from .round_timer import RoundTimer
from .spent import NAME

if TYPE_CHECKING:
    from recipes.training import Delivery
    from transport.protocol import messages

# NVML's reasons for lower clocks: SW thermal, HW slowdown, HW thermal, HW power brake. Its power cap is not
# one of them: a GPU under full load is at it as a rule.
HOT = 0x20 | 0x08 | 0x40 | 0x80


class TimeKeeper(PeerExtension):
    """Times a peer's rounds, and the load of its machine."""

    name = NAME

    def __init__(self, staleness: int, devices: Sequence[str]) -> None:
        self.timer, self.devices = RoundTimer(staleness), list(devices)
        self._committed_at = 0.0

    @contextmanager
    def beside(self, processes: set[int]) -> Iterator[None]:
        gpus = nvidia_gpus(self.devices, lambda why: None) if self.devices != ["cpu"] else None
        with closing(LoadMeter(None if gpus is None else partial(load_of, gpus, processes))) as meter:
            self.timer.meter = meter
            meter.start()
            yield

    def took_round(self, round: messages.Round, asked: float, now: float) -> None:
        self.timer.took_round(asked, now)

    def fetched(self, kind: str, started: float, now: float) -> None:
        if kind == "lease":
            self.timer.fetched_lease(started, now)
        elif kind == "packet":
            self.timer.fetched_aggregate(started, now)

    def report(self, delivery: Delivery, now: float) -> bytes:
        return msgspec.msgpack.encode(self.timer.report(delivery.compute_s, now))

    def exchanged(self, uploaded: float, now: float) -> None:
        self._committed_at = now
        self.timer.committed(uploaded, now)

    def committed(self, message: messages.Committed) -> None:
        """Count as time for the disk what extensions before this one have taken."""
        self.timer.stored(time.monotonic() - self._committed_at)


def load_of(gpus: NvidiaGpus, ours: set[int]) -> GpuLoad:
    """Read the load of the GPUs that train here. `ours`: process ids of this peer."""
    slowed = gpus.of_each(gpus.nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return GpuLoad(gpus.read(ours).others, any((why or 0) & HOT for why in slowed))
