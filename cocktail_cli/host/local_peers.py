"""Commands in processes of their own: the peers that `launch` starts on its own machine, and `--detach`.

Each local peer is a `cocktail join`. The run URL goes to them on stdin, never in argv, where every user of
the machine could read it. stdin then stays open as a life line: it ends when the launching process does,
however that dies, and the peer leaves. The run's folder has what a peer says: peers/<name>.jsonl (events) and
peers/<name>.log (stderr).

`--detach` runs a launch's command line again in the background. That process tells its events through a pipe
until the run has started or failed to. Then nothing reads them any more; all it says is in the run's folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cocktail_cli.assembly import Given, devices_each, words_of
from cocktail_cli.errors import EXIT, TRACEBACK_HINT, Failure
from cocktail_cli.machine import ListenAddress, split_devices
from cocktail_cli.options import rate_text
from cocktail_cli.ui import Event, RunStarted, View, from_json
from recipes.hardware import usable_cores

from .run_folder import LOG


def start_command(arguments: list[str], flags: int = 0, **options: Any) -> subprocess.Popen[str]:
    """Start a `cocktail` command out of this terminal's process group, so that Ctrl-C does not reach it.

    Args:
        flags: creation flags for Windows.
        options: of Popen.
    """
    # Windows' flag for a process group of its own; elsewhere start_new_session makes one.
    flags |= getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    # Where this process does not import from the working folder, no random.py there may shadow a module.
    safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "cocktail_cli", *arguments]
    return subprocess.Popen(command, text=True, start_new_session=True, creationflags=flags, **options)


def read_events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yield the events that a command with --json prints, until its output ends.

    Raises:
        Failure: the command's own.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"v": '):
            continue  # a library, or code of the model, has printed something
        told = json.loads(line)
        if "error" in told:
            raise Failure.of_json(told["error"])
        yield from_json(told)


LEAVE_WITHIN = 20.0  # seconds that a peer has to leave before it is killed
PASSING = ("lost", "rank_lost", "unreachable", "interrupted", "terminated")  # failures that need not repeat
PARENT_ENDED = "its launching process ended"  # why a process is to leave
PARENT_WAITS = 25.0  # seconds that a process has to leave where its parent asked it to


@dataclass(frozen=True)
class EndedPeer:
    """A local peer whose process has ended."""

    name: str
    exit: int
    said: str  # its last words
    failure: Failure | None = None  # its own; None: it ended without one, killed for instance

    @property
    def how(self) -> str:
        """Say how the process ended, with its last words."""
        if self.exit >= 0:
            return f"ended with exit {self.exit}{self.words}"
        killed = f"was killed by {signal.Signals(-self.exit).name}"
        return killed + (", perhaps as memory ran out" if killed.endswith("SIGKILL") else self.words)

    @property
    def words(self) -> str:
        return f": {self.said}" if self.said else ""


@dataclass(frozen=True)
class LocalSettings:
    """The options of a launch that its local peers are started with."""

    device: str = "auto"
    micro_batch_size: int | None = None
    max_up: float | None = None  # bytes a second, each peer
    max_down: float | None = None
    vram_limit: int | None = None  # bytes of each GPU, each peer
    trust_remote_code: bool = False
    given: Given = field(default_factory=dict)  # options of extensions
    door: ListenAddress | None = None  # where each listens, if peers dial each other

    @property
    def each(self) -> int:
        """Return how many devices each peer trains on."""
        return devices_each(self.given)

    def devices_of(self, peers: int) -> list[str]:
        """Return the --device of each peer."""
        devices = split_devices(self.device)
        if (each := self.each) > 1 and devices != ["cpu"]:
            devices = [",".join(devices[i : i + each]) for i in range(0, len(devices), each)]
        return [devices[i % len(devices)] for i in range(peers)]


@dataclass
class Child:
    name: str
    process: subprocess.Popen[str]
    ended: bool = False


class LocalPeers:
    """Starts, watches and ends the local peers of a run."""

    def __init__(self, folder: Path, settings: LocalSettings) -> None:
        self.folder, self.settings = folder / "peers", settings
        self.children: list[Child] = []
        self.ended: list[EndedPeer] = []

    def start(self, url: str, count: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, device in enumerate(self.settings.devices_of(count), 1):
            self.children.append(self.spawn(url, f"local-{number}", device, count))

    def command(self, name: str, device: str) -> list[str]:
        command = ["join", "-", "--life-line", "--yes", "--json", "--verbose"]  # tracebacks go to its log
        command += ["--name", name, "--device", device, *words_of(self.settings.given)]
        if self.settings.trust_remote_code:
            command.append("--trust-remote-code")
        if self.settings.micro_batch_size:
            command += ["--micro-batch-size", str(self.settings.micro_batch_size)]
        for option, rate in (("--max-up", self.settings.max_up), ("--max-down", self.settings.max_down)):
            if rate is not None:
                command += [option, rate_text(rate)]
        if self.settings.vram_limit is not None:
            command += ["--vram-limit", f"{self.settings.vram_limit >> 10}KiB"]
        if (door := self.settings.door) is not None:
            command += ["--listen", f"{door.bind}:{door.port}", "--advertise", str(door.advertise)]
        return command

    def environment(self, count: int) -> dict[str, str]:
        """Return the environment of one of `count` peers, which has no volunteer's hours or limits."""
        # Peers on one machine share its cores; more threads than cores make each slower than one.
        threads = max(1, usable_cores() // (count * self.settings.each))
        return {"OMP_NUM_THREADS": str(threads), **os.environ, "COCKTAIL_CONFIG": os.devnull}

    def spawn(self, url: str, name: str, device: str, count: int) -> Child:
        log = self.folder / f"{name}.log"
        with (self.folder / f"{name}.jsonl").open("a") as out, log.open("a") as err:
            process = start_command(
                self.command(name, device),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=self.environment(count),
            )
        assert process.stdin is not None
        process.stdin.write(url + "\n")
        process.stdin.flush()
        (self.folder / f"{name}.pid").write_text(str(process.pid))
        return Child(name, process)

    def newly_ended(self) -> list[EndedPeer]:
        """Return the peers whose process has ended since the last call."""
        gone = []
        for child in self.children:
            code = child.process.poll()
            if code is not None and not child.ended:
                child.ended = True
                failure = failure_of(self.folder, child.name)
                said = failure.message if failure else last_line(self.folder, child.name)
                gone.append(EndedPeer(child.name, code, said, failure))
        self.ended += gone
        return gone

    def check(self, present: Collection[str], met: Collection[str], rounds: int) -> None:
        """Raise Failure where all local peers have failed and no other can do their work: with their own
        error, if they had one. Peers from elsewhere that were here before may come back, and are waited for.

        Args:
            present: peers in the run.
            met: peers that have been in it.
            rounds: committed.
        """
        if not self.children or len(self.ended) < len(self.children) or present:
            return
        last = self.ended[-1]
        fatal = last.failure if last.failure and last.failure.code not in PASSING else None
        if fatal is not None and not set(met) - {child.name for child in self.children}:
            log = f"what it said: {self.folder / last.name}.log"
            every = "the local peer failed" if len(self.children) == 1 else "every local peer failed"
            hints = tuple(hint for hint in fatal.hints if hint != TRACEBACK_HINT)
            raise Failure(fatal.code, f"{every}: {fatal.message}", fatal.problems, (*hints, log))
        if rounds == 0:
            said = f"every local peer failed before the first step; {last.name}{last.words}"
            raise Failure("no_result", said, hints=(f"what it said: {self.folder / last.name}.log",))

    def finish(self, within: float = 5.0) -> None:
        """Wait for the peers to end by themselves, as the run is over and they know it."""
        deadline = time.monotonic() + within
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self, within: float = LEAVE_WITHIN) -> None:
        """Close the life lines and wait; kill the peers that have not left by then."""
        for child in self.children:
            assert child.process.stdin is not None
            with suppress(OSError):  # it is gone already
                child.process.stdin.close()
        self.finish(within)
        for child in self.children:
            child.process.kill()  # nothing to a process that has ended
            child.process.wait()


