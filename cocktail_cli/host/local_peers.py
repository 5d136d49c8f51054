"""The peers that `launch` starts on its own machine: each a `cocktail join` in a process of its own.

The run URL goes to them on stdin, never in argv, where every user of the machine could read it. stdin then
stays open as a life line: it ends when the launching process does, however that dies, and the peer leaves.
The run's folder has what a peer says: peers/<name>.jsonl (events) and peers/<name>.log (stderr).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocktail_cli.errors import EXIT
from cocktail_cli.machine import ListenAddress, rate_text, split_devices

LEAVE_WITHIN = 20.0  # seconds that a peer has to leave before it is killed


@dataclass(frozen=True)
class EndedPeer:
    """A local peer whose process has ended."""

    name: str
    exit: int
    said: str  # its last words


@dataclass(frozen=True)
class LocalSettings:
    """The options of a launch that its local peers are started with."""

    device: str = "auto"
    micro_batch_size: int | None = None
    max_up: float | None = None  # bytes a second, each peer
    max_down: float | None = None
    gpus: int = 1  # GPUs that each peer is spread over
    vram_limit: int | None = None  # bytes of each GPU, each peer
    trust_remote_code: bool = False
    door: ListenAddress | None = None  # where each listens, if peers aggregate shards

    def devices_of(self, peers: int) -> list[str]:
        """Return the --device of each peer."""
        devices = split_devices(self.device)
        if self.gpus > 1 and devices != ["cpu"]:
            devices = [",".join(devices[i : i + self.gpus]) for i in range(0, len(devices), self.gpus)]
        return [devices[i % len(devices)] for i in range(peers)]


@dataclass
class Child:
    name: str
    process: subprocess.Popen[str]
    ended: bool = False


def start_command(arguments: list[str], flags: int = 0, **options: Any) -> subprocess.Popen[str]:
    """Start a `cocktail` command out of this terminal's process group, so that Ctrl-C does not reach it.

    Args:
        flags: creation flags for Windows.
        options: of Popen.
    """
    # Windows' flag for a process group of its own; elsewhere start_new_session makes one.
    flags |= getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    command = [sys.executable, "-m", "cocktail_cli", *arguments]
    return subprocess.Popen(command, text=True, start_new_session=True, creationflags=flags, **options)


class LocalPeers:
    """Starts, watches and ends the local peers of a run."""

    def __init__(self, folder: Path, settings: LocalSettings) -> None:
        self.folder, self.settings = folder / "peers", settings
        self.children: list[Child] = []

    def start(self, url: str, count: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, device in enumerate(self.settings.devices_of(count), 1):
            self.children.append(self.spawn(url, f"local-{number}", device, count))

    def command(self, name: str, device: str) -> list[str]:
        command = ["join", "-", "--life-line", "--yes", "--json", "--name", name, "--device", device]
        if self.settings.gpus > 1:
            command += ["--gpus", str(self.settings.gpus)]
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

    def spawn(self, url: str, name: str, device: str, count: int) -> Child:
        log = self.folder / f"{name}.log"
        cores = os.cpu_count() or 1
        with (self.folder / f"{name}.jsonl").open("a") as out, log.open("a") as err:
            # Peers on one machine share its cores; more threads than cores make each slower than one.
            env = {"OMP_NUM_THREADS": str(max(1, cores // (count * self.settings.gpus))), **os.environ}
            process = start_command(
                self.command(name, device), stdin=subprocess.PIPE, stdout=out, stderr=err, env=env
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
                gone.append(EndedPeer(child.name, code, last_words(self.folder, child.name)))
        return gone

    @property
    def any_left(self) -> bool:
        return any(not child.ended for child in self.children)

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


def last_words(folder: Path, name: str) -> str:
    """Return why a peer ended: its error event, or the last line of its stderr."""
    events, stderr = ((folder / f"{name}{kind}").read_text(errors="replace") for kind in (".jsonl", ".log"))
    with suppress(ValueError, IndexError):  # nothing there, or a line cut short by a kill
        last = json.loads(events.splitlines()[-1])
        if "error" in last:
            return str(last["error"]["message"])
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def hold_life_line(leave: Callable[[str], None], storing: Callable[[], bool], grace: float = 5.0) -> None:
    """Watch stdin in the peer and leave when it ends: within `grace` seconds in good order, then at once.

    The parent's death must not leave a process behind that trains for no run, nor one that meets its
    successor when the run is resumed. A peer that has left and is `storing` its checkpoint may finish that.
    """

    def watch() -> None:
        # Not sys.stdin.read(): a thread that holds its lock at the end of Python is a fatal error.
        with suppress(OSError):
            while os.read(sys.stdin.fileno(), 1024):
                pass
        leave("its launching process ended")
        until = time.monotonic() + grace
        while time.monotonic() < until or storing():
            time.sleep(0.1)
        os._exit(EXIT["lost"])

    threading.Thread(target=watch, name="life line", daemon=True).start()
