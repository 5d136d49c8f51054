"""Commands that tests start without the imports of each, over `scripts.swarms.forked`: their events, words.

with Forked() as forked:
    launch = forked.start(folder / "run", "launch", "smoke", "--json", before="import time; ...")
    join = forked.join(folder / "ann", launch.until("run_started")["url"])
    join.until("step")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from scripts.swarms.forked import ForkedProcess, Forker

TOLD = ("told", "said")  # what becomes of stdout and stderr
PATIENCE = 180.0  # seconds for anything to happen on a busy machine

needs_fork = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forks a process that has imported torch: Linux only"
)


def paced(seconds: float) -> str:
    """Python that lets each pass take longer, at no cost: no run is over before all has happened in it."""
    return (
        "import recipes.objectives as objective, time; fine = objective.loss_sum\n"
        f"objective.loss_sum = lambda *a: (time.sleep({seconds}), fine(*a))[1]\n"
    )


@dataclass
class Command:
    """A command of ours that runs, or has run."""

    folder: Path  # the file `told`: its events; `said`: its stderr
    process: ForkedProcess
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._unread = self.follow()

    @property
    def told(self) -> list[dict[str, Any]]:
        lines = (self.folder / "told").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def follow(self) -> Iterator[dict[str, Any]]:
        """Each event as it is told, until the command has ended. The test's time limit is the deadline."""
        seen = 0
        while True:
            ended = self.poll() is not None
            for told in self.told[seen:]:
                seen += 1
                yield told
            if ended:
                return
            time.sleep(0.05)

    def next(self, event: str, **wanted: Any) -> dict[str, Any]:
        """Wait for an event as `until` does, after the last one that this returned."""
        for told in self._unread:
            if told.get("event") == event and all(told[key] == value for key, value in wanted.items()):
                return told
        raise AssertionError(
            f"ended with {self.status}, without {event} {wanted}: {self.told[-2:]} {self.said}"
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [told for told in self.told if told.get("event") == name]

    def until(self, event: str, **wanted: Any) -> dict[str, Any]:
        """The first event of this name with these fields, once it is told."""
        end = time.monotonic() + PATIENCE
        while True:
            ended = self.poll() is not None
            for told in self.told:
                if told.get("event") == event and all(told[key] == value for key, value in wanted.items()):
                    return told
            assert not ended, (
                f"ended with {self.status}, without {event} {wanted}: {self.told[-2:]} {self.said}"
            )
            assert time.monotonic() < end, f"no {event} {wanted} in {PATIENCE} s: {self.told[-2:]}"
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """The exit status, once `poll` has seen its end; negative: the signal that ended it."""
        return self.process.returncode

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} runs after {timeout} s: {self.told[-2:]}") from None


class Forked:
    """The process that forks, and the commands it has forked; all are killed at the end."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.forker = Forker()

    def start(
        self,
        folder: Path,
        *arguments: str,
        module: str = "cocktail_cli",
        terminal: str = "",
        home: Path | None = None,
        **special: Any,
    ) -> Command:
        """Start a command, or another module.

        Args:
            terminal: a device that becomes its stdin.
            special: `before`, Python that runs first; `forks`: the processes that it starts are forked, too.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = ["-m", module, *arguments]
        known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        known |= {"COCKTAIL_HOME": str(home)} if home else {}
        files = [os.open(terminal or os.devnull, os.O_RDWR)]
        files += [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in TOLD]
        process = self.forker.start(command, known, folder, files, **special)
        for file in files:
            os.close(file)
        self.commands.append(Command(folder, process))
        return self.commands[-1]

    def join(self, folder: Path, url: str, *arguments: str, **options: Any) -> Command:
        """A volunteer, by the name of its folder where it is given no other."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "url").write_text(url + "\n")
        named = arguments if "--name" in arguments else ("--name", folder.name, *arguments)
        return self.start(folder, "join", "@url", "-y", "--json", *named, **options)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self.commands:
            if command.poll() is None:
                command.send(signal.SIGKILL)
        self.forker.close()