def failure_of(folder: Path, name: str) -> Failure | None:
    """Return the failure that a peer ended with, by its last event; None where that is none."""
    with suppress(ValueError, IndexError):  # nothing there, or a line cut short by a kill
        last = json.loads((folder / f"{name}.jsonl").read_text(errors="replace").splitlines()[-1])
        if "error" in last:
            return Failure.of_json(last["error"])
    return None


def last_line(folder: Path, name: str) -> str:
    """Return the last line of a peer's stderr."""
    stderr = (folder / f"{name}.log").read_text(errors="replace")
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


class LifeLine:
    """Ends this process when its stdin does, which is when the process that started it ends.

    The parent's death must not leave a process behind that trains for no run, nor one that meets its
    successor when the run is resumed.

    Args:
        grace: seconds to leave in good order. A parent that lives writes why it asks to leave, and waits as
            long as for Ctrl-C.
    """

    def __init__(self, grace: float = 5.0) -> None:
        self.grace = grace
        self.leave: Callable[[str], None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        threading.Thread(target=self._watch, name="life line", daemon=True).start()

    @contextmanager
    def leaving(self, leave: Callable[[str], None], busy: Callable[[], bool]) -> Iterator[None]:
        """Call `leave` with the reason if stdin ends in this block, and wait while the process is `busy`."""
        self.leave, self.busy = leave, busy
        try:
            yield
        finally:
            self.leave = None

    def _watch(self) -> None:
        # Not sys.stdin.read(): a thread that holds its lock at the end of Python is a fatal error.
        said = b""
        with suppress(OSError):
            while part := os.read(sys.stdin.fileno(), 1024):
                said += part
        grace = self.grace
        if self.leave is not None:
            self.leave(said.decode().strip() or PARENT_ENDED)
            grace = PARENT_WAITS if said else grace
        until = time.monotonic() + grace
        while time.monotonic() < until or self.busy():
            time.sleep(0.1)
        os._exit(EXIT["lost"])


# On Windows an invisible console of its own, which the run's peers share and which closes with none.
NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)


