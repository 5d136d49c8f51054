"""A run that machines elsewhere train, as processes of the command line: its host, and those that join."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

from scripts.swarms.commands import COCKTAIL
from scripts.swarms.processes import Line, Process

SMOKE = "25MB"  # that a machine lends to `smoke`, which takes 25.8 of one that has it alone
REPLICA = "-ring"  # ends the name of the peer that a ring is


class LentMachines:
    """The processes, each with a home of its own in `folder`; all end with `stack`.

    `inside`: the members of a network lab in which some of them run, by the names of their homes.
    """

    def __init__(self, folder: Path, stack: ExitStack, inside: dict[str, str] | None = None) -> None:
        self.folder, self.stack, self.started = folder, stack, 0
        self.out, self.inside = folder / "out", inside or {}

    def start(self, home: str, *arguments: str) -> Process:
        """Start a command with the home of this name."""
        self.started += 1
        command, logs = [*COCKTAIL, *arguments, "--json"], self.folder / f"{self.started}-{home}"
        place = {"COCKTAIL_HOME": str(self.folder / home)}
        process = Process(command, self.inside.get(home, ""), logs=logs, **place)
        self.stack.callback(process.kill)
        return process

    def launch(self, *arguments: str) -> tuple[Process, str]:
        """Launch `smoke` with these arguments, and no peer; return the host and the run URL."""
        told = ["launch", "smoke", "--peers", "0", "--port", "0", "-o", str(self.out)]
        host = self.start("host", *told, "compression.shards_at_layers=true", *arguments)
        return host, host.until("run_started")["url"]

    def join(self, url: str, name: str, *options: str) -> Process:
        """Let a machine join."""
        return self.start(name, "join", url, "-y", "--name", name, "--device", "cpu", *options)

    def verified(self) -> str:
        """Replay the run, which has ended, from its ledger; return what was found."""
        command = [*COCKTAIL, "verify", str(self.out)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise SystemExit(found.stdout + found.stderr)
        return found.stdout


def ring_of(line: Line) -> list[str]:
    """Return the names in the first ring of an event `stages`; [] where none is whole."""
    names = [[one["name"] for one in ring] for ring in line["rings"]]
    return next((ring for ring in names if all(ring)), [])
