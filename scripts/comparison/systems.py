"""Start a rival, or cocktail, in a network lab: a process for each peer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.comparison import work
from scripts.netlab.lab import NET, number_of
from scripts.swarms.processes import Line, Process, program, wait_for

COCKTAIL, GLOO, HIVEMIND, TORCHFT = (
    f"scripts.comparison.{name}" for name in ("paced", "gloo_peer", "hivemind_peer", "torchft_peer")
)
LIGHTHOUSE = 29510  # the port that torchft's has by default
# runs a command where the host name is its first argument, and others can reach it by that
NAMED = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"']


@dataclass(frozen=True)
class System:
    """One way to train together."""

    module: str  # of its peers
    kind: str
    averages: float = 0.0  # bytes a parameter of what peers average in a step; 0: so few that P may be large
    keys: tuple[str, ...] = ()  # of cocktail's recipe
    peers: int = work.PEERS
    slower: float = 1.0  # compute and lines, where two cores do not carry so many peers; below 1: faster
    width: int = work.WIDTHS[0]  # of the model, of cocktail

    @property
    def mbit(self) -> float:
        """The ratio of a line's rate here to the one it stands for."""
        return work.MBIT / self.slower

    def compute_s(self, width: int) -> float:
        """Return the seconds of a step of a model of this width."""
        return self.slower * work.compute_s(width)

    @property
    def python(self) -> str:
        """The interpreter: hivemind and torchft have environments of their own (scripts/rivals)."""
        if self.module not in (HIVEMIND, TORCHFT):
            return sys.executable
        name = "hivemind" if self.module == HIVEMIND else "torchft"
        if not (folder := os.environ.get("COCKTAIL_RIVALS")):
            raise SystemExit(f"{name} has an environment of its own: start this by scripts/rivals")
        return str(Path(folder, name, "bin", "python"))

    @property
    def sends(self) -> float:
        """The bytes a parameter that each peer sends in a step, about: by a ring."""
        return self.averages * 2 * (work.PEERS - 1) / work.PEERS


THIN = "compression.preset=cocktail-thin"
SHARDS = "compression.shards=8"
WIDE = 2048  # a packet of 20 Mbit/s is eight fragments, not two; at its real size it has fifty
AGGREGATING = ("owners=peers", SHARDS)
SYSTEMS = {
    "cocktail": System(COCKTAIL, ""),
    "cocktail, the hub on such a line": System(COCKTAIL, "hub"),
    "cocktail, the hub on such a line, peers aggregate": System(COCKTAIL, "hub", keys=AGGREGATING),
    "cocktail, 8 peers": System(COCKTAIL, "", peers=8, slower=2),
    "cocktail, 8 peers, the hub on such a line": System(COCKTAIL, "hub", peers=8, slower=2),
    "cocktail, 16 peers": System(COCKTAIL, "", peers=16, slower=3),
    "cocktail-thin": System(COCKTAIL, "", keys=(THIN,), slower=0.5, width=WIDE),
    "torch DDP FP32": System(GLOO, "fp32", 4),
    "torch DDP FP16": System(GLOO, "fp16", 2),
    "torch DDP PowerSGD": System(GLOO, "powersgd"),
    "DiLoCo FP16": System(GLOO, "diloco", 2),
    "torchft DDP FP32": System(TORCHFT, "ddp", 4),
    "torchft DiLoCo FP32": System(TORCHFT, "diloco", 4),
    "hivemind FP16": System(HIVEMIND, "fp16", 2),
    "hivemind 8-bit": System(HIVEMIND, "8bit", 1),
}


def address(member: str) -> str:
    return f"{NET}{number_of(member)}"


