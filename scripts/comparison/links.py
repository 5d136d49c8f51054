"""Tokens a second over shaped lines, cocktail beside what one would take instead: wall clock, the same work.

    scripts/rivals links                             every system at every speed, an hour
    scripts/rivals links --system cocktail --speed 500 100
    scripts/rivals links --system cocktail --speed 1000 20 1000 --out outputs/changes.jsonl
    scripts/rivals links --system "cocktail, 8 peers" --speed 500 --peers 8 4 8 --out outputs/changes.jsonl
    scripts/rivals links --list

Four peers in network namespaces, or as many as a system says, each on a line of its own; work.py has the
work, in which compute : FP16 bytes : line is GPT-J-6B's on 8 A100. Speeds are those that the lines stand for;
the real ones are MBIT times as fast and are in the rows. Systems that send whole gradients run a smaller
model, at the same ratios, so that a step of theirs is waited for. `unthrottled` is the same system over the
loopback device, or, of those that send little, over lines without a limit. A row is a line of JSON in --out,
and replaces the older one of its system and speed.

A run of cocktail goes through the speeds in their order, and at each through the numbers of peers: those that
leave are killed, those that come join again. `followed` rounds after a change of lines, or after the first
round with all peers, its rung, and the share of the time that devices compute, are what they are in those
that count.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median

from scripts.comparison import systems, work
from scripts.comparison.systems import SYSTEMS, System
from scripts.netlab import lab as netlab
from scripts.report import rows
from scripts.swarms import lab
from scripts.swarms.processes import Line

SPEEDS = {  # Mbit/s: down, up
    "unthrottled": (0.0, 0.0),
    "1000": (1000.0, 1000.0),
    "500": (500.0, 500.0),
    "100": (100.0, 100.0),
    "50": (50.0, 50.0),
    "20": (20.0, 20.0),
    "100 down, 20 up": (100.0, 20.0),
    "200": (200.0, 200.0),  # these two are held back: no setting was chosen on them
    "40 down, 10 up": (40.0, 10.0),
}
WAITED = 20.0  # seconds; a larger model whose exchange takes longer is not measured
LEARNT, COUNTED = 40, 10  # rounds of cocktail on a new line: until rung, aggregators, K have settled; counted
WINDOW, NEAR = 6, 0.95  # rounds, in which a step is nearly as short as in those that count
PATIENCE = 1200.0  # seconds that all of these rounds may take
LOCAL = 2  # steps of DiLoCo between two exchanges here; rows of more are made of both times


@dataclass(frozen=True)
class Case:
    system: str
    speeds: tuple[str, ...]
    peers: tuple[int, ...] = ()  # that a run of cocktail has, one number after the other; else the system's

    @property
    def members(self) -> list[str]:
        return [f"p{i + 1}" for i in range(SYSTEMS[self.system].peers)]

    def shape(self, speed: str, members: list[str]) -> None:
        system = SYSTEMS[self.system]
        down, up = (rate * system.mbit for rate in SPEEDS[speed])
        for member in members:
            netlab.change(member, up=up, down=down, rtt=work.RTT * system.slower if down else 0.0)

    def exchange_s(self, speed: str, width: int) -> float:
        """Estimate the seconds of an exchange: bytes over the slower direction."""
        sent, slower = SYSTEMS[self.system].sends * work.parameters(width), min(SPEEDS[speed])
        return sent * 8e-6 / (slower * work.MBIT) if slower else 0.0

    def width_for(self, speed: str) -> int:
        fitting = [width for width in work.WIDTHS if self.exchange_s(speed, width) <= WAITED]
        return fitting[0] if fitting else work.WIDTHS[-1]

    def steps_for(self, speed: str, width: int) -> int:
        """Choose how many steps to time. The first is not counted; with local steps the first exchange is
        not."""
        if SYSTEMS[self.system].kind == "diloco":
            return 2 * LOCAL
        return 2 if self.exchange_s(speed, width) > WAITED / 2 else 5

    def row(self, speed: str, width: int, busy: float) -> Line:
        return {
            "system": self.system,
            "speed": speed,
            "mbit": [round(rate * SYSTEMS[self.system].mbit, 3) for rate in SPEEDS[speed]],
            "parameters": work.parameters(width),
            "compute_s": SYSTEMS[self.system].compute_s(width),
            "busy": round(busy, 3),
            "date": time.strftime("%Y-%m-%d"),
        }


def measure(case: Case) -> Iterator[Line]:
    """Inside the lab: rows, one for each speed."""
    system = SYSTEMS[case.system]
    if system.module == systems.COCKTAIL:
        yield from measure_cocktail(case)
        return
    limited = [speed for speed in case.speeds if speed != "unthrottled"]
    places: list[tuple[list[str], list[str]]] = []
    if system.averages and "unthrottled" in case.speeds:
        places.append((["hub"] * work.PEERS, ["unthrottled"]))
    if limited or not system.averages:
        places.append((case.members, limited if system.averages else list(case.speeds)))
    for where, speeds in places:
        with systems.ranks(system, where) as ranks:
            phases = 0
            if not system.averages:  # its first steps are dense: they come before there are limits
                phases += 1
                ranks.phase(phases, 120, width=work.WIDTHS[0], steps=3)
            for speed in speeds:
                case.shape(speed, case.members)
                width = case.width_for(speed)
                steps = case.steps_for(speed, width)
                phases += 1
                busy = Busy()
                patience = 280 + 8 * steps * case.exchange_s(speed, width)
                ranks.phase(phases, patience, width=width, steps=steps, local=LOCAL)
                said = ranks.ranks[0].heard("step")[-steps:]
                found = case.row(speed, width, busy.share()) | step_of(system, said)
                if averaged := ranks.ranks[0].heard("averaged"):
                    found["groups"] = [line["group"] for line in averaged if line["t"] > said[0]["t"]]
                yield found


def step_of(system: System, said: list[Line]) -> Line:
    """Average the seconds of a step; of DiLoCo: of a local one, and of an exchange."""
    took = [after["t"] - before["t"] for before, after in pairwise(said)]
    sent = max(line["sent"] for line in said[1:])
    if system.kind != "diloco":
        return {"step_s": mean(took), "sent": sent, "counted": len(took)}
    return {"step_s": took[1], "exchange_s": took[2] - took[1], "sent": sent, "counted": 1}


class Busy:
    """The share of the machine's cores that was not idle since this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    def _read(self) -> tuple[int, int]:
        counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(counts), counts[3] + counts[4]

    def share(self) -> float:
        (all_before, idle_before), (all_now, idle_now) = self._before, self._read()
        return 1 - (idle_now - idle_before) / max(1, all_now - all_before)


