"""One real process of a measurement. It prints lines of JSON and may be told some on its stdin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from scripts import ROOT
from scripts.swarms.forked import ForkedProcess

Line = dict[str, Any]  # what a process printed, with `came`: when it was read (monotonic)
Fork = Callable[[Sequence[str], Mapping[str, str], Path, Sequence[int]], ForkedProcess]

_printing = threading.Lock()


def say(kind: str, **what: Any) -> None:
    """Print a line of JSON, stamped with the monotonic time: for the program of such a process."""
    line = json.dumps({"t": time.monotonic(), "kind": kind, **what}, default=str)
    with _printing:
        print(line, flush=True)


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Read the bytes resident of a process: now (VmRSS), at most (VmHWM), or of files (RssFile)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"this system does not tell {field}")


def program(module: str, role: str, asked: Line, python: str = sys.executable) -> list[str]:
    """Build the command that runs a role of one of our modules."""
    return [python, "-m", module, role, json.dumps(asked)]


class Process:
    """A process and what it has printed.

    Args:
        member: run it in the namespace of this member of the network lab; "": in ours.
        stdin: all that it is to read; None: `tell` writes it.
        logs: a path without ending: stdout is copied to its .jsonl, stderr goes to its .err. Such a process
            is in a session of its own, so that Ctrl-C at the terminal does not reach it.
        heard: called with each line, in the thread that reads them.
        fork: `Forker.start`, in place of a new python; `logs` must be given, and the member to `fork`.
    """

    def __init__(
        self,
        command: Sequence[str],
        member: str = "",
        *,
        stdin: str | None = None,
        logs: Path | None = None,
        heard: Callable[[Line], None] | None = None,
        fork: Fork | None = None,
        **environment: str,
    ) -> None:
        self.member, self.said, self.changed = member, list[Line](), threading.Condition()
        self._logs, self._heard = logs, heard
        known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
        place = ["ip", "netns", "exec", f"lab-{member}"] if member else []
        self.process: subprocess.Popen[str] | ForkedProcess
        self._stdin: IO[str] | None
        self._stdout: IO[str] | None
        if fork is not None and logs is not None:
            self.process, self._stdin, self._stdout = _forked(fork, command, known, logs)
        else:
            self.process = started = subprocess.Popen(
                [*place, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=logs.with_name(logs.name + ".err").open("w") if logs else None,
                env=known,
                cwd=logs.parent if logs else None,
                text=True,
                start_new_session=bool(logs) and os.name != "nt",
            )
            self._stdin, self._stdout = started.stdin, started.stdout
        if stdin is not None and self._stdin is not None:
            with suppress(BrokenPipeError):
                self._stdin.write(stdin)
                self._stdin.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._stdout is not None
        log = self._logs.with_name(self._logs.name + ".jsonl").open("w") if self._logs else None
        for text in self._stdout:
            if log:
                log.write(text)
                log.flush()
            with suppress(ValueError):  # a kill may cut a line short
                line = {"came": time.monotonic()} | json.loads(text)
                self.said.append(line)
                if self._heard:
                    self._heard(line)
            self._wake()
        self.process.wait()  # so that a thread that is woken now finds it ended
        self._wake()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def tell(self, **what: Any) -> None:
        """Write it a line of JSON."""
        assert self._stdin is not None
        self._stdin.write(json.dumps(what) + "\n")
        self._stdin.flush()

    def heard(self, kind: str) -> list[Line]:
        """The lines of this `kind` (our programs) or `event` (`cocktail --json`)."""
        return [line for line in list(self.said) if kind in (line.get("kind"), line.get("event"))]

    def until(self, kind: str, count: int = 1, timeout: float = 120.0) -> Line:
        """Wait for the `count`-th line of this kind. Ends this program where an error or the end comes
        first."""

        def there() -> bool:
            failed = any(isinstance(line.get("error"), dict) for line in self.said)
            return len(self.heard(kind)) >= count or self.ended or failed

        with self.changed:
            self.changed.wait_for(there, timeout)
        if len(found := self.heard(kind)) < count:
            who = self.member or "a process"
            raise SystemExit(f"{who}: no {kind} {count}; the last it said: {self.said[-1:]}")
        return found[count - 1]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self, timeout: float = 60.0) -> None:
        """Wait until it has ended and all it printed is here."""
        self.process.wait(timeout)
        self._listener.join(5.0)

    def stop(self, number: int, timeout: float = 15.0) -> None:
        """Signal it, and kill it where that does not end it."""
        self.signal(number)
        try:
            self.end(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if not self.ended:
            self.process.kill()
        self.end()


def _forked(
    fork: Fork, command: Sequence[str], environment: Mapping[str, str], logs: Path
) -> tuple[ForkedProcess, IO[str], IO[str]]:
    """Fork a command with pipes as its stdin and stdout; return our ends of them too."""
    stdin, to = os.pipe()
    come, stdout = os.pipe()
    with logs.with_name(logs.name + ".err").open("w") as stderr:
        process = fork(command, environment, logs.parent, (stdin, stdout, stderr.fileno()))
    os.close(stdin)
    os.close(stdout)
    return process, os.fdopen(to, "w"), os.fdopen(come)


@contextmanager
def started(module: str) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts a role of a module as a process; all of them are killed at the end."""
    processes: list[Process] = []

    def start(role: str, member: str = "", **asked: Any) -> Process:
        processes.append(Process(program(module, role, asked), member))
        return processes[-1]

    try:
        yield start
    finally:
        for process in processes:
            process.kill()


def run_role(roles: Mapping[str, Callable[[Line], None]], otherwise: Callable[[], None]) -> None:
    """Run what `program` asks for; `otherwise` where the command line names no role."""
    if sys.argv[1:2] and sys.argv[1] in roles:
        roles[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        otherwise()


def divided(count: int, parts: int = 2) -> list[range]:
    """Divide so many peers among so many processes."""
    return [range(count * n // parts, count * (n + 1) // parts) for n in range(parts)]


def wait_for(there: Callable[[], object], what: str, timeout: float) -> None:
    """Wait until `there()` holds; end this program where it does not in time."""
    end = time.monotonic() + timeout
    while not there():
        if time.monotonic() > end:
            raise SystemExit(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.01)
