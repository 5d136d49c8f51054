"""Drives a swarm of processes (line_swarm.py) inside a network lab, and does to its lines what lines suffer.

Runs inside `netlab.py rootless ... -- python SCRIPT`: `inside(script, ...)` starts it so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import netlab

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transport import RunKeys

SWARM = Path(__file__).resolve().with_name("line_swarm.py")
C = TypeVar("C")  # a case of a measurement
Line = dict[str, Any]  # what a process said


def asked_for(doc: str | None, cases: dict[str, C], measure: Callable[[C], Line]) -> dict[str, C]:
    """The cases that the command line names. With --list it names them, and inside the lab (see `inside`) it
    prints what `measure` finds of the one given; then it ends.
    """
    asked = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("cases", nargs="*")
    asked.add_argument("--list", action="store_true")
    asked.add_argument("--inside", help=argparse.SUPPRESS)
    args = asked.parse_args()
    if args.inside:
        kind = type(next(iter(cases.values())))
        print(json.dumps(measure(kind(**json.loads(args.inside)))))
        sys.exit()
    if args.list:
        print("\n".join(cases))
        sys.exit()
    wanted = tuple(args.cases) or ("",)
    return {name: case for name, case in cases.items() if name.startswith(wanted)}


def inside(script: str, arguments: Sequence[str], lab: Sequence[str]) -> list[Line]:
    """Run `script` with these arguments in a lab of its own; the rows of JSON it prints.

    Ends this process with 77 and the reason where no lab can be made, with the script's words where it fails.
    """
    own = [sys.executable, script, *arguments]
    command = [sys.executable, str(Path(netlab.__file__)), "rootless", *lab, "--", *own]
    environment = {key: value for key, value in os.environ.items() if key != "NETLAB"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Member:
    """One process, in the namespace of one member of the lab."""

    def __init__(
        self, member: str, role: str, asked: Line, script: Path = SWARM, python: str = sys.executable
    ) -> None:
        self.member, self.said = member, list[Line]()
        command = ["ip", "netns", "exec", f"lab-{member}", python, str(script), role]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))

    def tell(self, **what: Any) -> None:
        """One line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def heard(self, kind: str) -> list[Line]:
        return [line for line in list(self.said) if line["kind"] == kind]

    def until(self, kind: str, count: int = 1, timeout: float = 120.0) -> Line:
        """The `count`-th line of this kind, waited for."""
        wait_for(lambda: len(self.heard(kind)) >= count, f"{self.member}: {kind}", timeout)
        return self.heard(kind)[count - 1]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, timeout: float = 60.0) -> None:
        """Wait until it has ended, and all it said is here."""
        self._process.wait(timeout)
        self._listener.join(5.0)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def wait_for(there: Callable[[], object], what: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while not there():
        if time.monotonic() > end:
            raise SystemExit(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.01)


class Swarm:
    """A hub and peers."""

    def __init__(self, folder: Path, settings: Line, **hub: Any) -> None:
        self.keys = RunKeys.generate()
        self.url = str(self.keys.url("10.77.0.1", 29400, "lines"))
        self._asked = {"folder": str(folder), "keys": asdict(self.keys), "settings": settings, **hub}
        self.processes: list[Member] = []
        self.hub = self.start_hub()

    def start_hub(self) -> Member:
        self.hub = Member("hub", "hub", self._asked)
        self.processes.append(self.hub)
        self.hub.until("listening")
        return self.hub

    def peer(self, member: str, **asked: Any) -> Member:
        peer = Member(member, "peer", {"url": self.url, "name": member, **asked})
        self.processes.append(peer)
        return peer

    def hub_said(self, kind: str) -> list[Line]:
        """By all hubs of this run, one after the other."""
        return [line for p in self.processes if p.member == "hub" for line in p.heard(kind)]


@contextmanager
def swarm(folder: Path, settings: Line, **hub: Any) -> Iterator[Swarm]:
    made = Swarm(folder, settings, **hub)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()


# ---- what happens to lines ---------------------------------------------------------------------------------


def link(member: str, state: str) -> None:
    netlab.main(["link", "lab", member, state])


def forget(member: str) -> None:
    netlab.main(["forget", "lab", member])


def rates(member: str, mbit: float, rtt: float, up: float | None = None) -> None:
    """Of a member's line, each way alike unless `up` is given."""
    both = ["--up", str(mbit if up is None else up), "--down", str(mbit)]
    netlab.main(["set", "lab", member, *both, "--rtt", str(rtt)])


def congestion(members: Sequence[str], name: str) -> None:
    """Which congestion control the kernels of these members use: reno, bbr ..."""
    for member in members:
        path = "/proc/sys/net/ipv4/tcp_congestion_control"
        command = ["ip", "netns", "exec", f"lab-{member}", "sh", "-c", f"echo {name} > {path}"]
        subprocess.run(command, check=True)


STOP, CONT, KILL, SLOWER = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL, signal.SIGUSR1
