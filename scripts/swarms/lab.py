"""Run a measurement inside a network lab."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from scripts import ROOT
from scripts.netlab import lab as netlab
from scripts.swarms.processes import Line

RTT, THIN = 40.0, 20.0  # ms; a thin line has so much less of its rate


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of a script whose help is the docstring of its module."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def inside(program: Sequence[str], lab: Sequence[str]) -> list[Line]:
    """Run python with these arguments in a lab of its own; the rows of JSON it prints.

    Ends this program with 77 and the reason where no lab can be made, with the program's words where it
    fails.
    """
    command = rootless(lab, [sys.executable, *program])
    known = {key: value for key, value in os.environ.items() if key != "NETLAB"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=known)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rootless(lab: Sequence[str], command: Sequence[str]) -> list[str]:
    """Build the command that runs another one in a lab of its own."""
    return [sys.executable, netlab.__file__, *lab, "--", *command]


def options(peers: int, **rates: float) -> list[str]:
    """The options of netlab for so many peers with equal lines: up, down, rtt, queue, loss."""
    words = [word for name, value in rates.items() for word in (f"--{name}", str(value))]
    return ["--peers", str(peers), *words]


class LabLine:
    """A member's line, as `tcp_link.Link` in what can happen to it."""

    _lab = threading.Lock()  # its state is one file

    def __init__(self, member: str, mbit: float) -> None:
        self.member, self.mbit = member, mbit

    def dark(self) -> None:
        with self._lab:
            netlab.link(self.member, "down")

    def deaf(self) -> None:
        with self._lab:
            netlab.link(self.member, "deaf")

    def thin(self) -> None:
        with self._lab:
            self._rates(self.mbit / THIN)

    def mend(self) -> None:
        with self._lab:
            netlab.link(self.member, "up")
            self._rates(self.mbit)

    def swallow(self) -> None:
        with self._lab:
            netlab.forget(self.member)

    def _rates(self, mbit: float) -> None:
        netlab.change(self.member, up=mbit, down=mbit, rtt=RTT)

    def close(self) -> None:
        """Leave it as it is: it vanishes with the lab."""


def congestion(members: Sequence[str], name: str) -> None:
    """Choose the congestion control of these members' kernels: reno, bbr ..."""
    for member in members:
        path = "/proc/sys/net/ipv4/tcp_congestion_control"
        command = ["ip", "netns", "exec", f"lab-{member}", "sh", "-c", f"echo {name} > {path}"]
        subprocess.run(command, check=True)
