"""Own loops in processes of their own: signals, and kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from own_host import Hosted, conv_net, hosted

from transport.ledger import Ledger

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@contextmanager
def program(run: Hosted, name: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.extensions.own_loop.conv_peer", str(run.url), name, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline() == "step\n"


@pytest.mark.usefixtures("fast_starts")
def test_kill_9_costs_a_loop_its_last_step_and_sigterm_nothing(tmp_path: Path) -> None:
    """One of three is killed: its samples are leased to the others. One gets SIGTERM: it hands over, its
    block ends, and its program goes on. The last ends with the run, of which each sample is counted once."""
    training = {"max_steps": 60, "global_batch_size": 24}
    with hosted(tmp_path, conv_net(), {"min_peers": 1, "first_peers": 3}, training=training) as run:
        with program(run, "ann") as ann, program(run, "bob", "0.02") as bob, program(run, "cat") as cat:
            steps(bob, 3)
            bob.kill()
            steps(cat, 3)
            cat.send_signal(signal.SIGTERM)
            assert cat.stdout is not None
            assert cat.stdout.read().splitlines()[-1] == "ended: left (SIGTERM)"
            assert cat.wait(120) == 0
            run.wait(120)
            assert ann.stdout is not None
            assert ann.stdout.read().splitlines()[-1] == "ended: all steps are done"
            assert ann.wait(120) == 0

        assert run.left("bob")
    with Ledger(tmp_path / "ledger", write=False) as ledger:
        ledger.verify(complete=True)
