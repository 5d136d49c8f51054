"""Starts one of the rivals, or cocktail, in a network lab: a process for each peer, and phases told to all.

Runs inside `netlab.py rootless ... -- python SCRIPT` (line_lab.inside).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import line_lab as lab
import rivals_work as work
from netlab import NET, number_of

HERE = Path(__file__).resolve().parent
Line = dict[str, Any]


@dataclass(frozen=True)
class System:
    """One way to train together."""

    script: str  # of its peers; cocktail has its own
    kind: str
    sends: float = 0.0  # bytes a parameter that a peer sends in a step, about; 0: so few that P may be large

    @property
    def python(self) -> str:
        """hivemind's is the one of its environment (scripts/rivals)."""
        if self.script != "rivals_hivemind.py":
            return sys.executable
        if not (chosen := os.environ.get("COCKTAIL_RIVALS_PYTHON")):
            raise SystemExit("hivemind has an environment of its own: start this by scripts/rivals")
        return chosen


RING = 2 * (work.PEERS - 1) / work.PEERS  # of the vector that each sends and receives when four average it
SYSTEMS = {
    "cocktail": System("cocktail", ""),
    "cocktail, the hub on such a line": System("cocktail", "hub"),
    "torch DDP FP32": System("rivals_gloo.py", "fp32", 4 * RING),
    "torch DDP FP16": System("rivals_gloo.py", "fp16", 2 * RING),
    "torch DDP PowerSGD": System("rivals_gloo.py", "powersgd"),
    "DiLoCo FP16": System("rivals_gloo.py", "diloco", 2 * RING),
    "hivemind FP16": System("rivals_hivemind.py", "fp16", 2 * RING),
    "hivemind 8-bit": System("rivals_hivemind.py", "8bit", 1 * RING),
}


def address(member: str) -> str:
    return f"{NET}{number_of(member)}"


class Ranks:
    """The peers of a rival."""

    def __init__(self, system: System, members: Sequence[str], asked: Line) -> None:
        self.system, self.asked, self.ranks = system, asked, list[lab.Member]()
        self.world = len(members)
        for member in members:
            self.start(member)
            if system.script == "rivals_hivemind.py":  # the others find each other by the first
                self.ranks[-1].until("ready", timeout=120)
        for rank in self.ranks:
            rank.until("ready", timeout=120)

    def start(self, member: str) -> lab.Member:
        rank = len(self.ranks)
        world = max(self.world, rank + 1)
        asked = {"rank": rank, "world": world, "own": address(member), "peers": [], **self.asked}
        asked["address"] = address(self.ranks[0].member if self.ranks else member)
        if rank and self.system.script == "rivals_hivemind.py":
            asked["peers"] = self.ranks[0].until("ready")["maddrs"]
        started = lab.Member(member, self.system.kind, asked, HERE / self.system.script, self.system.python)
        self.ranks.append(started)
        return started

    def tell(self, **phase: Any) -> None:
        for rank in self.ranks:
            rank.tell(**phase)

    def phase(self, number: int, timeout: float, **phase: Any) -> None:
        """Until all have done it; it is the `number`-th."""
        self.tell(**phase)
        for rank in self.ranks:
            lab.wait_for(
                lambda rank=rank: len(rank.heard("over")) >= number or rank.ended,
                f"{rank.member}: the end of {phase}",
                timeout,
            )
            if rank.ended:
                raise SystemExit(f"{rank.member} ended: {rank.heard('failed')[-1:]}")


@contextmanager
def ranks(system: System, members: Sequence[str], **asked: Any) -> Iterator[Ranks]:
    made = Ranks(system, members, asked)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.kill()


# ---- cocktail ----------------------------------------------------------------------------------------------


class Cocktail:
    """`cocktail launch` at the hub, `cocktail join` at the peers, by bench_slot.py: a sample takes time."""

    SAMPLES = work.PEERS * work.BATCH

    def __init__(self, folder: Path, width: int, seconds: float | None = None) -> None:
        self.folder, self.width, self.members = folder, width, list[lab.Member]()
        self.sample_s = (work.compute_s(width) if seconds is None else seconds) / work.BATCH

    def start(self, rounds: int, together: int) -> None:
        os.environ.update({"COCKTAIL_HOME": f"{self.folder}/home", "HF_HUB_OFFLINE": "1"})
        work.save_model(self.width, self.folder / "model")
        recipe = [f"model.model_name_or_path={self.folder}/model", f"max_length={work.LENGTH}"]
        recipe += [f"global_batch_size={self.SAMPLES}", f"max_steps={rounds}", "val_set_size=64"]
        recipe += ["checkpoint.eval_steps=null", "checkpoint.save_steps=null", "learning_rate=1e-4"]
        recipe += [f"swarm.min_peers={together}"]
        place = ["--no-train", "--advertise", "10.77.0.1", "--json", "-o", f"{self.folder}/out"]
        self.hub = self._start("hub", ["launch", "smoke", *recipe, *place])
        self.url = self.told(self.hub, "run_started")["url"]
        self.peers = [self.join(f"p{i}") for i in range(1, work.PEERS + 1)]

    def _start(self, member: str, args: list[str], **asked: Any) -> lab.Member:
        started = lab.Member(member, "cocktail", {"args": args, **asked}, HERE / "bench_slot.py")
        self.members.append(started)
        return started

    def join(self, member: str, name: str = "") -> lab.Member:
        args = ["join", self.url, "--name", name or member, "--device", "cpu", "-y", "--json"]
        return self._start(member, args, sample_s=self.sample_s)

    def told(self, member: lab.Member, event: str, timeout: float = 120.0) -> Line:
        def there() -> list[Line]:
            return [line for line in list(member.said) if line.get("event") == event or "error" in line]

        lab.wait_for(there, f"{member.member}: {event}", timeout)
        if "error" in (found := there()[0]):
            raise SystemExit(f"{member.member}: {found['error']}")
        return found

    def rounds(self, member: lab.Member) -> list[Line]:
        return [line for line in list(member.said) if line.get("event") == "joined_round"]

    def until_round(self, round: int, timeout: float) -> None:
        def there() -> bool:
            return all(rows and rows[-1]["round"] >= round for rows in map(self.rounds, self.peers))

        try:
            lab.wait_for(there, f"round {round}", timeout)
        except SystemExit:
            for member in self.members:
                print(member.member, member.said[-3:], file=sys.stderr)
            raise


@contextmanager
def cocktail(
    folder: Path, width: int, rounds: int, seconds: float | None = None, together: int = work.PEERS
) -> Iterator[Cocktail]:
    """It trains while there are `together` peers and more."""
    run = Cocktail(folder, width, seconds)
    try:
        run.start(rounds, together)
        yield run
    finally:
        for member in run.members:
            member.kill()
