"""A run that machines elsewhere train, as processes of the command line: its host, and those that join."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from scripts.swarms.commands import COCKTAIL
from scripts.swarms.processes import Fork, Line, Process

SMOKE = "25MB"  # that a machine lends to `smoke`, which takes 25.8 of one that has it alone


class LentMachines:
    """The processes, each with a home of its own in `folder`; all end with `stack`.

    Args:
        inside: the members of a network lab in which some of them run, by the names of their homes.
        fork: `Forker.start`, in place of a new python for each; not with `inside`.
    """

    def __init__(
        self, folder: Path, stack: ExitStack, inside: dict[str, str] | None = None, fork: Fork | None = None
    ) -> None:
        self.folder, self.stack, self.started = folder, stack, 0
        self.out, self.inside, self.fork = folder / "out", inside or {}, fork

    def start(self, home: str, *arguments: str) -> Process:
        """Start a command with the home of this name."""
        self.started += 1
        command, logs = [*COCKTAIL, *arguments, "--json"], self.folder / f"{self.started}-{home}"
        place = {"COCKTAIL_HOME": str(self.folder / home)}
        process = Process(command, self.inside.get(home, ""), logs=logs, fork=self.fork, **place)
        self.stack.callback(process.kill)
        return process

    def launch(self, *arguments: str) -> tuple[Process, str]:
        """Launch `smoke` with these arguments, and no peer; return the host and the run URL."""
        told = ["launch", "smoke", "--peers", "0", "--port", "0", "-o", str(self.out)]
        host = self.start("host", *told, "stages={}", *arguments)
        return host, host.until("run_started")["url"]

    def join(self, url: str, name: str, *options: str) -> Process:
        """Let a machine join."""
        return self.start(name, "join", url, "-y", "--name", name, "--device", "cpu", *options)

    def verified(self) -> int:
        """Replay the run, which has ended, from its ledger; return how many samples it has counted."""
        verify = self.start("host", "verify", str(self.out))
        verify.end()
        [found] = verify.said
        if "error" in found:
            raise SystemExit(str(found["error"]))
        return int(found["samples"])


def ring_of(line: Line) -> list[str]:
    """Return the names in the first ring of an event `stages`; [] where none is whole."""
    names = [[one["name"] for one in ring] for ring in line["rings"]]
    return next((ring for ring in names if all(ring)), [])
