"""Real faults in a real swarm, and which culprit its hub names for each.

    scripts/start --test scripts.fault_injection.culprits                  every fault that this machine has
    scripts/start --test scripts.fault_injection.culprits --only up,stop   some of them
    scripts/start --test scripts.fault_injection.culprits --quiet 1000     no fault: nobody may be named

A hub and three peers train the smoke model, each in a network namespace of its own. A fault lasts until it
is named, for at most ROUNDS rounds; then the swarm has WELL rounds without one. A row says what was done to
whom, what was named, and when: in seconds from its beginning, and in committed rounds, those that went on
without the peer included. Right is the cause, named within WITHIN rounds, and no other culprit that stands: a
silent peer that is named from outside may say itself what it is. Exit 1 where fewer than 19 of 20 are right.

up, down     the peer's line at 30 kbit/s, one way
loss         30 % of its packets are lost
stop         SIGSTOP for 8 s
nice         the peer at nice 19 beside four busy processes on its core
core         the peer's core gives it a fiftieth of its time (a control group; root)
disk         the hub's disk writes three times a second (a control group; root)
memory       the peer's memory is limited to its data and .5 to 4 MiB for its code (control groups; root)
clock        the peer's wall clock jumps by an hour

Rounds are of 1 to 2 s by default: faults and their echoes last seconds, whatever a round takes. `nice` says
something only where each peer has a core to itself: busy processes slow whoever shares theirs.
Kinds that need root are left out where it is missing. Not done here: heat, other programs on a GPU,
suspending the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.fault_injection.run import write_data
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process

PEERS = ("p1", "p2", "p3")
HUB, ALONE = "the hub", "p1"
CORES = {"p1": 0, "p2": 1, "p3": 1, "hub": 1}  # the first peer has a core of its own
MBIT, THIN, RTT, LOSS = 20.0, 0.03, 20.0, 30.0
ROUNDS, WITHIN, WELL = 8, 3, 14  # rounds of a fault, those in which it is to be named, and between two
LONGEST = 60.0  # seconds of a fault
BATCH = 288  # samples of a round
STOPS = 8.0  # seconds
RIGHT = 0.95
CGROUPS = Path("/sys/fs/cgroup")
GROUP = "cocktail-culprit"
SEEN_CGROUPS = Path("/run/cgroup")  # as members see them: `ip netns exec` hides /sys
CODE = ("libtorch_cpu.so", "libtorch_python.so")
# bytes for the pages of files; 10 MiB slow nothing down
SPARES = (4 << 20, 3 << 20, 2 << 20, 1 << 20, 1 << 19)
LOOK, STALLED = 1.0, 0.3  # seconds, and what share of them a task stands still
COCKTAIL = [sys.executable, "-m", "cocktail_cli"]
GUEST = [sys.executable, "-m", "scripts.fault_injection.guest", "--jump", "1", "--"]
BUSY = "while True: pass"


@dataclass(frozen=True)
class Kind:
    """A fault: what is done, and which causes are right."""

    begin: Callable[[Swarm, str], None]
    end: Callable[[Swarm, str], None]
    right: tuple[str, ...]
    also: tuple[str, ...] = ()  # causes that may be named before more is known
    to: str = ""  # always to this member
    needs: tuple[str, ...] = ()  # hierarchies of control groups, by folder


def on_core(member: str) -> list[str]:
    return ["taskset", "-c", str(CORES[member])] if (os.cpu_count() or 1) > 1 else []


class OwnMemory:
    """Gives a process memory of its own: control groups, and copies of the largest libraries that it maps.

    A group is charged for the pages of a file which it has read first; the usual copies are others' as well.
    """

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        libraries = [Path(spec.origin).with_name("lib") / name for name in CODE]
        binds = [self._copied(library, folder / library.name) for library in libraries]
        SEEN_CGROUPS.mkdir()
        subprocess.run(["mount", "--rbind", CGROUPS, SEEN_CGROUPS], check=True)
        self.limited, self.observed = CGROUPS / "memory" / GROUP, CGROUPS / "unified" / GROUP
        enters = []
        for group in (self.limited, self.observed):
            group.mkdir(exist_ok=True)
            enters.append(f"echo $$ > {SEEN_CGROUPS / group.relative_to(CGROUPS)}/cgroup.procs")
        (self.limited / "memory.oom_control").write_text("1")  # wait where nothing is left, do not end it
        script = " && ".join([*enters, *binds, 'exec "$@"'])
        self.command = ["sh", "-c", script, "sh"]  # before that of the process

    def _copied(self, library: Path, copy: Path) -> str:
        """Copy a library without leaving its pages in memory; return the command that maps the copy."""
        shutil.copy(library, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return f"mount --bind {copy} {library}"

    def limit(self) -> None:
        """Leave it the data, which it cannot give up without swap, and the first of SPARES that stalls it."""
        for spare in SPARES:
            told = dict(line.split() for line in (self.limited / "memory.stat").read_text().splitlines())
            used = int((self.limited / "memory.usage_in_bytes").read_text())
            before = self._stalled()
            with suppress(OSError):  # a limit that cannot be reached now is refused
                self._set(used - int(told["total_cache"]) + spare)
            time.sleep(LOOK)
            if self._stalled() - before >= STALLED * LOOK:
                return

    def unlimit(self) -> None:
        self._set(-1)

    def _set(self, most: int) -> None:
        (self.limited / "memory.limit_in_bytes").write_text(str(most))

    def _stalled(self) -> float:
        """Return the seconds in which one of its tasks stood still."""
        return int((self.observed / "memory.pressure").read_text().split("total=")[1].split()[0]) / 1e6

    def close(self) -> None:
        """Remove the groups, once the process has ended."""
        for group in (self.limited, self.observed):
            group.rmdir()


class Swarm:
    """The processes of one run, in the lab `lab`.

    Args:
        memory: the member ALONE has memory of its own.
        batch: samples of a round.
    """

    def __init__(self, folder: Path, memory: bool, batch: int) -> None:
        self.folder, self.busy = folder, list[subprocess.Popen[bytes]]()
        write_data(folder / "rows.jsonl")
        home = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        launch = ["launch", "smoke", "--data", str(folder / "rows.jsonl"), "max_steps=100000", "eval_steps=0"]
        launch += ["data.max_length=64", "packing=false", "swarm.peer_timeout=60", "val_set_size=0"]
        launch += [f"global_batch_size={batch}", "--no-train", "--json", "-o", str(folder / "out")]
        launch += ["--bind", "10.77.0.1", "--port", "29400"]
        self.hub = Process(
            [*on_core("hub"), *COCKTAIL, *launch],
            "hub",
            logs=folder / "hub",
            COCKTAIL_HOME=str(folder / "host"),
            **home,
        )
        url = self.hub.until("run_started", timeout=300.0)["url"]
        self.memory = OwnMemory(folder) if memory else None
        own = {ALONE: self.memory.command} if self.memory else {}
        self.peers = {
            name: Process(
                [*own.get(name, []), *on_core(name), *GUEST, "join", "-", "-y", "--json", "--name", name],
                name,
                stdin=url + "\n",
                logs=folder / name,
                COCKTAIL_HOME=str(folder / f"home-{name}"),
                **home,
            )
            for name in PEERS
        }

    def pids(self, who: str) -> list[int]:
        """Return the process of a member; `ip netns exec` has replaced itself by its command."""
        return [self.hub.pid if who == HUB else self.peers[who].pid]

    @property
    def round(self) -> int:
        steps = self.hub.heard("step")
        return steps[-1]["round"] if steps else -1

    def longest(self, since: int) -> float:
        """Return the longest round after this one, as a multiple of those before it."""
        took = {step["round"]: step["step_s"] for step in self.hub.heard("step")}
        before = median(took[number] for number in took if since - WELL < number <= since)
        return max([took[number] for number in took if number > since], default=0.0) / max(before, 1e-3)

    def named(self) -> list[Line]:
        return self.hub.heard("culprit")

    def until(self, there: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self.hub.changed:
            while not there() and not self.hub.ended and time.monotonic() < deadline:
                self.hub.changed.wait(0.2)
        return there()

    def rounds(self, count: int, seconds: float) -> bool:
        to = self.round + count
        return self.until(lambda: self.round >= to, seconds)

    def crowd(self, count: int, core: int | None) -> None:
        """Start busy processes, on this core or on any."""
        on = [] if core is None else ["taskset", "-c", str(core)]
        alone = [*on, sys.executable, "-c", BUSY]  # each in a session: the kernel shares cores by session
        self.busy += [subprocess.Popen(alone, start_new_session=True) for _ in range(count)]

    def leave(self) -> None:
        for process in self.busy:
            process.kill()
            process.wait()
        self.busy.clear()

    def close(self) -> None:
        self.leave()
        for process in [*self.peers.values(), self.hub]:
            process.signal(signal.SIGCONT)
            process.kill()
        if self.memory:
            self.memory.close()


# ---- faults ------------------------------------------------------------------------------------------------


def line(member: str, up: float = MBIT, down: float = MBIT, loss: float = 0.0) -> None:
    netlab.change(member, up=up, down=down, rtt=RTT, loss=loss)


def mended(swarm: Swarm, who: str) -> None:
    line(who)


def signalled(number: int) -> Callable[[Swarm, str], None]:
    return lambda swarm, who: [os.kill(pid, number) for pid in swarm.pids(who)] and None


def stopped(swarm: Swarm, who: str) -> None:
    signalled(signal.SIGSTOP)(swarm, who)
    time.sleep(STOPS)
    signalled(signal.SIGCONT)(swarm, who)


def set_nice(swarm: Swarm, who: str, value: int) -> None:
    """Set the nice value of a member's threads, and of its session where the kernel groups by session."""
    (pid,) = swarm.pids(who)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(value))
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), value)


