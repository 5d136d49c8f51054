"""The processes of one run: a hub, peers behind links of their own, and what the hub tells, and when.

Nothing here decides about faults. `Swarm` knows every process, and `end` ends them all, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_link import Link
from chaos_schedule import HUB

ROOT = Path(__file__).resolve().parent.parent
COCKTAIL = [sys.executable, "-X", "faulthandler", "-m", "cocktail_cli"]
GUEST = [sys.executable, "-X", "faulthandler", str(ROOT / "scripts" / "chaos_guest.py")]
STARTS = 120.0  # seconds a process may take until it tells its first word, on a busy machine
LOOK = 0.1  # seconds between two looks at what has changed

Json = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """One event of the hub's --json, and when it came (monotonic)."""

    at: float
    event: Json


@dataclass(frozen=True)
class Look:
    """What /proc says of a process."""

    at: float  # monotonic
    rss: int  # bytes
    files: int  # open descriptors


@dataclass
class Child:
    """A process of the run."""

    name: str  # of the peer, or HUB
    process: subprocess.Popen[str]
    out: Path
    err: Path
    works: float | None = None  # since when: the hub listened, a packet of the peer was in a round
    expects: set[int] = field(default_factory=lambda: {0})  # exit statuses that are right
    why: str = ""  # of what else than 0 is expected
    memory: list[Look] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.expects, self.why = {-signal.SIGKILL}, "killed with 9"
        self.signal(signal.SIGKILL)
        self.process.wait()

    def told(self) -> list[Json]:
        """The events it has written to its stdout; a line that a kill cut short is left out."""
        lines = self.out.read_text(encoding="utf-8").splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def has(self, event: str) -> bool:
        return any(told.get("event") == event for told in self.told())

    @property
    def first_round(self) -> int | None:
        """The first round it took part in; None: in none so far."""
        return next((told["round"] for told in self.told() if told.get("event") == "step"), None)

    @property
    def saw_the_end(self) -> bool:
        """Did it end because the run was over?"""
        return any(told.get("event") == "left" and told["finished"] for told in self.told())

    def look(self) -> None:
        """Note its memory and its open files, where /proc says."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
            self.memory.append(Look(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), files))


class Swarm:
    """One run in `folder`.

    Args:
        launch: recipe, overrides and options of `cocktail launch`, the same for each --resume.
        peers: their names.
        owners: they own shards, each with a door.
    """

    def __init__(
        self, folder: Path, launch: Sequence[str], peers: Sequence[str], *, owners: bool = False
    ) -> None:
        self.folder, self.launch, self.owners = folder, list(launch), owners
        self.out = folder / "out"
        self.changed = threading.Condition()
        self.told: list[Told] = []
        self.children: list[Child] = []
        self.peers: dict[str, Child] = {}
        self.links = {name: Link() for name in peers}  # to the hub
        self.doors: dict[str, list[Link]] = {name: [] for name in peers}  # of all its processes
        self.urls: dict[str, str] = {}
        self.hub: Child | None = None
        self.hub_up = threading.Event()  # the hub listens, and is not stopped
        self.no_hub: list[list[float]] = []  # [from, to] in which there was no hub; the last may be open
        self.frozen = False
        self.over = threading.Event()  # end everything now
        (folder / "logs").mkdir(parents=True)
        self._numbers: dict[str, int] = {}

    # ---- starting --------------------------------------------------------------------------------------

    def start(self, name: str, command: Sequence[str], stdin: str = "", **environment: str) -> Child:
        """Start a process whose stdout and stderr go to files of its own."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        out, err = (self.folder / "logs" / f"{name}-{number}.{end}" for end in ("jsonl", "err"))
        home = self.folder / "homes" / name  # each peer is a machine of its own
        known = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "COCKTAIL_HOME": str(home),
        }
        with out.open("w") as stdout, err.open("w") as stderr, self.changed:
            if self.over.is_set():
                raise Stopped
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=known | environment,
                cwd=self.folder,
                text=True,
                start_new_session=os.name != "nt",  # Ctrl-C at the terminal is ours to pass on
            )
            child = Child(name, process, out, err)
            self.children.append(child)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        return child

    def start_hub(self, *, resume: bool = False, hours: float = 0.0) -> Child:
        """`cocktail launch --no-train`; its events are followed by a thread."""
        command = [*GUEST, "--hours", str(hours), "--"] if hours else COCKTAIL
        command = [*command, *self.launch, "--no-train", "--json", "--bind", "127.0.0.1", "--port", "0"]
        command += ["-o", str(self.out), *(["--resume"] if resume else [])]
        hub = self.hub = self.start(HUB, command)
        threading.Thread(target=self._follow, args=(hub,), daemon=True).start()
        return hub

    def _follow(self, hub: Child) -> None:
        """Read what this hub writes, until it has ended and all is read."""
        with hub.out.open(encoding="utf-8") as lines:
            rest = ""
            while True:
                ended = not hub.alive
                text = lines.read()
                if not text and ended:
                    return
                *whole, rest = (rest + text).split("\n")
                for line in whole:
                    self._take(json.loads(line))
                time.sleep(0.02)

    def _take(self, event: Json) -> None:
        now = time.monotonic()
        with self.changed:
            self.told.append(Told(now, event))
            if event.get("event") == "run_started":
                port = int(re.search(r":(\d+)/", event["url"])[1])  # type: ignore[index]
                for name, link in self.links.items():
                    link.behind = port
                    self.urls[name] = event["url"].replace(f":{port}/", f":{link.port}/")
                self.url = event["url"]
                if self.hub is not None:
                    self.hub.works = now
                self._hub_is_there(now)
            for name in event.get("accepted", []):
                peer = self.peers.get(name)
                if peer is not None and peer.works is None:
                    peer.works = now
            self.changed.notify_all()

    def hub_gone(self) -> None:
        """From now on there is no hub."""
        self.hub_up.clear()
        if not self.no_hub or len(self.no_hub[-1]) == 2:
            self.no_hub.append([time.monotonic()])

    def _hub_is_there(self, now: float) -> None:
        if self.no_hub and len(self.no_hub[-1]) == 1:
            self.no_hub[-1].append(now)
        self.hub_up.set()

    def hub_back(self) -> None:
        """It was stopped, and goes on."""
        self._hub_is_there(time.monotonic())

    def without_hub(self, start: float, end: float) -> float:
        """Seconds between these times in which there was no hub."""
        gaps = [(gap[0], gap[1] if len(gap) == 2 else end) for gap in self.no_hub]
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in gaps)

    def join(
        self,
        peer: str,
        *,
        name: str = "",
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        command: Sequence[str] = tuple(COCKTAIL),
        **environment: str,
    ) -> Child:
        """`cocktail join` over the link of `peer`, named `name` (else like the peer)."""
        line = [
            *before,
            *command,
            "join",
            "-",
            "-y",
            "--json",
            "--name",
            name or peer,
            "--wait",
            "10m",
            *self._door(peer),
            *options,
        ]
        return self.start(name or peer, line, self.urls[peer] + "\n", **environment)

    def _door(self, peer: str) -> list[str]:
        """Options for its door: others reach that over a link."""
        if not self.owners:
            return []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        link = Link(port)
        self.doors[peer].append(link)
        return ["--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{link.port}"]

    def links_of(self, peer: str) -> list[Link]:
        return [self.links[peer], *self.doors[peer]]

    # ---- waiting ---------------------------------------------------------------------------------------

    def wait_for(self, there: Callable[[], Any], seconds: float, *, hub_time: bool = False) -> bool:
        """Wait until `there()`. With `hub_time` the clock stands still while there is no hub."""
        left, last = seconds, time.monotonic()
        while not there():
            if self.over.is_set():
                raise Stopped
            with self.changed:
                self.changed.wait(LOOK)
            now = time.monotonic()
            left -= 0 if hub_time and not self.hub_up.is_set() else now - last
            last = now
            if left <= 0:
                return bool(there())
        return True

    def first(self, wanted: Callable[[Json], bool], after: float = 0.0) -> Told | None:
        """The first event of the hub that came after this time and is wanted."""
        with self.changed:
            return next((t for t in self.told if t.at >= after and wanted(t.event)), None)

    def accepted(self, peer: str, since: int, after: float) -> Told | None:
        """The first round from `since` on, told after this time, that has a packet of this peer."""
        return self.first(lambda e: peer in e.get("accepted", ()) and e["round"] >= since, after)

    def steps(self) -> list[Told]:
        with self.changed:
            return [t for t in self.told if t.event.get("event") == "step"]

    @property
    def finished(self) -> Json | None:
        with self.changed:
            return next(
                (t.event for t in reversed(self.told) if t.event.get("event") == "run_finished"), None
            )

    @property
    def was_over(self) -> bool:
        """Has the hub that was killed noted the end of the run, and nothing told it?"""
        record = json.loads((self.out / "run.json").read_text())
        return bool(record["state"] == "finished" and not self.finished)

    def tell_the_end(self) -> None:
        """In the words of the hub that was killed before it could."""
        record = json.loads((self.out / "run.json").read_text())
        end = {
            "steps": record["steps"],
            "eval_loss": record["eval_loss"],
            "reason": "every sample was counted",
        }
        self._take({"event": "run_finished"} | end)

    # ---- ending ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the memory of all that live."""
        for child in list(self.children):
            if child.alive:
                child.look()

    def backtraces(self) -> None:
        """Have every process write where its threads are to its stderr; it ends with that."""
        for child in self.children:
            if child.alive:
                child.signal(signal.SIGCONT)
                child.signal(signal.SIGABRT)
        time.sleep(2.0)

    def end(self) -> None:
        """End every process and link."""
        with self.changed:
            self.over.set()
            self.changed.notify_all()
        for link in [link for peer in self.links for link in self.links_of(peer)]:
            link.close()
        for child in self.children:
            if child.alive:
                child.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(10)


class Stopped(Exception):
    """The run is being ended: whoever waits for something is to give up."""