class Ranks:
    """The peers of a rival."""

    def __init__(self, system: System, members: Sequence[str], asked: Line) -> None:
        self.system, self.asked, self.ranks = system, asked, list[Process]()
        self.world = len(members)
        self.lighthouse: Process | None = None
        if system.module == TORCHFT:
            self.start_lighthouse()
        for member in members:
            self.start(member)
            if system.module == HIVEMIND:  # the others find each other by the first
                self.ranks[-1].until("ready")
        for rank in self.ranks:
            rank.until("ready")

    def start_lighthouse(self) -> None:
        """Start torchft's own, on a line without a limit; a step needs `least` peers, all unless told."""
        self.asked = {"least": self.world, "lighthouse": f"http://{address('hub')}:{LIGHTHOUSE}"} | self.asked
        command = Path(self.system.python).with_name("torchft_lighthouse")
        asked = ["--join_timeout_ms", "10000", "--min_replicas", str(self.asked["least"])]
        self.lighthouse = Process([str(command), *asked], "hub")

    def start(self, member: str) -> Process:
        rank, first = len(self.ranks), self.ranks[0] if self.ranks else None
        asked = {"rank": rank, "world": max(self.world, rank + 1), "own": address(member), "peers": []}
        asked |= self.asked
        asked["address"] = address(first.member if first else member)
        if first and self.system.module == HIVEMIND:
            asked["peers"] = first.until("ready")["maddrs"]
        command = program(self.system.module, self.system.kind, asked, self.system.python)
        if self.system.module == TORCHFT:
            command = [*NAMED, asked["own"], *command]
        self.ranks.append(Process(command, member))
        return self.ranks[-1]

    def tell(self, **phase: Any) -> None:
        for rank in self.ranks:
            rank.tell(**phase)

    def phase(self, number: int, timeout: float, **phase: Any) -> None:
        """Wait until all have done this phase, which is the `number`-th."""
        self.tell(**phase)
        for rank in self.ranks:
            rank.until("over", number, timeout)


@contextmanager
def ranks(system: System, members: Sequence[str], **asked: Any) -> Iterator[Ranks]:
    made = Ranks(system, members, asked)
    try:
        yield made
    finally:
        for process in (*made.ranks, *([made.lighthouse] if made.lighthouse else [])):
            process.kill()


class Cocktail:
    """`cocktail launch` at the hub and `cocktail join` at the peers, where a sample takes a given time."""

    def __init__(
        self, folder: Path, width: int, seconds: float, keys: Sequence[str] = (), count: int = work.PEERS
    ) -> None:
        self.folder, self.width, self.keys, self.count = folder, width, keys, count
        self.members = list[Process]()
        self.sample_s = seconds / work.BATCH

    def start(self, rounds: int, together: int) -> None:
        work.save_model(self.width, self.folder / "model")
        recipe = [f"model.model_name_or_path={self.folder}/model", f"max_length={work.LENGTH}"]
        recipe += [f"global_batch_size={self.count * work.BATCH}", f"max_steps={rounds}", "val_set_size=64"]
        recipe += ["checkpoint.eval_steps=null", "checkpoint.save_steps=null", "learning_rate=1e-4"]
        recipe += [f"swarm.min_peers={together}", *self.keys]
        place = ["--no-train", "--advertise", "10.77.0.1", "--json", "-o", f"{self.folder}/out"]
        self.hub = self._start("hub", args=["launch", "smoke", *recipe, *place])
        self.url = self.hub.until("run_started")["url"]
        self.peers = [self.join(f"p{i}") for i in range(1, self.count + 1)]

    def _start(self, member: str, **asked: Any) -> Process:
        # with keys of their own: who has the hub's is on its machine, and passes nothing on
        home = {"COCKTAIL_HOME": f"{self.folder}/{member}", "HF_HUB_OFFLINE": "1"}
        self.members.append(Process(program(COCKTAIL, "cocktail", asked), member, **home))
        return self.members[-1]

    def join(self, member: str) -> Process:
        args = ["join", self.url, "--name", member, "--device", "cpu", "-y", "--json", "--wait", "10m"]
        args += ["--listen", f"{address(member)}:29401"] if SHARDS in self.keys else []
        return self._start(member, args=args, sample_s=self.sample_s)

    def have(self, count: int) -> None:
        """Kill the last peers, or let more join, until there are so many."""
        for peer in self.peers[count:]:
            peer.kill()
        del self.peers[count:]
        self.peers += [self.join(f"p{i}") for i in range(len(self.peers) + 1, count + 1)]

    def until_round(self, round: int, timeout: float) -> None:
        """Wait until all peers have been in this round."""

        def there() -> bool:
            if gone := [peer.member for peer in self.peers if peer.ended]:
                raise SystemExit(f"ended before round {round}: {', '.join(gone)}")
            return all(rows and rows[-1]["round"] >= round for rows in (p.heard("round") for p in self.peers))

        try:
            wait_for(there, f"round {round}", timeout)
        except SystemExit:
            for member in self.members:
                print(member.member, member.said[-3:], file=sys.stderr)
            raise


@contextmanager
def cocktail(run: Cocktail, rounds: int, together: int | None = None) -> Iterator[Cocktail]:
    """Run cocktail; it trains while there are `together` peers and more, by default all."""
    try:
        run.start(rounds, together or run.count)
        yield run
    finally:
        for member in run.members:
            member.kill()