def reniced(swarm: Swarm, who: str) -> None:
    swarm.crowd(4, CORES[who])
    set_nice(swarm, who, 19)


def at_ease(swarm: Swarm, who: str) -> None:
    swarm.leave()
    with suppress(PermissionError):  # a lower nice value needs a privilege of the machine's own
        set_nice(swarm, who, 0)


def grouped(controller: str, **limits: str) -> Callable[[Swarm, str], None]:
    """Put a member into a control group (version 1) with these limits."""

    def begin(swarm: Swarm, who: str) -> None:
        group = CGROUPS / controller / GROUP
        group.mkdir(exist_ok=True)
        for name, value in limits.items():
            (group / f"{controller}.{name}").write_text(value)
        (group / "cgroup.procs").write_text(str(swarm.pids(who)[0]))

    return begin


def ungrouped(controller: str) -> Callable[[Swarm, str], None]:
    def end(swarm: Swarm, who: str) -> None:
        (CGROUPS / controller / "cgroup.procs").write_text(str(swarm.pids(who)[0]))
        with suppress(OSError):
            (CGROUPS / controller / GROUP).rmdir()

    return end


def device_of(path: str) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def limited(swarm: Swarm, who: str) -> None:
    assert swarm.memory is not None
    swarm.memory.limit()


