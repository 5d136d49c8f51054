"""The peers that `launch` starts on its own machine: each a `cocktail join` in a process of its own.

The run URL goes to them on stdin, never in argv, where every user of the machine could read it. stdin then
stays open as a life line: it ends when the launching process does, however that dies, and the peer leaves.
What a peer says is kept in the run's folder: peers/<name>.jsonl (its events) and peers/<name>.log (its
stderr).
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

from cocktail_cli.errors import EXIT
from cocktail_cli.machine import Doorstep, as_text, split_devices

# Windows' flag for a process group of its own; elsewhere start_new_session does it.
OWN_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
LEAVE_WITHIN = 20.0  # seconds that a peer has to leave before it is ended


@dataclass(frozen=True)
class Ended:
    """A local peer's process that is gone."""

    name: str
    exit: int
    said: str  # its last words


@dataclass(frozen=True)
class LocalSettings:
    """What this machine's owner chooses for the local peers."""

    device: str = "auto"
    micro_batch_size: int | None = None
    max_up: float | None = None  # bytes a second, each peer
    max_down: float | None = None
    gpus: int = 1  # that each is spread over
    vram_limit: int | None = None  # bytes of each GPU, each peer
    trust_remote_code: bool = False
    door: Doorstep | None = None  # where each listens, in a run whose shards peers own

    def devices_of(self, peers: int) -> list[str]:
        """For each of them its --device."""
        devices = split_devices(self.device)
        if self.gpus > 1 and devices != ["cpu"]:
            devices = [",".join(devices[i : i + self.gpus]) for i in range(0, len(devices), self.gpus)]
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

    def start(self, url: str, count: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, device in enumerate(self.settings.devices_of(count), 1):
            self.children.append(self.spawn(url, f"local-{number}", device, count))

    def command(self, name: str, device: str) -> list[str]:
        command = [sys.executable, "-m", "cocktail_cli", "join", "-", "--life-line", "--yes", "--json"]
        command += ["--name", name, "--device", device]
        if self.settings.gpus > 1:
            command += ["--gpus", str(self.settings.gpus)]
        if self.settings.trust_remote_code:
            command.append("--trust-remote-code")
        if self.settings.micro_batch_size:
            command += ["--micro-batch-size", str(self.settings.micro_batch_size)]
        for option, rate in (("--max-up", self.settings.max_up), ("--max-down", self.settings.max_down)):
            if rate is not None:
                command += [option, as_text(rate)]
        if self.settings.vram_limit is not None:
            command += ["--vram-limit", f"{self.settings.vram_limit >> 10}KiB"]
        if (door := self.settings.door) is not None:
            command += ["--listen", f"{door.bind}:{door.port}", "--advertise", str(door.advertise)]
        return command

    def spawn(self, url: str, name: str, device: str, count: int) -> Child:
        log = self.folder / f"{name}.log"
        cores = os.cpu_count() or 1
        with (self.folder / f"{name}.jsonl").open("a") as out, log.open("a") as err:
            process = subprocess.Popen(
                self.command(name, device),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                # Out of the terminal's process group: Ctrl-C is for the launching process, which then ends
                # the run.
                start_new_session=True,
                creationflags=OWN_GROUP,
                # Peers on one machine share its cores; more threads than cores make each slower than one.
                env={"OMP_NUM_THREADS": str(max(1, cores // (count * self.settings.gpus))), **os.environ},
            )
        assert process.stdin is not None
        process.stdin.write(url + "\n")
        process.stdin.flush()
        (self.folder / f"{name}.pid").write_text(str(process.pid))
        return Child(name, process)

    def newly_ended(self) -> list[Ended]:
        """The peers whose process is gone since the last call."""
        gone = []
        for child in self.children:
            code = child.process.poll()
            if code is not None and not child.ended:
                child.ended = True
                gone.append(Ended(child.name, code, last_words(self.folder, child.name)))
        return gone

    @property
    def any_left(self) -> bool:
        return any(not child.ended for child in self.children)

    def finish(self, within: float = 5.0) -> None:
        """The run is over and the peers have been told: let them end by themselves."""
        deadline = time.monotonic() + within
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self, within: float = LEAVE_WITHIN) -> None:
        """Let go of the life lines and wait; whoever has not left by then is ended."""
        for child in self.children:
            assert child.process.stdin is not None
            with suppress(OSError):  # it is gone already
                child.process.stdin.close()
        deadline = time.monotonic() + within
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def last_words(folder: Path, name: str) -> str:
    """Why a peer ended, as far as it said: its error as an event, or the last line of its stderr."""
    told, stderr = ((folder / f"{name}{kind}").read_text(errors="replace") for kind in (".jsonl", ".log"))
    with suppress(ValueError, IndexError):  # nothing there, or a line cut short by a kill
        last = json.loads(told.splitlines()[-1])
        if "error" in last:
            return str(last["error"]["message"])
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def hold_life_line(leave: Callable[[str], None], keeping: Callable[[], bool], grace: float = 5.0) -> None:
    """In the peer: watch stdin, and leave when it ends; in `grace` seconds in good order, then at once.

    The parent's death must not leave a process behind that trains for nobody, nor one that meets its
    successor when the run is resumed. One that has left and is `keeping` its state may finish that.
    """

    def watch() -> None:
        # Not sys.stdin.read(): a thread that holds its lock at the end of Python is a fatal error.
        with suppress(OSError):
            while os.read(sys.stdin.fileno(), 1024):
                pass
        leave("its launching process ended")
        until = time.monotonic() + grace
        while time.monotonic() < until or keeping():
            time.sleep(0.1)
        os._exit(EXIT["lost"])

    threading.Thread(target=watch, name="life line", daemon=True).start()
