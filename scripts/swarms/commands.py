"""A real run of the command line: `cocktail launch` and `cocktail join`, each peer behind links of its own.

Nothing here decides about faults. `Swarm` knows every process, and `end` ends them all, whatever happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from scripts.netlab import lab as netlab
from scripts.swarms.forked import Forker
from scripts.swarms.lab import LabLine
from scripts.swarms.processes import Line, Process
from scripts.swarms.tcp_link import Link, free_port
from transport import ask_admin, parse_url
from transport.protocol.errors import TransportError

HUB, RELAY = "hub", "relay"
SMOKE = "25.9MB"  # that a machine lends to `smoke`: a little less than it takes of one that has it alone
REPLICA = "-ring"  # ends the name of the peer that machines are together
LENDS = ("--layers", SMOKE, "--device", "cpu")
CLOSED = 1  # the port of an address that nobody can dial
COCKTAIL = (sys.executable, "-X", "faulthandler", "-m", "cocktail_cli")
GUEST = (sys.executable, "-X", "faulthandler", "-m", "scripts.fault_injection.guest")
STARTS = 120.0  # seconds a process may take until its first event, on a busy machine
NICE = 5  # peers train: hub and standby have machines
CONTENDS = 30.0  # seconds after a hub is back in which a standby may be elected that nobody has told yet
LOOK = 0.1  # seconds between two looks at what has changed


@dataclass(frozen=True)
class Told:
    """One event of the hub, and when it came (monotonic)."""

    at: float
    event: Line


@dataclass(frozen=True)
class Look:
    """A reading of /proc for a process."""

    at: float  # monotonic
    rss: int  # bytes
    files: int  # open descriptors


class Child(Process):
    """A process of the run, and how it is expected to end."""

    def __init__(self, name: str, command: Sequence[str], logs: Path, **more: Any) -> None:
        self.name = name  # of the peer, or HUB
        self.started = time.monotonic()
        self.works: float | None = None  # since when: the hub listened, a packet of the peer was in a round
        self.expects, self.why = {0}, ""  # exit statuses that are right; why another than 0 is
        self.memory: list[Look] = []
        self.log = logs.with_name(logs.name + ".err")
        super().__init__(command, logs=logs, **more)

    @property
    def alive(self) -> bool:
        return not self.ended

    @property
    def exit(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.expects, self.why = {-signal.SIGKILL}, "killed with 9"
        super().kill()

    @property
    def first_round(self) -> int | None:
        """The first round it took part in; None: in none so far."""
        return next((step["round"] for step in self.heard("step")), None)

    @property
    def saw_the_end(self) -> bool:
        """True where it ended because the run was over."""
        return any(left["finished"] for left in self.heard("left"))

    def last_words(self) -> str:
        """The last thing it said on stderr, or its error, and where the rest is."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line["error"]["message"] for line in self.said if "error" in line]
        said = (errors or [line for line in lines if line.startswith("error")] or lines or ["nothing"])[-1]
        return f"{said} ({self.log})"

    @property
    def given(self) -> str:
        """Return the name that the hub gave it: another one where it came back before the hub gave up its old
        connection."""
        joined = self.heard("joined")
        return str(joined[-1]["peer"]) if joined else self.name

    def look(self) -> None:
        """Note its memory and its open files, where /proc has them."""
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{self.pid}/fd"))
            self.memory.append(Look(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), files))


