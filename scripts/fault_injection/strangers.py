"""Hostile members beside a real run: what each kind costs its rounds, and its hub's memory.

    scripts/start scripts.fault_injection.strangers    all kinds: 200 members from 30 addresses
    scripts/start scripts.fault_injection.strangers --kinds never-deliver,begin-updates --seconds 40

Two honest peers train all the time. The figures of each kind stand beside those of as many members that are
idle, in the same run. Exit status 1 where a kind breaks a promise: honest rounds keep 80 % of that pace, the
hub stays under 200 MB more, and lets go of it afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT
from scripts.swarms.processes import Process, status_bytes

from .hostile_members import KINDS

PROCESSES, ORIGINS = 4, 30
KEEPS, MORE = 0.8, 200 << 20  # of the pace beside idle members; bytes of the hub
AFTER_S = 35.0  # seconds until all is let go: malloc returns free pages every half minute
RECIPE = (
    "data.max_length=32",
    "training.global_batch_size=4",
    "training.max_steps=100000",
    "training.warmup_steps=0",
    "checkpoint.eval_steps=null",
    "checkpoint.save_steps=null",
)


@dataclass(frozen=True)
class Figures:
    """Figures of the hub over some seconds."""

    rounds: float  # a second
    memory: int  # bytes resident at the end
    most: int  # the most while it was watched


class Run:
    """A hub without peers of its own, and honest peers."""

    def __init__(self, folder: Path, repository: Path, peers: int) -> None:
        self.folder, self.repository = folder, repository
        self.children, self.crowds = list[Process](), 0  # crowds that have been here
        opened = ("--no-train", "--bind", "127.0.0.1", "--port", "0", "-o", str(folder / "out"), "--json")
        self.hub = self.start("hub", "launch", "smoke", *RECIPE, *opened)
        self.url = self.hub.until("run_started", timeout=180.0)["url"]
        for name in (f"honest-{number}" for number in range(peers)):
            self.start(name, "join", "-", "-y", "--name", name, "--json", said=self.url)

    def start(self, name: str, *arguments: str, said: str = "") -> Process:
        python = self.repository / ".venv/bin/python"
        command = [str(python if python.exists() else sys.executable), "-m", "cocktail_cli", *arguments]
        known = {"HF_HUB_OFFLINE": "1", "COCKTAIL_HOME": str(self.folder / f"home-{name}")}
        known["PYTHONPATH"] = str(self.repository)
        self.children.append(Process(command, stdin=f"{said}\n", logs=self.folder / name, **known))
        return self.children[-1]

    @property
    def rounds(self) -> int:
        return len(self.hub.heard("step"))

    @property
    def memory(self) -> int:
        return status_bytes("VmRSS", self.hub.pid)

    def watch(self, seconds: float) -> Figures:
        """Count rounds, and look at the hub's memory, for so long."""
        before, began, most = self.rounds, time.monotonic(), self.memory
        while time.monotonic() < began + seconds:
            time.sleep(0.25)
            if self.hub.ended:
                sys.exit(f"the hub has ended; the last it said: {self.hub.said[-1:]}")
            most = max(most, self.memory)
        return Figures((self.rounds - before) / (time.monotonic() - began), self.memory, most)

    def end(self) -> None:
        for child in reversed(self.children):
            child.kill()


@contextmanager
def attacked(run: Run, kind: str, members: int, seconds: float) -> Iterator[Counter[str]]:
    """While so many members of this kind are there; `did` is filled at the end."""
    did, at = Counter[str](), 300 + run.crowds  # each crowd has addresses of its own: the hub remembers
    run.crowds += 1
    attackers = []
    for number in range(PROCESSES):
        mine = [f"127.{at // 200}.{at % 200}.{n + 1}" for n in range(ORIGINS) if n % PROCESSES == number]
        asked = {"url": run.url, "members": members // PROCESSES, "seconds": seconds, "sources": mine}
        command = [sys.executable, "-m", f"{__package__}.hostile_members", kind]
        command.append(json.dumps(asked | {"events": str(run.folder / "hub.jsonl")}))
        attackers.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT))
    try:
        yield did
    finally:
        for attacker in attackers:
            try:
                said, _ = attacker.communicate(timeout=20)
                did.update(json.loads(said))
            except (subprocess.TimeoutExpired, ValueError):
                attacker.kill()
                attacker.wait()


def measured(run: Run, kind: str, members: int, seconds: float) -> tuple[Figures, Figures, Counter[str]]:
    """Measure while members of a kind are there, and after they have gone."""
    with attacked(run, kind, members, seconds) as did:
        time.sleep(4.0)  # they come
        during = run.watch(seconds - 5.0)
    if kind == "idle":
        return during, during, did
    time.sleep(AFTER_S)
    return during, run.watch(3.0), did


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(kind for kind in KINDS if kind != "idle"))
    parser.add_argument("--members", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--repository", type=Path, default=ROOT, help="another checkout, for comparison")
    given = parser.parse_args(arguments)
    broken = []
    with tempfile.TemporaryDirectory() as there:
        run = Run(Path(there), given.repository.resolve(), peers=2)
        try:
            run.hub.until("step", 40, 180.0)
            print(f"{'kind':20} {'rounds/s':>8} {'of idle':>8} {'MB more':>8} {'after':>6}  did", flush=True)
            alone = run.watch(8.0)
            print(f"{'alone':20} {alone.rounds:8.2f}", flush=True)
            for kind in given.kinds.split(","):
                idle, _, _ = measured(run, "idle", given.members, given.seconds)
                before = run.memory
                during, after, did = measured(run, kind, given.members, given.seconds)
                share, more = during.rounds / idle.rounds, during.most - before
                stays = after.memory - before
                bad = share < KEEPS or more > MORE or stays > MORE / 4 or not did["admitted"]
                broken += [kind] * bad
                known = ", ".join(f"{what} {many}" for what, many in sorted(did.items()))
                figures = f"{during.rounds:8.2f} {share:8.0%} {more / 1e6:8.0f} {stays / 1e6:6.0f}"
                print(f"{kind:20} {figures}  {known}{'   BROKEN' if bad else ''}", flush=True)
        finally:
            run.end()
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
