"""A process notices what keeps it from running: these are real processes, stopped and crowded out."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from cocktail_cli.extensions.diagnosis import machine_load
from cocktail_cli.extensions.diagnosis.machine_load import (
    STOOD_S,
    Counters,
    GpuLoad,
    LoadMeter,
    counters,
    load_between,
)

PROGRAM = """
import sys
from cocktail_cli.extensions.diagnosis.machine_load import LoadMeter
meter = LoadMeter()
print("there", flush=True)
sys.stdin.readline()
print(meter.since().stopped / 1000, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no signal stops a process here")
def test_a_process_that_was_stopped_knows_for_how_long() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        since = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(STOOD_S + 1.6)  # of which a busy machine takes some for its own
        stood = time.monotonic() - since
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        said = float(process.stdout.readline() or 0)

    assert STOOD_S <= said <= stood + 1.0


def test_counters_only_grow_and_the_clock_agrees_with_itself() -> None:
    first, then = counters(), counters()

    assert then.memory >= first.memory
    assert then.segments >= first.segments
    assert abs(then.ahead - first.ahead) < 0.5


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
MACHINE, GROUP = 30.0, 2.5  # seconds of pressure


@LINUX
@pytest.mark.parametrize(
    ("groups", "mounts", "seconds"),
    [
        ("0::/user/peer", "21 1 0:20 / {0} rw,nosuid shared:4 - cgroup2 cgroup2 rw", GROUP),
        (
            "4:memory:/user\n0::/user/peer",
            "21 1 0:20 / {0}/memory rw - cgroup cgroup rw,memory\n22 1 0:21 / {0} rw - cgroup2 cgroup2 rw",
            GROUP,
        ),
        ("0::/user/peer", "21 1 0:20 /user {0}/user rw - cgroup2 cgroup2 rw", GROUP),
        ("0::/user/peer", "21 1 0:20 /other {0} rw - cgroup2 cgroup2 rw", MACHINE),
        ("0::/user/peer", "21 1 0:20 / {0}/hidden rw - cgroup2 cgroup2 rw", MACHINE),
        ("4:memory:/user/peer", "21 1 0:20 / {0} rw - cgroup cgroup rw,memory", MACHINE),
    ],
    ids=["version 2", "both versions", "a part of it", "another part", "hidden by a mount", "version 1"],
)
def test_pressure_is_that_of_the_own_group_wherever_it_is_mounted_and_else_of_the_machine(
    tmp_path: Path, groups: str, mounts: str, seconds: float
) -> None:
    for folder, total in (("process", 0), ("machine", MACHINE), ("cgroup/user/peer", GROUP)):
        (tmp_path / folder).mkdir(parents=True)
        line = "{} avg10=0.00 avg60=0.00 avg300=0.00 total={:.0f}\n"
        text = line.format("some", 1e6 * total) + line.format("full", 0)
        (tmp_path / folder / ("memory" if folder == "machine" else "memory.pressure")).write_text(text)
    (tmp_path / "process/cgroup").write_text(groups + "\n")
    (tmp_path / "process/mountinfo").write_text(mounts.format(tmp_path / "cgroup") + "\n")

    assert machine_load.stalled("memory", tmp_path / "process", tmp_path / "machine") == seconds


def test_a_machine_without_memory_slows_only_the_processes_that_read_their_pages_again() -> None:
    before, now = Counters(memory=1.0, faults=140), Counters(memory=3.5, faults=171, stopped=2.0)

    hit = load_between(before, now)
    spared = load_between(replace(before, faults=now.faults), now)

    assert (hit.memory, hit.faults, hit.stopped) == (2500, 31, 0), "memory is why it did not run"
    assert (spared.memory, spared.faults, spared.stopped) == (0, 0, 2000)


def test_gpu_readings_are_summed_over_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.diagnosis.machine_load.TICK_S", 0.01)
    monkeypatch.setattr("cocktail_cli.extensions.diagnosis.machine_load.GPU_S", 0.02)
    read = []

    def reading() -> GpuLoad:
        read.append(time.monotonic())
        return GpuLoad(0.5, True)

    with closing(LoadMeter(reading)) as meter:
        until(lambda: len(read) >= 4)
        load = meter.since()

    assert load.throttled > 0
    assert load.gpu_wait == pytest.approx(load.throttled / 2, abs=1)