class Swarm:
    """One run in `folder`.

    Args:
        launch: recipe, overrides and options of `cocktail launch`.
        peers: their names; every other one reaches the hub through the relay alone.
        owners: they own shards, each with a door.
        lent: those of them that lend memory, each with a door: together they are peers.
        mbit: of the lines of all in the network lab that this process is in; 0: links on the loopback.
        forker: forks the commands, in place of a new python for each.
    """

    def __init__(
        self,
        folder: Path,
        launch: Sequence[str],
        peers: Sequence[str],
        *,
        owners: bool = False,
        lent: Sequence[str] = (),
        mbit: float = 0.0,
        forker: Forker | None = None,
    ) -> None:
        self._forker = forker
        self.folder, self.launch, self.owners, self.out = folder, list(launch), owners, folder / "out"
        self.lent = frozenset(lent)
        self.changed = threading.Condition()
        self.told: list[Told] = []
        self.children: list[Child] = []
        self.peers: dict[str, Child] = {}
        self.lab = mbit > 0
        self.members = {name: f"p{number}" for number, name in enumerate([*peers, RELAY], 1)}
        self.machines = ["hub", f"p{len(peers) + 2}"]  # of the hub, of its standby
        self.links: dict[str, Link | LabLine] = {  # to the hub
            name: LabLine(self.members[name], mbit) if self.lab else Link() for name in peers
        }
        self.doors: dict[str, list[Link]] = {name: [] for name in peers}  # of all its processes
        self.url, self.urls = "", dict[str, str]()
        self.hub: Child | None = None
        self.standby: Child | None = None
        self.standby_out, self.standbys = folder, 0
        self.relay: Child | None = None
        self.relay_address = f"{self._address(self.members[RELAY])}:0"  # with its port once it has listened
        self.relayed = set(peers[1::2])  # who reaches the hub through it alone
        self.lost: dict[int, float] = {}  # rounds that a standby lacked, and when it took over
        self.hub_up = threading.Event()  # the hub listens, and is not stopped
        self.no_hub: list[list[float]] = []  # [from, to] in which there was no hub; the last may be open
        self.over = threading.Event()  # end everything now
        (folder / "logs").mkdir(parents=True)

    # ---- starting --------------------------------------------------------------------------------------

    def _address(self, member: str) -> str:
        return f"{netlab.NET}{netlab.number_of(member)}" if self.lab else "127.0.0.1"

    def start(
        self,
        name: str,
        command: Sequence[str],
        stdin: str = "",
        *,
        member: str = "",
        nice: int = 0,
        **more: Any,
    ) -> Child:
        """Start a process with a home of its own: each peer is a machine, in a lab this member. Only what
        starts as `cocktail` does is forked."""
        number = 1 + sum(child.name == name for child in self.children)
        known = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        known |= {"COCKTAIL_HOME": str(self.folder / "homes" / name), "OMP_NUM_THREADS": "1"}
        logs, where = self.folder / "logs" / f"{name}-{number}", member if self.lab else ""
        if self._forker is not None and tuple(command[: len(COCKTAIL)]) == COCKTAIL:
            where = ""
            more["fork"] = partial(self._forker.start, member=member if self.lab else "", nice=nice)
        elif nice and shutil.which("nice"):
            command = ["nice", "-n", str(nice), *command]
        with self.changed:
            if self.over.is_set():
                raise Stopped
            child = Child(name, command, logs, stdin=stdin, member=where, **(known | more))
            self.children.append(child)
        return child

    def start_hub(self, *, resume: bool = False, hours: float = 0.0) -> Child:
        """Start `cocktail launch --no-train`, or resume its run, with a wall clock that is so many hours
        wrong. Where a standby has taken over, return that one in place of resuming."""
        with self.changed:
            if resume and self.hub is not None and self.hub.alive:
                return self.hub
            command = [*GUEST, "--hours", str(hours), "--"] if hours else [*COCKTAIL]
            if resume:
                command += ["resume", str(self.out), "--json"]
            else:
                command += [*self.launch, "--no-train", "--json", "-o", str(self.out), "--port", "0"]
                command += ["--bind", self._address(self.machines[0]), "--relay", self.relay_address]
            self.hub = self._start_hub_or_standby(command, self.machines[0])
            return self.hub

    def _start_hub_or_standby(
        self, command: Sequence[str], member: str, stdin: str = "", **environment: Any
    ) -> Child:
        """Start a process whose events are those of a hub."""
        who: list[Child] = []
        with self.changed:  # its events wait until it is known
            heard = lambda event: self._take(event, who[0])  # noqa: E731 - closes over `who`
            who.append(self.start(HUB, command, stdin, member=member, heard=heard, **environment))
        return who[0]

    def start_relay(self) -> Child:
        """Start `cocktail relay`, each time at the same address, and wait until it listens."""
        bind, _, port = self.relay_address.rpartition(":")
        command = [*COCKTAIL, "relay", "--json", "--bind", bind, "--port", port]
        self.relay = child = self.start(RELAY, command, member=self.members[RELAY])
        self.wait_for(lambda: child.said or not child.alive, STARTS)
        if child.said:
            child.works, self.relay_address = time.monotonic(), child.said[0]["address"]
        return child

    @property
    def _standby_is_relayed(self) -> bool:
        """Tell whether the newest standby can be reached through the relay alone, as every other one."""
        return self.standbys % 2 == 0

    def start_standby(self) -> Child:
        """Start `cocktail standby` on a machine of its own, and wait until it stands by and counts. Every
        other one is reached through the relay alone.
        """
        if self.standby is not None and self.standby.alive:
            return self.standby
        self.standbys += 1
        folder = self.folder / f"standby-{self.standbys}"
        bind, member = self._address(self.machines[1]), self.machines[1]
        command = [*COCKTAIL, "standby", "-", "--json", "--bind", bind, "--port", "0"]
        command += ["--keys", str(self.out / "run.json"), "-o", str(folder), "--relay", self.relay_address]
        command += ["--advertise", f"{bind}:{CLOSED}"] if self._standby_is_relayed else []
        home = str(self.folder / "homes" / folder.name)
        self.standby_out, since = folder, time.monotonic()
        child = self._start_hub_or_standby(command, member, self.url + "\n", COCKTAIL_HOME=home)
        self.standby = child

        def follows() -> bool:
            ready = any("standing by" in told["state"] for told in child.heard("progressed"))
            counts = self.first(lambda e: "has all of the run" in e.get("message", ""), since)
            return not child.alive or self.finished is not None or bool(ready and counts)

        self.wait_for(follows, STARTS)
        return child

    def lose_hub(self, *, silent: bool) -> Child:
        """Destroy the hub's machine, disk included; the standby is all that is left. Return the lost hub.

        Where it is `silent`, nothing closes its connections, as where a machine loses its power: it is only
        stopped, and the caller kills it later.
        """
        assert self.hub is not None
        assert self.standby is not None
        self.hub_gone()
        lost = self.hub
        if silent:
            lost.signal(signal.SIGSTOP)
        else:
            lost.kill()
            lost.end(10)
        shutil.rmtree(self.out)
        return lost

    def _replaced(self, standby: Child, first: int) -> None:
        """Note that this standby has taken over before the round `first`. It may, from a hub that is gone, or
        that has come back while peers and standby were already giving it up: such a hub was none. The exit
        status of any other is wrong then."""
        assert self.hub is not None
        gap = self.no_hub[-1] if self.no_hub else [-inf, -inf]
        if len(gap) == 1 or time.monotonic() < gap[1] + CONTENDS:
            del gap[1:]
            if self.hub.expects == {0}:
                self.hub.expects, self.hub.why = {6, -signal.SIGKILL}, "a standby had taken over"
        told = {
            step.event["round"] for step in self.steps() if not self.is_void(step.event["round"], step.at)
        }
        self.lost |= dict.fromkeys((round for round in told if round >= first), time.monotonic())
        self.hub, self.out, self.standby = standby, self.standby_out, None
        self.machines.reverse()
        if self._standby_is_relayed:
            self.relayed = set(self.links)

    def _take(self, event: Line, source: Child) -> None:
        with self.changed:
            now, started = time.monotonic(), event.get("event") == "run_started"
            if started and source is self.standby:
                self._replaced(source, event["round"])
            if source not in (self.hub, self.standby):  # a hub that was replaced
                return
            self.told.append(Told(now, event))
            if started:
                self.url = event["url"]
                for name in self.links:
                    self.urls[name] = self._laid(name)
                source.works = now
                self.hub_back()
            for name in event.get("accepted", []):
                peer = self.peers.get(name)
                if peer is not None and peer.works is None:
                    peer.works = now
            self.changed.notify_all()
        if event.get("event") == "peer_asks":
            threading.Thread(target=self._approve, args=(event["key"],), daemon=True).start()

    def _approve(self, key: str) -> None:
        """Say yes to a newcomer, as its host; to one whose hub is gone by then, when it asks the next."""
        with suppress(TransportError, FileNotFoundError):
            ask_admin(parse_url(self.url), self._record()["keys"]["stop"], "approve", peer=key)

    def _laid(self, name: str) -> str:
        """Lay the link of a peer to the hub, or to the relay; return the run's URL over that link."""
        link, url = self.links[name], parse_url(self.url)
        relayed = url.port == CLOSED or name in self.relayed
        if isinstance(link, LabLine):
            return str(replace(url, port=CLOSED) if relayed else replace(url, places=()))
        if relayed:
            link.behind = int(self.relay_address.rpartition(":")[2])
            return str(replace(url, port=CLOSED, places=(f"127.0.0.1:{link.port}",)))
        link.behind = url.port
        return str(replace(url, port=link.port, places=()))

    def hub_gone(self) -> None:
        """Note that from now on there is no hub."""
        self.hub_up.clear()
        if not self.no_hub or len(self.no_hub[-1]) == 2:
            self.no_hub.append([time.monotonic()])

    def hub_back(self) -> None:
        """Note that there is a hub again."""
        if self.no_hub and len(self.no_hub[-1]) == 1:
            self.no_hub[-1].append(time.monotonic())
        self.hub_up.set()

    def without_hub(self, start: float, end: float) -> float:
        """Sum the seconds between these times in which there was no hub."""
        gaps = [(gap[0], gap[1] if len(gap) == 2 else end) for gap in self.no_hub]
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in gaps)

    def join(
        self,
        peer: str,
        *,
        name: str = "",
        before: Sequence[str] = (),
        command: Sequence[str] = COCKTAIL,
        **environment: str,
    ) -> Child:
        """Start `cocktail join` over the link of `peer`, named `name` (else like the peer)."""
        name = name or peer
        line = [*before, *command, "join", "-", "-y", "--json", "--name", name, "--wait", "10m"]
        line += [*self._door(peer), *(LENDS if peer in self.lent else ())]
        return self.start(
            name, line, self.urls[peer] + "\n", member=self.members[peer], nice=NICE, **environment
        )

    def _door(self, peer: str) -> list[str]:
        """Options of a peer that others dial: they reach its door over a link."""
        if not self.owners and peer not in self.lent:
            return []
        if self.lab:
            return ["--listen", f"{self._address(self.members[peer])}:0"]
        port = free_port()
        link = Link(port)
        self.doors[peer].append(link)
        return ["--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{link.port}"]

    def links_of(self, peer: str) -> list[Link | LabLine]:
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

    def first(self, wanted: Callable[[Line], bool], after: float = 0.0) -> Told | None:
        """Find the first wanted event of the hub that came after this time."""
        with self.changed:
            start = bisect_left(self.told, after, key=lambda told: told.at)
            return next((t for t in islice(self.told, start, None) if wanted(t.event)), None)

    def accepted(self, peer: str, since: int, after: float) -> Told | None:
        """Find the first round from `since` on, told after this time, that has a packet of this peer, or of
        one that machines are together where it lends memory."""
        return self.first(lambda e: self._has(peer, e.get("accepted", ())) and e["round"] >= since, after)

    def _has(self, peer: str, accepted: Sequence[str]) -> bool:
        together = peer in self.lent and any(name.endswith(REPLICA) for name in accepted)
        return together or peer in accepted

    def all_work(self, step: Line) -> bool:
        """Tell whether all peers have a packet in this round."""
        return all(self._has(peer, step["accepted"]) for peer in self.links)

    def is_void(self, round: int, at: float) -> bool:
        """Tell whether this round, as it was told at this time, was lost with its hub."""
        return round in self.lost and at <= self.lost[round]

    def first_step(self, after: float = 0.0) -> Told | None:
        return self.first(lambda event: event.get("event") == "step", after)

    def steps(self) -> list[Told]:
        with self.changed:
            return [t for t in self.told if t.event.get("event") == "step"]

    @property
    def finished(self) -> Line | None:
        told = self.first(lambda event: event.get("event") == "run_finished")
        return told.event if told else None

    @property
    def was_over(self) -> bool:
        """True where the hub that was killed has noted the end of the run, and nothing told it."""
        return bool(self._record()["state"] == "finished" and not self.finished)

    def tell_the_end(self) -> None:
        """Say what the hub was killed before it could."""
        end = {key: self._record()[key] for key in ("steps", "eval_loss")}
        assert self.hub is not None
        self._take({"event": "run_finished", **end, "reason": "all steps are done"}, self.hub)

    def _record(self) -> Line:
        return dict(json.loads((self.out / "run.json").read_text()))

    # ---- ending ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the memory of all that live."""
        for child in [child for child in self.children if child.alive]:
            child.look()

    def backtraces(self) -> None:
        """Have every process write where its threads are to its stderr; it ends with that."""
        for child in [child for child in self.children if child.alive]:
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
        for child in [child for child in self.children if child.alive]:
            child.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.end(10)


class Stopped(Exception):
    """The run is being ended: every wait gives up."""
