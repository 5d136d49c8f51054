"""Commands in processes of their own that do not each pay four seconds for the imports.

One process imports what `cocktail join` needs and forks for each command: real processes, pids and signals.

    with Forked() as forked:
        launch = forked.start(folder / "run", "launch", "smoke", "--json", before="import time; ...")
        join = forked.join(folder / "ann", launch.until("run_started")["url"])
        join.until("step")

Run as a script it is that process: requests come on stdin, answers go to stdout, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# What a command would import, and what that imports in its turn.
MODULES = (
    "cocktail_cli.main",
    "cocktail_cli.volunteer.run_link",
    "cocktail_cli.host.host_session",
    "cocktail_cli.host.run_delegate",
    "recipes.training.loop",
)
MODULES += ("datasets", "zmq", "transformers.models.gpt_neox.modeling_gpt_neox", "transformers.optimization")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 90.0  # seconds for anything to happen on a busy machine

needs_fork = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forks a process that has imported torch: Linux only"
)


@dataclass
class Command:
    """A command of ours that runs, or has run."""

    folder: Path  # the file `told`: its events; `said`: its stderr
    pid: int
    forked: Forked
    status: int | None = None  # exit status; negative: the signal that ended it
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

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def poll(self) -> int | None:
        if self.status is None:
            self.status = self.forked.ask({"poll": self.pid})
        return self.status

    def wait(self, timeout: float = PATIENCE) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < end, f"process {self.pid} runs after {timeout} s: {self.told[-2:]}"
            time.sleep(0.02)
        assert self.status is not None
        return self.status


class Forked:
    """The process that forks, and the commands it has forked; all are killed at the end."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def ask(self, request: dict[str, Any]) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

    def start(
        self, folder: Path, *arguments: str, before: str = "", terminal: str = "", home: Path | None = None
    ) -> Command:
        """`before` is Python that runs first; `terminal`, a device, becomes its stdin."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("told", "said"):
            (folder / name).write_text("")
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "before": before,
            "terminal": terminal,
            "home": str(home or os.environ["COCKTAIL_HOME"]),
        }
        command = Command(folder, self.ask(request), self)
        self.commands.append(command)
        return command

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
                os.kill(command.pid, signal.SIGKILL)
        self._process.kill()  # it has nothing to tidy up
        self._process.communicate()


# ---- the process that forks --------------------------------------------------------------------------------


def serve() -> None:
    for name in MODULES:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                become(**request)
        print(json.dumps(answer), flush=True)


def become(folder: str, arguments: list[str], before: str, terminal: str, home: str) -> None:
    """Become the command, in the child, as if it had been typed."""
    os.setsid()
    # As a terminal gives them: the tests may run under nohup, or behind an & of a script.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    stdin = os.open(terminal or os.devnull, os.O_RDWR)
    files = [
        stdin,
        *(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in ("told", "said")),
    ]
    for number, file in enumerate(files):
        os.dup2(file, number)
    # Python's own, made anew: those of the parent hold what it has read ahead
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ["COCKTAIL_HOME"] = home
    sys.argv = ["cocktail", *arguments]
    try:
        exec(before, {})
        sys.modules["cocktail_cli.main"].main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(99)


if __name__ == "__main__":
    serve()
