"""The phases of a peer's round, from what its link sees of it: no call into the training.

    next_round   waits | fetch of the lease, compute | exchange: report, upload, waits, commit | fetch of the
    aggregate | optimizer and join | next_round

With a staleness the exchange runs beside the compute. Idle is the time after both the compute and the upload
until the commit, and the wait for the next round. Seconds are those of the monotonic clock.

A cycle goes from one report to the next.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from .machine_load import LoadMeter, MachineLoad
from .spent import Spent


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


class RoundTimer:
    """Times the rounds of one peer. Its methods may be called from several threads.

    Args:
        staleness: of the run. At 0 the compute comes before the exchange of its round.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.meter: LoadMeter | None = None  # measures the machine, once training begins
        self._lock = threading.Lock()
        self._before, self._now = Marks(), Marks()

    def took_round(self, asked: float, now: float) -> None:
        """Note a new round, asked for at `asked`."""
        with self._lock:
            self._before, self._now = self._now, Marks(asked=asked, taken=now)

    def fetched_lease(self, started: float, now: float) -> None:
        with self._lock:
            self._now.leased, self._now.lease_s = now, now - started

    def fetched_aggregate(self, started: float, now: float) -> None:
        with self._lock:
            self._now.received, self._now.download_s = now, self._now.download_s + now - started

    def committed(self, uploaded: float, now: float) -> None:
        """Note a commit; its update was up at `uploaded`."""
        with self._lock:
            self._now.uploaded, self._now.committed = uploaded, now

    def stored(self, seconds: float) -> None:
        """Note time for the disk."""
        with self._lock:
            self._now.disk_s += seconds

    def report(self, compute_s: float, now: float) -> Spent:
        """Return what was spent since the last report. `compute_s`: of the newest step."""
        with self._lock:
            before, new = self._before, self._now
            new.reported = now
        load = millis_of(self.meter.since()) if self.meter is not None else {}
        computed = (before if self.staleness else new).leased + compute_s
        began_to_encode = new.taken if self.staleness else max(new.taken, computed)
        busy_until = max(before.uploaded, computed if self.staleness else 0.0)
        idle = max(0.0, before.committed - max(busy_until, before.reported)) if before.committed else 0.0
        ready = max(before.received, computed if self.staleness else 0.0)
        return Spent(
            cycle=millis(now - before.reported) if before.reported else 0,
            idle=millis(idle + new.taken - new.asked),
            lease=millis((before if self.staleness else new).lease_s),
            encode=millis(now - began_to_encode),
            download=millis(before.download_s),
            apply=millis(new.asked - ready) if before.received else 0,
            disk=millis(before.disk_s),
            upload=millis(before.uploaded - before.reported) if before.uploaded else 0,
            **load,
        )


def millis_of(load: MachineLoad) -> dict[str, int]:
    """Convert a load to fields of `Spent`, counts as they are; a clock may have been set back."""
    return {
        name: value if isinstance(value, int) else round(1000 * value) for name, value in asdict(load).items()
    }


def millis(seconds: float) -> int:
    return max(0, round(1000 * seconds))
