"""Two machines are one peer: real processes of the command line, one of them killed with -9."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.swarms.commands import COCKTAIL
from scripts.swarms.processes import Process

pytestmark = pytest.mark.slow
STEPS = 16


class Machines:
    """Processes of the command line, each with a home of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.started = folder, stack, 0

    def start(self, home: str, *arguments: str) -> Process:
        self.started += 1
        logs = self.folder / f"{self.started}-{home}"
        process = Process([*COCKTAIL, *arguments, "--json"], logs=logs, COCKTAIL_HOME=str(self.folder / home))
        self.stack.callback(process.kill)
        return process


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_a_stage_killed_with_9_costs_a_session_and_no_sample(machines: Machines, tmp_path: Path) -> None:
    """The head joins the run anew once its stage is there again, at the x' that the ledger has. The run ends
    with every sample counted once, and its replay is what its peers had."""
    keys = [f"max_steps={STEPS}", "global_batch_size=8", "compression.shards_at_layers=true"]
    out = str(tmp_path / "out")
    host = machines.start("host", "launch", "smoke", "--peers", "0", "--port", "0", "-o", out, *keys)
    url = host.until("run_started")["url"]
    ring = f"127.0.0.1:{free_port()},-"
    head = machines.start("head", "join", url, "-y", "--name", "ann", "--device", "cpu", "--ring", ring)
    line = head.until("joined") and next(
        told["state"] for told in head.heard("progressed") if "cocktail stage" in told["state"]
    )
    stage = ["stage", line.rpartition(" ")[2], "--device", "cpu"]
    killed = machines.start("other", *stage)
    head.until("step", 3)
    killed.signal(signal.SIGKILL)
    stepped = len(head.heard("step"))
    machines.start("other", *stage)
    head.until("joined", 2)
    finished = host.until("run_finished", timeout=300.0)

    assert finished["steps"] == STEPS
    assert sum(step["loss"] is not None for step in head.heard("step")[stepped + 1 :]) > 3
    assert [left["reason"] for left in host.heard("peer_left")][:1] == ["left: joins anew"]
    verified = subprocess.run([*COCKTAIL, "verify", out], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"{8 * STEPS} samples" in verified.stdout