def unlimited(swarm: Swarm, who: str) -> None:
    assert swarm.memory is not None
    swarm.memory.unlimit()


def nothing(swarm: Swarm, who: str) -> None:
    """Leave it as it is."""


KINDS = {
    "up": Kind(lambda swarm, who: line(who, up=THIN), mended, ("upload",), ("silent", "download")),
    "down": Kind(lambda swarm, who: line(who, down=THIN), mended, ("download",), ("silent", "upload")),
    "loss": Kind(lambda swarm, who: line(who, loss=LOSS), mended, ("upload", "download"), ("silent",)),
    "stop": Kind(stopped, nothing, ("stopped",), ("silent",)),
    "nice": Kind(reniced, at_ease, ("other load",), ("silent",), to=ALONE),
    "core": Kind(
        grouped("cpu", cfs_quota_us="2000"),
        ungrouped("cpu"),
        ("other load", "compute"),
        ("silent",),
        needs=("cpu",),
    ),
    "disk": Kind(
        grouped("blkio", **{"throttle.write_iops_device": f"{device_of('/tmp')} 3"}),
        ungrouped("blkio"),
        ("disk",),
        to=HUB,
        needs=("blkio",),
    ),
    "memory": Kind(limited, unlimited, ("memory",), ("silent",), to=ALONE, needs=("memory", "unified")),
    "clock": Kind(signalled(signal.SIGUSR2), nothing, ("clock",)),
}


def missing(kind: str) -> str:
    """Return why a kind of fault cannot be done here; "": it can."""
    for folder in (CGROUPS / name for name in KINDS[kind].needs):
        if not os.access(folder, os.W_OK):
            return f"no control groups can be made in {folder}"
    return ""