def measure_cocktail(case: Case) -> Iterator[Line]:
    system = SYSTEMS[case.system]
    with tempfile.TemporaryDirectory() as folder:
        seconds = system.compute_s(system.width)
        started = systems.Cocktail(Path(folder), system.width, seconds, system.keys, system.peers)
        yield from measure_lines(case, started)


def measure_lines(case: Case, started: systems.Cocktail) -> Iterator[Line]:
    """Measure one run at each speed with each number of peers; the first LEARNT rounds of each do not
    count."""
    system = SYSTEMS[case.system]
    members = [*case.members, *(["hub"] if system.kind == "hub" else [])]
    counts = case.peers or (system.peers,)
    with systems.cocktail(started, rounds=10_000, together=min(counts)) as run:
        run.until_round(0, PATIENCE)  # the base model comes over lines without a limit
        at = 1
        for speed, count in product(case.speeds, counts):
            case.shape(speed, members)
            run.have(count)
            run.until_round(at + LEARNT, PATIENCE)
            busy = Busy()
            run.until_round(at + LEARNT + COUNTED, PATIENCE)
            share = busy.share()
            counted = range(at + LEARNT, at + LEARNT + COUNTED + 1)
            found = case.row(speed, run.width, share) | rounds_of(run, counted)
            found |= {"followed": followed(run, at, counted), "rung": run.hub.heard("step")[-1]["rung"]}
            found["compute_s"] *= system.peers / count  # the batch stays
            at = run.peers[0].heard("round")[-1]["round"] + 1
            yield found | ({"peers": count} if case.peers else {})


def rounds_of(run: systems.Cocktail, counted: range) -> Line:
    of_hub = run.hub.heard("step")
    peers = [[r for r in peer.heard("round") if r["round"] in counted] for peer in run.peers]
    steps = mean(sum(r["steps"] for r in each[1:]) for each in peers)
    return {
        "step_s": mean(each[-1]["end"] - each[0]["end"] for each in peers) / steps,
        "sent": median(r["sent"] / r["steps"] for each in peers for r in each),
        "hub_sent": median(sum(r["down_bytes"].values()) for r in of_hub if r["round"] in counted),
        "counted": len(counted) - 1,
        "local_steps": median(r["steps"] for each in peers for r in each),
    }


def followed(run: systems.Cocktail, changed: int, counted: range) -> int:
    """Count the rounds after a change, from the first in which all peers take part, until the rung stays that
    of the rounds that count and a step takes hardly longer than in them."""
    there = max(changed, *(peer.heard("round")[0]["round"] for peer in run.peers))
    rungs = {row["round"]: row["rung"] for row in run.hub.heard("step")}
    since, step_s = counted.start, rounds_of(run, counted)["step_s"] / NEAR
    while since > there and rungs[since - 1] == rungs[counted.start]:
        since -= 1
    while since < counted.start and rounds_of(run, range(since, since + WINDOW))["step_s"] > step_s:
        since += 1
    return since - there


def main() -> None:
    asked = rows.options(__doc__, rows.FOLDER / "links.jsonl", system=SYSTEMS, speed=SPEEDS)
    asked.add_argument("--peers", type=int, nargs="+", default=[], help="of cocktail, in turn")
    args = asked.parse_args()
    if args.inside:
        for found in measure(Case(**json.loads(args.inside))):  # kept at once: what follows may fail
            rows.keep(args.out, found, ("system", "speed", "peers"))
            print(json.dumps(found), flush=True)
        return
    if args.list:
        print("\n".join([*SYSTEMS, *SPEEDS]))
        return
    for system in args.system:
        own = ["-m", "scripts.comparison.links", "--out", str(args.out.resolve())]
        own += ["--inside", json.dumps(asdict(Case(system, tuple(args.speed), tuple(args.peers))))]
        for found in lab.inside(own, lab.options(SYSTEMS[system].peers)):
            share = found["compute_s"] / found["step_s"]
            more = f"; {found['rung']} after {found['followed']} rounds" if "rung" in found else ""
            where = f"{found['speed']}, {found['peers']} peers" if "peers" in found else found["speed"]
            print(f"{system}, {where}: {found['step_s']:.2f} s a step, {share:.1%} computing{more}")


if __name__ == "__main__":
    main()
