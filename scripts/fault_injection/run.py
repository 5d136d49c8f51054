"""One run from the launch to the end of its last process, with faults and without."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.fault_injection.faults import HUNG, PEER_TIMEOUT, Chaos, Record
from scripts.fault_injection.schedule import Fault
from scripts.swarms.commands import STARTS, Swarm
from scripts.swarms.forked import Forker

ENDS = 60.0  # seconds for the peers to end once the run is over
SHARE_OF_STEPS = 0.85  # then no new fault begins, where the minutes are what counts
LONGEST = 4.0, 15.0  # times the minutes, and minutes more, until a run that does not end is ended
SHARDS = 12  # where peers own them
ROWS = 4_000  # of the data; a hub that starts tokenizes some 2,500 a second
TELL = 15.0  # seconds between two words on how it goes


@dataclass(frozen=True)
class Workload:
    """A run of the smoke model that learns: many short steps."""

    peers: int
    steps: int
    seed: int
    batch: int = 48
    held_out: int = 200
    step_timeout: float = 30.0
    owners: bool = False  # the peers own the shards
    lent: int = 0  # of the peers, the first: machines that lend memory, and are peers together
    approve: bool = False  # newcomers wait for the host, who says yes
    replicated: bool = False  # a round is committed once the standby has it
    staleness: int = 1  # rounds in flight
    mbit: float = 0.0  # of all lines, in a network lab; 0: no lab
    forker: Forker | None = None  # starts the processes; None: each is a new python

    def command(self, data: Path) -> list[str]:
        """Build the arguments of `cocktail launch`, without a place."""
        return [
            *("launch", "smoke", "--data", str(data), f"max_steps={self.steps}", "warmup_steps=20"),
            *(f"global_batch_size={self.batch}", "data.max_length=64", "packing=false"),
            f"val_set_size={self.held_out}",
            *(f"eval_steps={max(25, self.steps // 8)}", f"training.seed={self.seed}", "learning_rate=3e-3"),
            *(f"swarm.step_timeout={self.step_timeout:g}", f"swarm.peer_timeout={PEER_TIMEOUT:g}"),
            "swarm.start_timeout=300",
            *(("stages={}",) if self.lent else ()),
            *(("durability=replicated",) if self.replicated else ()),
            *(("swarm.join=approve",) if self.approve else ()),
            *((f"compression.staleness={self.staleness}",) if self.staleness != 1 else ()),
            *(("owners=peers", f"compression.shards={SHARDS}") if self.owners else ()),
        ]

    def swarm(self, folder: Path, work: Path, peers: Sequence[str]) -> Swarm:
        command = self.command(work / "rows.jsonl")
        how = {"owners": self.owners, "mbit": self.mbit, "forker": self.forker}
        how |= {"lent": peers[: self.lent]}
        return Swarm(folder, command, peers[: self.peers], **how)  # type: ignore[arg-type]

    @property
    def longest_round(self) -> float:
        """Return the seconds that a round may take: a hub that was started again waits for its peers,
        whatever the cap."""
        return max(self.step_timeout, PEER_TIMEOUT)

    @property
    def key(self) -> str:
        what = " ".join(
            [
                *self.command(Path("data")),
                f"{self.peers}, {self.lent}",
                *([f"{self.mbit:g}"] if self.mbit else []),
            ]
        )
        return hashlib.sha256(what.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Reference:
    """The outcome of the run without faults."""

    loss: float
    step_s: float
    steps: int


class Ended(Exception):
    """The run cannot go on; the message says why."""


def say(text: str) -> None:
    print(text, flush=True)


def fresh(work: Path, name: str) -> Path:
    """Name a folder that is not there yet."""
    return next(p for n in range(1, 10_000) if not (p := work / f"{name}-{n}").exists())


def write_data(path: Path, rows: int = ROWS) -> None:
    """Write made-up words, each with a few likely successors: much to learn, nothing to know by heart."""
    random = Random(7)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(random.choice(syllables) for _ in range(random.randint(1, 3))) for _ in range(400)]
    after = {word: random.choices(words, k=6) for word in words}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            word, text = random.choice(words), []
            for _ in range(16):
                text.append(word)
                word = random.choices(after[word], weights=(32, 16, 8, 4, 2, 1))[0]
            file.write(json.dumps({"text": " ".join(text)}) + "\n")


def reference_of(workload: Workload, work: Path, peers: Sequence[str]) -> Reference:
    """Find the run without faults by the hash of its recipe, or make it now."""
    known = work / f"reference-{workload.key}.json"
    if not known.is_file():
        say(f"the run without faults: {workload.steps} steps, {workload.peers} peers")
        swarm = workload.swarm(fresh(work, f"reference-{workload.key}"), work, peers)
        try:
            play(swarm, [], float("inf"))
            end, steps = swarm.finished, swarm.steps()
        finally:
            swarm.end()
        assert end is not None
        step_s = round((steps[-1].at - steps[0].at) / (len(steps) - 1), 4)
        known.write_text(json.dumps({"loss": end["eval_loss"], "step_s": step_s, "steps": len(steps)}))
    found = Reference(**json.loads(known.read_text()))
    said = f"{workload.steps} steps, held-out loss {found.loss:.4f}, {found.step_s:.3f} s a step"
    say(f"without faults: {said}")
    return found


def play(swarm: Swarm, faults: Sequence[Fault], minutes: float) -> Chaos:
    """Play one run with these faults. `minutes`: how long new faults begin; infinite: to the very end.

    Raises:
        Ended: it could not go on.
    """
    chaos = Chaos(swarm, faults, swarm.folder / "faults.ndjson")
    try:
        begin(swarm)
        chaos.start()
        watch(swarm, chaos, minutes)
        chaos.ending.set()
        swarm.wait_for(lambda: chaos.idle, 2 * STARTS)
        until = time.monotonic() + ENDS
        others = [child for child in swarm.children if child is not swarm.relay]
        swarm.wait_for(lambda: not any(c.alive for c in others), until - time.monotonic())
        if swarm.relay is not None:
            swarm.relay.stop(signal.SIGTERM)
    finally:
        chaos.ending.set()
        chaos.close()
    return chaos


def begin(swarm: Swarm) -> None:
    """Start the hub and the peers, and wait for a round in which all of them work."""
    relay = swarm.start_relay()
    if not relay.alive:
        raise Ended(f"the relay did not start: {relay.last_words()}")
    hub = swarm.start_hub()
    if not swarm.wait_for(lambda: swarm.hub_up.is_set() or not hub.alive, STARTS) or not hub.alive:
        raise Ended(f"the hub did not start: {hub.last_words()}")
    if "durability=replicated" in swarm.launch:
        swarm.start_standby()
    for name in swarm.links:
        swarm.peers[name] = swarm.join(name)

    def all_work() -> bool:
        together = any(swarm.all_work(told.event) for told in swarm.steps())
        return together or swarm.finished is not None  # a run so short that it did not wait for them

    if not swarm.wait_for(all_work, STARTS):
        words = [peer.last_words() for peer in swarm.peers.values()]
        raise Ended("not all peers came to work: " + "; ".join(words))


def watch(swarm: Swarm, chaos: Chaos, minutes: float) -> None:
    """Watch until the run is over: note memory, tell how it goes, see that it goes on at all."""
    started = moved = time.monotonic()
    said, seen, told = 0.0, 0, 0
    dead: set[int] = set()
    while not swarm.finished:
        swarm.over.wait(0.5)
        swarm.look()
        now, steps = time.monotonic(), swarm.steps()
        if len(steps) != seen or not swarm.hub_up.is_set():
            moved, seen = now, len(steps)
        if now - moved > HUNG:
            swarm.backtraces()
            where = f"where the threads of all were is in {swarm.folder}/logs/*.err"
            raise Ended(f"no round was committed for {HUNG:.0f} s though the hub was up; {where}")
        if now - started > 60 * (LONGEST[0] * minutes + LONGEST[1]):
            raise Ended(f"it was not over after {now - started:.0f} s: {len(steps)} rounds")
        step = steps[-1].event if steps else {"step": 0, "steps": 1}
        if now - started > 60 * minutes or (minutes < 1e9 and step["step"] > SHARE_OF_STEPS * step["steps"]):
            chaos.ending.set()
        look_for_deaths(swarm, chaos, dead)
        for record in chaos.records[told:]:
            told += 1
            say(line_of(record))
        if now - said > TELL and steps:
            said = now
            loss = "" if step["loss"] is None else f", loss {step['loss']:.3f}"
            at = f"step {step['step']}/{step['steps']}, round {step['round']}"
            say(f"{'':11}{at}{loss}, {step['peers']} peers")
    for record in chaos.records[told:]:
        say(line_of(record))


def look_for_deaths(swarm: Swarm, chaos: Chaos, dead: set[int]) -> None:
    """Note a peer that was not harmed and has ended, and start it again. Errors: Ended for a hub."""
    hub = swarm.hub
    if hub is not None and not hub.alive and hub.expects == {0} and "hub" not in chaos.busy:
        swarm.wait_for(lambda: swarm.finished, 2.0)  # its last words may still be read
        if not swarm.finished:
            raise Ended(f"the hub ended by itself with exit {hub.exit}: {hub.last_words()}")
    for name, child in list(swarm.peers.items()):
        over = child.saw_the_end or (name in swarm.lent and child.exit == 0)  # which says so by that alone
        if child.alive or name in chaos.busy or id(child) in dead or over or swarm.finished:
            continue
        dead.add(id(child))
        chaos.write("died", None, peer=name, exit=child.exit, said=child.last_words())
        say(f"{'':11}{name} ended by itself with exit {child.exit}: {child.last_words()}")
        swarm.peers[name] = swarm.join(name)


def line_of(record: Record) -> str:
    fault = record.fault
    commit = f"commit {record.commit_s:.1f} s" if record.commit_s is not None else ""
    back = f"back {record.back_s:.1f} s" if record.back_s is not None else ""
    problem = f"  NOT SO: {record.problem}" if record.problem else ""
    what = f"{fault.at:7.1f} s  {fault.kind:<14} {fault.target:<6} {fault.lasts:5.1f} s"
    return f"{what}  {commit:<14} {back:<12} {record.said.strip()}{problem}"
