"""Several machines are one peer: real processes of the command line, one of them killed with -9."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from scripts.swarms.commands import COCKTAIL
from scripts.swarms.processes import Process
from scripts.swarms.tcp_link import free_port
from transport.relay import Relay

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


def launched(machines: Machines, steps: int, *more: str) -> tuple[Process, str, str]:
    """Launch a run that only machines elsewhere train; returns the host, the run URL and the run's folder."""
    keys = [f"max_steps={steps}", "global_batch_size=8", "compression.shards_at_layers=true"]
    out = str(machines.folder / "out")
    host = machines.start("host", "launch", "smoke", "--peers", "0", "--port", "0", "-o", out, *more, *keys)
    return host, host.until("run_started")["url"], out


def replayed(out: str) -> str:
    """Replay a run; returns what was found."""
    verified = subprocess.run([*COCKTAIL, "verify", out], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    return verified.stdout


def test_two_machines_of_one_person_are_a_peer(machines: Machines) -> None:
    """The head prints a ring URL, by which `cocktail stage` is the other machine."""
    host, url, _ = launched(machines, 3)
    ring = f"127.0.0.1:{free_port()},-"
    head = machines.start("head", "join", url, "-y", "--name", "ann", "--device", "cpu", "--ring", ring)
    line = head.until("joined") and next(
        told["state"] for told in head.heard("progressed") if "cocktail stage" in told["state"]
    )
    machines.start("other", "stage", line.rpartition(" ")[2], "--device", "cpu")
    assert host.until("run_finished", timeout=300.0)["steps"] == 3


def test_a_lent_machine_killed_with_9_is_replaced_by_one_that_waits(machines: Machines) -> None:
    """No machine has memory for the model. Three are a ring, the fourth waits, and takes the layers of the
    one that is killed, while the others keep theirs. The replay is what the machines had. As its neighbour
    has told the hub that nobody is there, its session has no grace. Of the four one alone can be dialled, so
    two neighbours meet at the run's relay."""
    relay = machines.stack.enter_context(closing(Relay("127.0.0.1", 0)))
    host, url, out = launched(machines, STEPS, "--relay", f"127.0.0.1:{relay.port}")
    lent: dict[str, Process] = {}
    for name in ("ann", "bob", "cid", "dan"):
        listen = ["--listen", f"127.0.0.1:{free_port()}"] if name == "ann" else []
        options = ["--device", "cpu", "--layers", "25MB", *listen]  # alone it takes 25.8
        lent[name] = machines.start(name, "join", url, "-y", "--name", name, *options)
    while len(host.heard("peer_joined")) < 5:  # the four, and the replica
        host.until("peer_joined", len(host.heard("peer_joined")) + 1)
    [ring] = host.heard("stages")[-1]["rings"]
    head = lent[ring[0]["name"]]
    head.until("step", 3)
    assert relay.runs == 4, "the hub's, and of the three that nobody can dial"
    lent[ring[1]["name"]].signal(signal.SIGKILL)
    stepped = len(head.heard("step"))
    finished = host.until("run_finished", timeout=300.0)
    killed = ring[1]["name"]
    [left] = [event["came"] for event in host.heard("peer_left") if event["peer"] == killed]
    replaced = next(
        event["came"]
        for event in host.heard("stages")
        if event["rings"] and killed not in str(event["rings"])
    )

    assert abs(replaced - left) < 1.0, "both at once, not 1.5 s apart"
    assert finished["steps"] == STEPS
    assert sum(step["loss"] is not None for step in head.heard("step")[stepped + 1 :]) > 3
    told = [told["state"] for told in head.heard("progressed")]
    loaded = [state for state in told if "waiting for the other 2 of 3 machines" in state]
    assert len(loaded) == 2, "it has joined anew, once"
    assert f"{8 * STEPS} samples" in replayed(out)