def start_detached(arguments: list[str], folder: Path, view: View) -> None:
    """Launch with these arguments in another process; return once its run has started.

    Args:
        folder: of the run, claimed.

    Raises:
        Failure: as the launch itself would.
    """
    with (folder / LOG).open("a", encoding="utf-8") as log:  # beside events: tracebacks of a crash
        command = detached_command(arguments, folder)
        process = start_command(
            command, NO_WINDOW, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
    try:
        for event in read_events(process):
            if isinstance(event, RunStarted):
                view.close()  # later events are not shown here
                view.show(event)
                return
            view.show(event)
    except KeyboardInterrupt:  # nothing was begun
        process.terminate()
        raise
    hint = f"what it said: {folder / LOG}"
    raise Failure("unexpected", f"the run's process ended with exit {process.wait()}", hints=(hint,))


def detached_command(arguments: list[str], folder: Path) -> list[str]:
    """Return the other process's arguments: the same words and folder, with events as JSON."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first, *options = [one for one in arguments[:end] if one not in ("--fresh", "--detach")]
    named = ["-o", str(folder)] if "--fresh" in arguments[:end] else []  # the folder that was found for it
    return [first, "--json", "--detached", *options, *named, *arguments[end:]]


class DetachedView:
    """The view of the background process, whose output is read until the run has started."""

    def __init__(self, view: View) -> None:
        self.view = view

    def show(self, event: Event) -> None:
        self.view.show(event)
        if isinstance(event, RunStarted):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        self.view.close()
