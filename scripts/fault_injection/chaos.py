"""A real run, hub and peers as processes, under random faults; at the end every promise is checked.

    scripts/chaos --minutes 30 --seed 1
    scripts/chaos --only hub-kill --times 100 --seed 1
    scripts/chaos --only hub-lost --times 100 --seed 1 --replicated
    scripts/chaos --owners --minutes 5 --seed 1
    scripts/chaos --stages --minutes 5 --seed 1
    scripts/chaos --soak outputs/soak.jsonl --faults 10000 --minutes 10
    scripts/chaos --soak FILE --faults 100 --only hub-lost --minutes 5 --every 2 --steps 450 --no-reference
    scripts/chaos --histories 200000 --seed 1

The faults follow from the seed and are in faults.ndjson of the run's folder, as planned and as they happened.
The same run without faults is made first and kept by the hash of its recipe: the held-out loss of the run
under faults is compared with its own. Exit 0 only if every promise was kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.fault_injection.checks import Check, checks, hub_back_soon, hub_lost, save_told
from scripts.fault_injection.faults import Record, possible
from scripts.fault_injection.histories import play_histories
from scripts.fault_injection.run import Ended, Reference, Workload, fresh, play, reference_of, say, write_data
from scripts.fault_injection.schedule import KINDS, Fault, hub_kills, schedule
from scripts.fault_injection.soak import ASYNCHRONOUS, REPLICATED, WAYS, Row, soak
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.commands import HUB
from scripts.swarms.forked import Forker
from scripts.swarms.lab import parser

PEERS = ["ann", "bob", "cyd", "dan", "eve", "fay", "gus", "hal", "ida", "jon", "kim", "lea", "max", "ned"]
MODULE = "scripts.fault_injection.chaos"
FIRST = 60  # steps of the run that measures how long a step takes
SLOWER = 0.6  # a run under faults makes so many of the steps that one without makes in the same time
AT_ONCE = 25  # kills of the hub in one run, where only these are asked for
ALONE = ("hub-lost", "twice", "memory", "disk")  # kinds of runs in which nobody lends memory
AGGREGATING = 5  # peers of a soak that aggregate: each has a line to each of them
LIFE = 3.0  # seconds of training between two of them


@dataclass
class Outcome:
    """The outcome of one run under faults."""

    folder: Path
    records: list[Record] = field(default_factory=list)
    found: list[Check] = field(default_factory=list)
    problem: str = ""
    peak_mb: dict[str, int] = field(default_factory=dict)  # of the processes of each name

    @property
    def kept(self) -> bool:
        return not self.problem and all(check.kept for check in self.found)

    def lines(self) -> list[str]:
        """Format it for a person."""
        said = [f"{'ok    ' if c.kept else 'NOT SO'} {c.promise}: {c.figure}" for c in self.found]
        if self.problem:
            said.append(f"NOT SO the run came to its end: {self.problem}")
        if not self.kept:
            said.append(f"faults, events and what every process said: {self.folder}")
        return said


def under_faults(
    name: str,
    workload: Workload,
    faults: Sequence[Fault],
    reference: Reference | None,
    minutes: float,
    work: Path,
) -> Outcome:
    """Make one run with these faults, and check every promise."""
    out = Outcome(fresh(work, name))
    say(f"the run under faults: {out.folder}; planned and done: faults.ndjson there")
    swarm = workload.swarm(out.folder, work, PEERS)
    try:
        try:
            out.records = play(swarm, faults, minutes).records
        except Ended as ended:
            out.problem = str(ended)
        save_told(swarm, out.folder / "told.ndjson")
        if not out.problem:
            out.found = list(checks(swarm, out.records, reference and reference.loss, workload.longest_round))
    finally:
        swarm.end()
    for child in swarm.children:
        most = max((look.rss for look in child.memory), default=0)
        out.peak_mb[child.name] = max(out.peak_mb.get(child.name, 0), round(most / 1e6))
    return out


def planned(given: argparse.Namespace, work: Path, fill_s: float) -> tuple[Workload, Reference | None]:
    """Plan a run that fills so many seconds of training, and find its reference."""

    def workload(steps: int) -> Workload:
        how = {"owners": given.owners, "replicated": given.replicated, "mbit": given.mbit}
        how |= {
            "lent": given.peers - 1 if given.stages else 0,
            "approve": given.approve,
            "batch": given.batch,
            "step_timeout": given.cap,
            "forker": given.forker,
            "staleness": given.staleness,
        }
        return Workload(given.peers, steps, seed=1, **how)

    steps = given.steps
    if not steps:
        steps = max(50, round(fill_s / reference_of(workload(FIRST), work, PEERS).step_s / 50) * 50)
    return workload(steps), None if given.no_reference else reference_of(workload(steps), work, PEERS)


def mixed(given: argparse.Namespace, work: Path) -> tuple[Outcome, Workload]:
    """Do faults of all kinds for so many minutes."""
    kinds = [kind for kind in possible(given.mbit > 0) if not given.only or kind in given.only.split(",")]
    if given.owners:  # a run whose peers aggregate has no standby
        kinds = [kind for kind in kinds if kind != "hub-lost"]
    if given.stages:
        kinds = [kind for kind in kinds if kind not in ALONE]
    workload, reference = planned(given, work, given.minutes * 60 * SLOWER)
    faults = list(schedule(given.seed, 60 * given.minutes, PEERS[: given.peers], given.every, kinds))
    size = f"{given.minutes:g} minutes, {workload.steps} steps, {given.peers} peers"
    say(f"{len(faults)} faults planned in {size}")
    out = under_faults(f"seed-{given.seed}", workload, faults, reference, given.minutes, work)
    say("\n".join(out.lines()))
    say(f"{'ok' if out.kept else 'failed'}: {len(out.records)} faults, seed {given.seed}")
    return out, workload


def part(given: argparse.Namespace, work: Path, number: int, way: Row) -> Row:
    """Do one part of a soak, and delete its folder where all promises were kept."""
    began = time.monotonic()
    way["peers"] = min(given.peers, AGGREGATING) if way["owners"] else given.peers
    out, workload = mixed(argparse.Namespace(**vars(given) | way | {"seed": given.seed + number - 1}), work)
    took = time.monotonic() - began
    broken = [f"{c.promise}: {c.figure}" for c in out.found if not c.kept]
    broken += [f"it came to its end: {out.problem}"] if out.problem else []
    if out.kept:
        shutil.rmtree(out.folder)
    gaps = [record.gap_s for record in out.records if record.gap_s is not None]
    return {
        "part": number,
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[2], 1),  # of this machine, in the last quarter of an hour
        **way,
        "seconds": round(took),
        "faults": Counter(record.fault.kind for record in out.records),
        "samples": workload.steps * workload.batch if out.kept else 0,
        "lost": sum(record.lost for record in out.records),
        "gaps_s": gaps,
        "peak_mb": out.peak_mb,
        "broken": [said.replace(f"{work}/", "") for said in broken],
    }


def hub_killed(given: argparse.Namespace, work: Path) -> int:
    """Do kill -9 of the hub so many times, in runs that are killed to their very end."""
    workload, reference = planned(given, work, AT_ONCE * LIFE)
    records, kept = list[Record](), True
    while len(records) < given.times and kept:
        left = given.times - len(records)
        faults = list(hub_kills(given.seed + len(records), left, given.only))
        out = under_faults(f"{given.only}-{given.seed}", workload, faults, reference, float("inf"), work)
        say("\n".join(out.lines()))
        kept = out.kept
        records += [one for one in out.records if one.back_s is not None or one.gap_s is not None]
        say(f"{len(records)} of {given.times} kills\n")
        if not out.records:
            break
    for check in (hub_back_soon(records), *hub_lost(records)):
        say(f"{check.promise}: {check.figure}")
    say(f"{'ok' if kept else 'failed'}: {len(records)} kills of the {HUB}, seed {given.seed}")
    return 0 if kept else 1


def in_lab(mbit: float, peers: int) -> float:
    """Go on in a network lab, as a member of its own; return the rate of its lines, 0 where there is none."""
    if not mbit or os.environ.get("NETLAB") == "lab":
        return mbit
    if reason := netlab.why_not():
        say(f"links on the loopback instead of lines: no network lab here: {reason}")
        return 0.0
    lines = lab.options(peers + 3, up=mbit, down=mbit, rtt=lab.RTT, **{"hub-up": mbit, "hub-down": mbit})
    lines += [word for more in (1, 3) for word in ("--peer", f"p{peers + more}:up=0,down=0,rtt=0")]
    again = ["ip", "netns", "exec", f"lab-p{peers + 3}", sys.executable, "-m", MODULE, *sys.argv[1:]]
    command = lab.rootless(lines, again)
    return os.execv(command[0], command)


def main() -> int:
    words = "\n".join(f"  {name:<15} {kind.words}" for name, kind in KINDS.items())
    asked = parser(__doc__)
    asked.epilog = f"faults:\n{words}"
    asked.add_argument("--minutes", type=float, default=5.0, help="of the run under faults, about")
    asked.add_argument("--seed", type=int, default=1, help="the faults follow from it")
    asked.add_argument("--histories", type=int, default=0, help="play so many generated histories instead")
    asked.add_argument("--only", default="", help="these kinds of faults only, with commas between them")
    asked.add_argument("--times", type=int, default=0, help="with --only hub-kill or hub-lost: so many")
    asked.add_argument("--peers", type=int, default=4, choices=range(1, len(PEERS) + 1), metavar="N")
    asked.add_argument("--owners", action="store_true", help="the peers own the shards of the vector")
    asked.add_argument("--stages", action="store_true", help="all but the last lend memory for some layers")
    asked.add_argument("--staleness", type=int, default=1, choices=range(5), help="rounds in flight")
    asked.add_argument("--replicated", action="store_true", help="a round is committed once a standby has it")
    asked.add_argument("--approve", action="store_true", help="every newcomer waits for its host's yes")
    asked.add_argument("--mbit", type=float, default=20.0, help="of each line in a lab; 0: no lab")
    asked.add_argument("--soak", type=Path, help="parts of MINUTES each until this file has FAULTS of them")
    asked.add_argument("--faults", type=int, default=10_000, help="with --soak: so many in all")
    asked.add_argument("--every", type=float, default=9.0, help="seconds between two faults, on average")
    asked.add_argument("--batch", type=int, default=48, help="samples a step")
    asked.add_argument("--cap", type=float, default=30.0, help="seconds of a round at most")
    asked.add_argument(
        "--forked", action="store_true", help="fork all processes from one that has imported torch"
    )
    asked.add_argument("--steps", type=int, default=0, help="of the run; 0: so many as fill the minutes")
    asked.add_argument("--no-reference", action="store_true", help="do not compare the loss")
    asked.add_argument("--work", type=Path, default=Path("outputs/chaos"), help="where all of it is written")
    given = asked.parse_args()
    unknown = [kind for kind in given.only.split(",") if kind and kind not in KINDS]
    if unknown:
        asked.error(f"no such fault: {unknown[0]}; there are {', '.join(KINDS)}")
    if given.times and given.only not in ("hub-kill", "hub-lost"):
        asked.error("--times goes with --only hub-kill or --only hub-lost")
    if given.histories:
        return play_histories(given.histories, given.seed)
    if not possible():
        print("skipped: this system has no SIGSTOP and SIGKILL")
        return 77
    given.mbit = in_lab(given.mbit, given.peers)
    given.forker = Forker() if given.forked else None
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "rows.jsonl").is_file():
        write_data(work / "rows.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What nohup starts is deaf to the one, what a script starts with & to the other, and rightly so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if given.times:
            return hub_killed(given, work)
        if given.soak:
            ways = (ASYNCHRONOUS, REPLICATED) if given.only == "hub-lost" else WAYS
            return 0 if soak(given.soak, given.faults, partial(part, given, work), ways) else 1
        return 0 if mixed(given, work)[0].kept else 1
    except KeyboardInterrupt:
        say("interrupted: everything that was started is ended")
        return 130
    finally:
        if given.forker is not None:
            given.forker.close()


if __name__ == "__main__":
    sys.exit(main())
