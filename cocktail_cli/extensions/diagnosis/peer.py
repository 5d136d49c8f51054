"""A peer's part of the diagnosis: it measures how it spends its time, for its next Report.

    next_round   waits | fetch of the lease, compute | exchange: report, upload, waits, commit | fetch of the
    aggregate | optimizer and join | next_round

With a staleness the exchange runs beside the compute. Idle is the time after both the compute and the upload
until the commit, and the wait for the next round. Seconds are those of the monotonic clock.

A cycle goes from one report to the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import msgpack, structs

from cocktail_cli.assembly import PeerExtension
from cocktail_cli.machine import NvidiaGpus, nvidia_gpus

from .bodies import NAME, Spent
from .machine_load import GpuLoad, LoadMeter, millis

if TYPE_CHECKING:
    from recipes.training import Delivery
    from transport.protocol import messages

# NVML's reasons for lower clocks: SW thermal, HW slowdown, HW thermal, HW power brake. Its power cap is not
# one of them: a GPU under full load is at it as a rule.
HOT = 0x20 | 0x08 | 0x40 | 0x80


@dataclass
class Marks:
    """Times of one round; 0: not yet, or not in this round."""

    asked: float = 0.0  # for the round
    taken: float = 0.0
    leased: float = 0.0  # the lease is here
    lease_s: float = 0.0
    reported: float = 0.0
    uploaded: float = 0.0
    committed: float = 0.0
    received: float = 0.0  # an aggregate is here
    download_s: float = 0.0
    disk_s: float = 0.0


class TimeKeeper(PeerExtension):
    """Times a peer's rounds, and the load of its machine.

    Args:
        staleness: of the run. At 0 the compute comes before the exchange of its round.
    """

    name = NAME

    def __init__(self, staleness: int, devices: Sequence[str]) -> None:
        self.staleness, self.devices = staleness, list(devices)
        self.meter: LoadMeter | None = None  # measures the machine, once training begins
        self._lock = threading.Lock()
        self._before, self._now, self._committed = Marks(), Marks(), 0.0

    @contextmanager
    def beside(self, processes: set[int]) -> Iterator[None]:
        gpus = nvidia_gpus(self.devices, lambda why: None) if self.devices != ["cpu"] else None
        with closing(LoadMeter(None if gpus is None else partial(load_of, gpus, processes))) as meter:
            self.meter = meter
            yield

    def took_round(self, round: messages.Round, asked: float, now: float) -> None:
        with self._lock:
            self._before, self._now = self._now, Marks(asked=asked, taken=now)

    def fetched(self, kind: str, started: float, now: float) -> None:
        with self._lock:
            if kind == "lease":
                self._now.leased, self._now.lease_s = now, now - started
            elif kind == "packet":
                self._now.received, self._now.download_s = now, self._now.download_s + now - started

    def report(self, delivery: Delivery, now: float) -> bytes:
        """Return what was spent since the last report."""
        with self._lock:
            before, new = self._before, self._now
            new.reported = now
        load = self.meter.since() if self.meter is not None else Spent()
        computed = (before if self.staleness else new).leased + delivery.compute_s
        began_to_encode = new.taken if self.staleness else max(new.taken, computed)
        busy_until = max(before.uploaded, computed if self.staleness else 0.0)
        idle = max(0.0, before.committed - max(busy_until, before.reported)) if before.committed else 0.0
        ready = max(before.received, computed if self.staleness else 0.0)
        spent = structs.replace(
            load,
            cycle=millis(now - before.reported) if before.reported else 0,
            idle=millis(idle + new.taken - new.asked),
            lease=millis((before if self.staleness else new).lease_s),
            encode=millis(now - began_to_encode),
            download=millis(before.download_s),
            apply=millis(new.asked - ready) if before.received else 0,
            disk=millis(before.disk_s),
            upload=millis(before.uploaded - before.reported) if before.uploaded else 0,
        )
        return msgpack.encode(spent)

    def exchanged(self, uploaded: float, now: float) -> None:
        with self._lock:
            self._now.uploaded, self._now.committed, self._committed = uploaded, now, now

    def committed(self, message: messages.Committed) -> None:
        """Count as time for the disk what extensions before this one have taken."""
        with self._lock:
            self._now.disk_s += time.monotonic() - self._committed


def load_of(gpus: NvidiaGpus, ours: set[int]) -> GpuLoad:
    """Read the load of the GPUs that train here. `ours`: process ids of this peer."""
    slowed = gpus.of_each(gpus.nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return GpuLoad(gpus.read(ours).others, any((why or 0) & HOT for why in slowed))
