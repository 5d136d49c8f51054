"""A process notices what keeps it from running: these are real processes, stopped and crowded out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest

from cocktail_cli.measures import GpuReading, LoadMeter
from cocktail_cli.measures.machine_load import STOOD_S, counters

PROGRAM = """
import sys
from cocktail_cli.measures import LoadMeter
meter = LoadMeter()
meter.start()
print("there", flush=True)
sys.stdin.readline()
print(meter.since().stopped, flush=True)
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


def test_gpu_readings_are_summed_over_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocktail_cli.measures.machine_load.TICK_S", 0.01)
    monkeypatch.setattr("cocktail_cli.measures.machine_load.GPU_S", 0.02)
    read = []

    def reading() -> GpuReading:
        read.append(time.monotonic())
        return GpuReading(80, 0.5, True)

    with closing(LoadMeter(reading)) as meter:
        meter.start()
        deadline = time.monotonic() + 10
        while len(read) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        load = meter.since()

    assert load.throttled > 0
    assert load.gpu_wait == pytest.approx(load.throttled / 2)
