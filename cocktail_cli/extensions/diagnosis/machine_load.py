"""Load of this machine beside the training: waits for cores, memory and disk, heat, sleep, the clock.

What the system does not tell is 0. Linux tells all of it; other systems the clock, and what a thread of this
process notices when it wakes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from .bodies import Spent

TICK_S = 0.25  # of the thread that notices when this process does not run
STOOD_S = 1.0  # a tick that comes so late may mean that it did not
BUSY = 0.1  # share of that time which a process that runs uses of a core
GPU_S = 2.0  # seconds between two readings of the GPUs


@dataclass(frozen=True)
class GpuLoad:
    """One reading of the GPUs that train here."""

    others: float | None = None  # share of the busiest GPU's time that other programs take; None: not known
    throttled: bool = False  # one of them is slowed down for its heat or power


@dataclass(frozen=True)
class Counters:
    """Sums since some start."""

    waits: dict[int, float] = field(default_factory=dict)  # thread -> seconds ready to run
    memory: float = 0.0
    io: float = 0.0
    hot: float = 0.0  # of the processor
    slept: float = 0.0
    ahead: float = 0.0  # of the wall clock over the time since boot
    segments: float = 0.0
    resent: float = 0.0
    faults: int = 0
    # noticed by a meter
    stopped: float = 0.0  # this process did not run
    gpu_wait: float = 0.0
    gpu_hot: float = 0.0


def load_between(before: Counters, now: Counters) -> Spent:
    """Return the load between two readings."""

    def took(name: str) -> float:
        return max(0.0, float(getattr(now, name) - getattr(before, name)))

    waits = [seconds - before.waits.get(thread, 0.0) for thread, seconds in now.waits.items()]
    segments, faults = now.segments - before.segments, now.faults - before.faults
    # Without faults others stood still: a process that lacks memory loses pages and reads them again.
    memory = took("memory") if faults else 0.0
    return Spent(
        cpu_wait=millis(max(waits, default=0.0)),
        gpu_wait=millis(took("gpu_wait")),
        memory=millis(memory),
        io=millis(took("io")),
        throttled=millis(max(took("gpu_hot"), took("hot"))),
        stopped=millis(took("stopped") - memory),
        slept=millis(took("slept")),
        clock=round(1000 * (now.ahead - before.ahead)),
        resent=min(1000, round(1000 * took("resent") / segments)) if segments > 0 else 0,
        faults=faults,
    )


def millis(seconds: float) -> int:
    return max(0, round(1000 * seconds))


class LoadMeter:
    """Measures this process and machine, in a thread, until `close`.

    Args:
        read_gpus: reads the GPUs that train here; None: there are none that can be asked.
    """

    def __init__(self, read_gpus: Callable[[], GpuLoad] | None = None) -> None:
        self._read_gpus = read_gpus
        self._lock, self._over = threading.Lock(), threading.Event()
        self._stopped = self._gpu_wait = self._gpu_hot = 0.0  # noticed by the thread
        self._before = counters()
        self._looked, self._used, self._asked = time.monotonic(), time.process_time(), 0.0
        # Threads that look here -> seconds they had no core. One that waits for a core right now does not
        # count that yet; the one that looks does not wait.
        self._waited: dict[int, float] = {}
        threading.Thread(target=self._watch, name="load", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def since(self) -> Spent:
        """Return the load since the last call, and begin anew."""
        self._notice()
        before, now = self._before, counters()
        self._before = replace(now, stopped=self._stopped, gpu_wait=self._gpu_wait, gpu_hot=self._gpu_hot)
        return load_between(before, self._before)

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            self._notice()

    def _notice(self) -> None:
        """Notice that nobody has looked for long though this process had no work; read the GPUs."""
        with self._lock:
            now, used = time.monotonic(), time.process_time()
            late = now - self._looked - TICK_S
            looked = {*self._waited, threading.get_native_id()}
            waited = {thread: core_wait(thread) for thread in looked}
            # less the time in which one of them could have run
            idle = late - max(new - self._waited.get(thread, new) for thread, new in waited.items())
            if idle >= STOOD_S and used - self._used < BUSY * late:
                self._stopped += idle
            self._looked, self._used = now, used
            self._waited = {thread: new for thread, new in waited.items() if new}  # 0: it has ended
            if self._read_gpus is not None and now - self._asked >= GPU_S:
                reading, passed, self._asked = self._read_gpus(), min(now - self._asked, 2 * GPU_S), now
                self._gpu_wait += passed * (reading.others or 0.0)
                self._gpu_hot += passed * reading.throttled


if sys.platform == "linux":
    import resource

    def counters() -> Counters:
        """Read what this system tells."""
        running, since_boot = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        segments, resent = tcp_segments()
        return Counters(
            waits=core_waits(),
            memory=stalled("memory"),
            io=stalled("io"),
            hot=processor_slowed(),
            slept=since_boot - running,
            ahead=time.time() - since_boot,
            segments=segments,
            resent=resent,
            faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )

    def core_waits() -> dict[int, float]:
        """Return by thread the seconds it was ready to run and had no core (schedstat)."""
        with suppress(OSError):
            return {thread: core_wait(thread) for thread in map(int, os.listdir("/proc/self/task"))}
        return {}

    def core_wait(thread: int) -> float:
        """Return the seconds for which a thread was ready to run and had no core; 0: it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def stalled(
        what: str, process: Path = Path("/proc/self"), machine: Path = Path("/proc/pressure")
    ) -> float:
        """Return the seconds in which some task stood still for a resource (pressure stall information).

        Of this process's control group, where it can be read, else of the machine.
        """
        with suppress(OSError, ValueError, IndexError):
            groups = control_groups((process / "cgroup").read_text(), (process / "mountinfo").read_text())
            files = [*(group / f"{what}.pressure" for group in groups), machine / what]
            text = next(path for path in files if path.is_file()).read_text()
            return int(text.split("total=")[1].split()[0]) / 1e6
        return 0.0

    def control_groups(groups: str, mounts: str) -> list[Path]:
        """Find the folders where the files of a process's control group (version 2) may be.

        Beside groups of version 1 the hierarchy is mounted in a folder of its own, mostly
        /sys/fs/cgroup/unified. A mount may have a part of the hierarchy as its root.

        Args:
            groups: text of /proc/PID/cgroup.
            mounts: text of /proc/PID/mountinfo.
        """
        found = []
        for group in (PurePosixPath(line[3:]) for line in groups.splitlines() if line.startswith("0::")):
            for place, _, kind in (mount.partition(" - ") for mount in mounts.splitlines()):
                root, folder = place.split()[3:5]
                if kind.startswith("cgroup2 ") and group.is_relative_to(root):
                    found.append(Path(folder, group.relative_to(root)))
        return found

    def processor_slowed() -> float:
        """Return the seconds for which the hottest core was slowed down (Intel's counters)."""
        cores = Path("/sys/devices/system/cpu")
        with suppress(OSError, ValueError):
            found = cores.glob("cpu[0-9]*/thermal_throttle/core_throttle_total_time_ms")
            return max((int(core.read_text()) for core in found), default=0) / 1000
        return 0.0

    def tcp_segments() -> tuple[float, float]:
        """Return the TCP segments that this machine has sent, and those of them sent again."""
        with suppress(OSError, ValueError, KeyError):
            lines = Path("/proc/net/snmp").read_text().splitlines()
            names, values = (line.split() for line in lines if line.startswith("Tcp:"))
            told = dict(zip(names[1:], values[1:], strict=True))
            return float(told["OutSegs"]), float(told["RetransSegs"])
        return 0.0, 0.0

else:

    def counters() -> Counters:
        """Read what every system tells: how far the wall clock is ahead."""
        return Counters(ahead=time.time() - time.monotonic())

    def core_wait(thread: int) -> float:
        """Return 0: this system does not tell."""
        return 0.0
