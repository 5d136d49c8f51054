"""Run a measurement inside a network lab, and do to its lines what lines suffer."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from scripts import ROOT
from scripts.netlab import lab as netlab
from scripts.swarms.processes import Line

LAB = str(ROOT / "scripts" / "netlab" / "lab.py")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of a script whose help is the docstring of its module."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_a_lab(
    module: str, doc: str | None, cases: dict[str, Any], measure: Callable[[Any], Line], head: str
) -> Iterator[tuple[str, Line]]:
    """Measure the cases named on the command line, each in a lab of its own: (name, row), after the table's
    head.

    With --list print their names. Inside the lab, where this module was started by `inside`, print the row.
    """
    options = parser(doc)
    options.add_argument("cases", nargs="*", help="beginnings of names; all without")
    options.add_argument("--list", action="store_true")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.inside:
        kind = type(next(iter(cases.values())))
        print(json.dumps(measure(kind(**json.loads(given.inside)))))
        return
    if not given.list:
        print(head)
    for name, case in cases.items():
        if name.startswith(tuple(given.cases) or ("",)):
            if given.list:
                print(name)
            else:
                yield name, row(module, case)


def row(module: str, case: Any) -> Line:
    """Measure one case in a lab of its own; `case.lab` are the options of netlab."""
    (found,) = inside(module, ["--inside", json.dumps(asdict(case))], case.lab)
    return found


def inside(module: str, arguments: Sequence[str], lab: Sequence[str]) -> list[Line]:
    """Run a module with these arguments in a lab of its own; the rows of JSON it prints.

    Ends this program with 77 and the reason where no lab can be made, with the module's words where it fails.
    """
    own = [sys.executable, "-m", module, *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "NETLAB"} | {
        "PYTHONPATH": str(ROOT)
    }
    done = subprocess.run(
        [sys.executable, LAB, "rootless", *lab, "--", *own], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def options(peers: int, **rates: float) -> list[str]:
    """The options of netlab for so many peers with equal lines: up, down, rtt, queue, loss."""
    return [
        "--peers",
        str(peers),
        *(word for name, value in rates.items() for word in (f"--{name}", str(value))),
    ]


def link(member: str, state: str) -> None:
    """Set a line dark ("down"), pull its cable ("pulled"), or mend it ("up")."""
    netlab.main(["link", "lab", member, state])


def forget(member: str) -> None:
    """Swallow the member's present connections for ever, as a NAT does that lost its table."""
    netlab.main(["forget", "lab", member])


def rates(member: str, mbit: float, rtt: float, up: float | None = None) -> None:
    """Shape a member's line, each way alike unless `up` is given."""
    both = ["--up", str(mbit if up is None else up), "--down", str(mbit)]
    netlab.main(["set", "lab", member, *both, "--rtt", str(rtt)])


def congestion(members: Sequence[str], name: str) -> None:
    """Choose the congestion control of these members' kernels: reno, bbr ..."""
    for member in members:
        path = "/proc/sys/net/ipv4/tcp_congestion_control"
        command = ["ip", "netns", "exec", f"lab-{member}", "sh", "-c", f"echo {name} > {path}"]
        subprocess.run(command, check=True)
