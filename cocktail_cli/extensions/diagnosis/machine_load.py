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
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

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
class MachineLoad:
    """Seconds within a period, but for `resent` and `faults`."""

    cpu_wait: float = 0.0  # the busiest thread of this process was ready to run, and other work had the cores
    gpu_wait: float = 0.0  # other programs used the GPU
    memory: float = 0.0  # some task stood still for lack of memory, and this process had page faults
    io: float = 0.0  # some task stood still for the disk
    throttled: float = 0.0  # GPU or processor were slowed down
    stopped: float = 0.0  # this process did not run, and not for lack of memory
    slept: float = 0.0  # the machine was suspended
    clock: float = 0.0  # the wall clock was set, forward if positive
    resent: float = 0.0  # share of this machine's TCP segments that were sent again
    faults: int = 0  # major page faults of this process: pages that had to be read from disk


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


def load_between(before: Counters, now: Counters, noticed: MachineLoad) -> MachineLoad:
    """Return the load between two readings; `noticed`: what no counter tells of it."""
    waits = [seconds - before.waits.get(thread, 0.0) for thread, seconds in now.waits.items()]
    segments, faults = now.segments - before.segments, now.faults - before.faults
    # Without faults others stood still: a process that lacks memory loses pages and reads them again.
    memory = max(0.0, now.memory - before.memory) if faults else 0.0
    return MachineLoad(
        cpu_wait=max(waits, default=0.0),
        gpu_wait=noticed.gpu_wait,
        memory=memory,
        io=max(0.0, now.io - before.io),
        throttled=max(noticed.throttled, now.hot - before.hot),
        stopped=max(0.0, noticed.stopped - memory),
        slept=max(0.0, now.slept - before.slept),
        clock=now.ahead - before.ahead,
        resent=min(1.0, (now.resent - before.resent) / segments) if segments > 0 else 0.0,
        faults=faults,
    )


class LoadMeter:
    """Measures this process and machine, in a thread, from `start` to `close`.

    Args:
        read_gpus: reads the GPUs that train here; None: there are none that can be asked.
    """

    def __init__(self, read_gpus: Callable[[], GpuLoad] | None = None) -> None:
        self._read_gpus = read_gpus
        self._lock, self._over = threading.Lock(), threading.Event()
        self._noticed = MachineLoad()  # by the thread, since the last `since`
        self._before = counters()
        self._looked, self._used, self._asked = time.monotonic(), time.process_time(), 0.0
        # Threads that look here -> seconds they had no core. One that waits for a core right now does not
        # count that yet; the one that looks does not wait.
        self._waited: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def since(self) -> MachineLoad:
        """Return the load since the last call, and begin anew."""
        self._notice()
        now = counters()
        load = load_between(self._before, now, self._noticed)
        with self._lock:
            self._noticed, self._before = MachineLoad(), now
        return load

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            self._notice()

    def _notice(self) -> None:
        """Notice that nobody has looked for long though this process had no work; read the GPUs."""
        with self._lock:
            now, used, had = time.monotonic(), time.process_time(), self._noticed
            late = now - self._looked - TICK_S
            looked = {*self._waited, threading.get_native_id()}
            waited = {thread: core_wait(thread) for thread in looked}
            # less the time in which one of them could have run
            idle = late - max(new - self._waited.get(thread, new) for thread, new in waited.items())
            stopped = idle if idle >= STOOD_S and used - self._used < BUSY * late else 0.0
            self._looked, self._used = now, used
            self._waited = {thread: new for thread, new in waited.items() if new}  # 0: it has ended
            reading, passed = GpuLoad(), 0.0
            if self._read_gpus is not None and now - self._asked >= GPU_S:
                reading, passed, self._asked = self._read_gpus(), min(now - self._asked, 2 * GPU_S), now
            self._noticed = MachineLoad(
                stopped=had.stopped + stopped,
                gpu_wait=had.gpu_wait + passed * (reading.others or 0.0),
                throttled=had.throttled + passed * reading.throttled,
            )


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
        found = {}
        with suppress(OSError):
            for thread in map(int, os.listdir("/proc/self/task")):
                found[thread] = core_wait(thread)
        return found

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
        most = 0
        with suppress(OSError, ValueError):
            for core in Path("/sys/devices/system/cpu").glob(
                "cpu[0-9]*/thermal_throttle/core_throttle_total_time_ms"
            ):
                most = max(most, int(core.read_text()))
        return most / 1000

    def tcp_segments() -> tuple[float, float]:
        """Return the TCP segments that this machine has sent, and those of them sent again."""
        with suppress(OSError, ValueError, KeyError):
            names, values = (
                line.split()
                for line in Path("/proc/net/snmp").read_text().splitlines()
                if line.startswith("Tcp:")
            )
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