def plan(only: Sequence[str]) -> list[tuple[str, str]]:
    """List at least 20 faults, each kind to more than one peer where it may be any."""
    kinds = [kind for kind in KINDS if (not only or kind in only) and not missing(kind)]
    many = max(20, 2 * len(kinds)) if not only else 3 * len(kinds)
    turns = [kinds[number % len(kinds)] for number in range(many)]
    return [
        (kind, KINDS[kind].to or PEERS[(number + number // len(kinds)) % 3])
        for number, kind in enumerate(turns)
    ]


# ---- in the lab --------------------------------------------------------------------------------------------


def injected(swarm: Swarm, kind: str, who: str) -> Line:
    """Do one fault; return what was named, and after how many rounds."""
    before, first, asked = len(swarm.named()), swarm.round, KINDS[kind]
    begun = time.monotonic()
    asked.begin(swarm, who)
    try:
        swarm.until(
            lambda: (
                any(one["cause"] in asked.right for one in swarm.named()[before:])
                or swarm.round >= first + ROUNDS
            ),
            LONGEST,
        )
    finally:
        asked.end(swarm, who)
    longest = swarm.longest(first)
    calm = swarm.rounds(WELL, 120.0)
    told = swarm.named()[before:]
    named = [(one["peer"], one["cause"]) for one in told]
    shared = {(peer, "disk") for peer in PEERS if kind == "disk"}  # theirs is the hub's, in this lab
    outside = {(who, cause) for cause in ("stopped", "silent")}  # withdrawn once the peer says what it was
    fits = {(who, cause) for cause in (*asked.right, *asked.also)} | shared | outside
    wrong = [one for one in named if one not in fits]
    right = [one for one in told if one["peer"] == who and one["cause"] in asked.right]
    return {
        "fault": kind,
        "to": who,
        "named": named,
        "right": bool(right) and right[0]["round"] <= first + WITHIN and not wrong,
        "seconds": round(right[0]["came"] - begun, 1) if right else None,
        "rounds": right[0]["round"] - first if right else None,
        "longest": round(longest, 1),
        "evidence": [one["evidence"] for one in told],
        "calm": calm,
    }


def inside(only: Sequence[str], quiet: int, batch: int) -> None:
    with tempfile.TemporaryDirectory(prefix="culprits-") as folder:
        swarm = Swarm(Path(folder), any(kind == "memory" for kind, _ in plan(only)), batch)
        try:
            swarm.hub.until("step", WELL + 10, 300.0)
            if quiet:
                swarm.rounds(quiet, 3600.0)
                said = [(one["round"], one["peer"], one["cause"], one["evidence"]) for one in swarm.named()]
                print(json.dumps({"quiet": swarm.round, "named": said}), flush=True)
                return
            steps = swarm.hub.heard("step")
            pace = (steps[-1]["came"] - steps[5]["came"]) / (len(steps) - 6)
            print(json.dumps({"before": len(swarm.named()), "round_s": round(pace, 2)}), flush=True)
            for kind, who in plan(only):
                print(json.dumps(injected(swarm, kind, who)), flush=True)
        finally:
            swarm.close()


def streamed(program: Sequence[str]) -> list[Line]:
    """Run python with these arguments in a lab of its own; print its rows as they come, and return them."""
    options = lab.options(len(PEERS), up=MBIT, down=MBIT, rtt=RTT)
    command = lab.rootless(options, [sys.executable, *program])
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for row in running.stdout:
            print(row, end="", flush=True)
            rows.append(json.loads(row))
    if running.returncode:
        raise SystemExit(running.returncode)
    return rows


def main() -> int:
    asked = lab.parser(__doc__)
    asked.add_argument("--only", default="", help="these kinds of faults, with commas between them")
    asked.add_argument("--quiet", type=int, default=0, metavar="ROUNDS", help="rounds without any fault")
    asked.add_argument("--batch", type=int, default=BATCH, metavar="SAMPLES", help="of a round")
    asked.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    only = [kind for kind in given.only.split(",") if kind]
    if unknown := set(only) - KINDS.keys():
        asked.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if given.inside:
        inside(only, given.quiet, given.batch)
        return 0
    for kind in only or KINDS:
        if why := missing(kind):
            print(f"{kind} is not done: {why}", file=sys.stderr)
    program = ["-m", "scripts.fault_injection.culprits", "--inside", "--only", given.only]
    lines = streamed([*program, "--quiet", str(given.quiet), "--batch", str(given.batch)])
    faults = [row for row in lines if "fault" in row]
    right = sum(row["right"] for row in faults)
    print(f"{right} of {len(faults)} right")
    if given.quiet:
        return int(any(row["named"] for row in lines))
    return int(right < RIGHT * len(faults))


if __name__ == "__main__":
    sys.exit(main())
