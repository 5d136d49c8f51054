"""An honest swarm's rounds while somebody attacks its hub, and without, in the same run.

    scripts/bench_attack                  all of CASES, about ten minutes
    scripts/bench_attack CASE [CASE ...]  some of them, by the beginning of their names
    scripts/bench_attack --list

Each row is a lab of its own (netlab.py rootless; exit 77 and the reason where it cannot be made): a hub, four
peers that compute by sleeping and upload 256 KiB a round, the attacker (attacks.py has each with its rate),
all behind lines of 100 Mbit/s and 20 ms. The attacker runs where the others leave a core idle (SCHED_IDLE).

calm       before and after, together
elsewhere  the control: the same attack, over the same switch, on another hub of the lab, which has no peers
           and gives way as the attacker does. What is lost in it is lost to this machine, not to the hub
here       the attack on the hub

Of each: rounds a second, the share of a core that the hub took, and how long a newcomer, who comes in the
middle of it, took from the start of its process to its welcome. The hub's memory before, at most while it was
attacked, and when all is over; what its status counts as refused.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import line_lab as lab
from attacks import ATTACKS, BLOB
from netlab import NET, number_of

from transport import RunKeys

SCRIPT = Path(__file__).resolve().with_name("attacks.py")
PEERS, ATTACKER, NEWCOMER, DECOY = 4, "p5", "p6", "p7"
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    attack: str = "idle"
    calm_s: float = 7.0  # each of two times
    attack_s: float = 10.0  # likewise
    compute_s: float = 0.2
    kilobytes: int = 256  # of a packet
    mbit: float = 100.0
    rtt: float = 20.0

    @property
    def lab(self) -> list[str]:
        rates = {"--peers": 7, "--up": self.mbit, "--down": self.mbit, "--rtt": self.rtt}
        return [str(word) for pair in rates.items() for word in pair]


CASES = {name: Case(name) for name in ATTACKS}


def measure(case: Case) -> dict[str, Any]:
    """Inside the lab."""
    size = case.kilobytes * 1024
    settings = {"samples": 1_000_000, "global_batch": 8, "first_peers": PEERS, "max_update": size + 1}
    asked = {"does": "rounds", "size": size, "compute_s": case.compute_s}
    hub = {"size": size, "objects": {BLOB: 64 << 20}}
    with tempfile.TemporaryDirectory() as there, lab.swarm(Path(there) / "run", settings, **hub) as swarm:
        for number in range(1, PEERS + 1):
            swarm.peer(f"p{number}", **asked)
        swarm.hub.until("RoundCommitted", 5)
        calm = Figures(swarm)
        calm.watch(case.calm_s)
        elsewhere, here = Figures(swarm), Figures(swarm)
        with attacker(swarm, case, decoy(swarm, Path(there) / "decoy", settings, hub)):
            elsewhere.watch(case.attack_s)
        time.sleep(1.0)
        refused = status(swarm)["refused"]
        with attacker(swarm, case, swarm.url):
            here.watch(case.attack_s)
            refused = status(swarm)["refused"] - refused
        time.sleep(1.0)
        after = Figures(swarm)
        after.watch(case.calm_s)
        peers = {line["name"] for line in status(swarm)["peers"]}
    assert peers >= {f"p{number}" for number in range(1, PEERS + 1)}, "all honest peers are still there"
    return {
        "rates": [rate(calm.rounds + after.rounds), rate(elsewhere.rounds), rate(here.rounds)],
        "shares": [f.share for f in (calm, elsewhere, here)],
        "joins": [f.joined for f in (calm, elsewhere, here)],
        "memory": [calm.memory[0], max(here.memory), after.memory[-1]],
        "refused": refused,
    }


class Figures:
    """Of the swarm, over some time."""

    def __init__(self, swarm: lab.Swarm) -> None:
        self.swarm, self.joined, self.share = swarm, 0.0, 0.0
        self.rounds: list[float] = []  # seconds from each commit to the next that came in this time
        self.memory: list[int] = []  # of the hub

    def watch(self, seconds: float) -> None:
        """For so long; in the middle of it a newcomer joins, and leaves at once."""
        began, used = time.monotonic(), processor(self.swarm)
        self.look(seconds / 2)
        self.joined = joins(self.swarm)
        self.look(seconds / 2)
        self.share = (processor(self.swarm) - used) / (time.monotonic() - began)
        times = [float(e["t"]) for e in self.swarm.hub.heard("RoundCommitted")]
        self.rounds = [later - t for t, later in itertools.pairwise(times) if later >= began]

    def look(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.memory.append(resident(self.swarm))
            time.sleep(0.1)


@contextmanager
def attacker(swarm: lab.Swarm, case: Case, url: str) -> Iterator[None]:
    """While whoever is at this URL is attacked."""
    asked = {"url": url, "seconds": 2 * case.attack_s + 10.0}
    process = lab.Member(ATTACKER, case.attack, asked, SCRIPT)
    swarm.processes.append(process)
    time.sleep(1.5)  # it starts
    try:
        yield
    finally:
        process.kill()


def decoy(swarm: lab.Swarm, folder: Path, settings: lab.Line, hub: lab.Line) -> str:
    """The URL of another hub in the lab, which has no peers and gives way as the attacker does."""
    keys = RunKeys.generate()
    asked = {"folder": str(folder), "keys": asdict(keys), "settings": settings, **hub}
    process = lab.Member(DECOY, "hub", asked)
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    swarm.processes.append(process)
    process.until("listening")
    return str(keys.url(f"{NET}{number_of(DECOY)}", 29400, "lines"))


def joins(swarm: lab.Swarm) -> float:
    """Seconds until a newcomer is welcomed. It leaves at once."""
    began = time.monotonic()
    newcomer = swarm.peer(NEWCOMER, does="visit")
    return float(newcomer.until("connected", timeout=60)["t"]) - began


def rate(rounds: list[float]) -> float:
    return len(rounds) / sum(rounds) if rounds else 0.0


def processor(swarm: lab.Swarm) -> float:
    """Seconds that the hub has computed."""
    fields = Path(f"/proc/{swarm.hub.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident(swarm: lab.Swarm) -> int:
    return int(Path(f"/proc/{swarm.hub.pid}/statm").read_text().split()[1]) * PAGE


def status(swarm: lab.Swarm) -> dict[str, Any]:
    asker = lab.Member("p1", "status", {"url": swarm.url}, SCRIPT)
    found = asker.until("status")
    asker.end()
    return found


def main() -> None:
    chosen = lab.asked_for(__doc__, CASES, measure)
    print("| attack | rounds/s: calm | elsewhere | here | elsewhere / calm | here / calm ", end="")
    print("| hub's core | hub's MB | joins s | refused |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, case in chosen.items():
        (r,) = lab.inside(__file__, ["--inside", json.dumps(asdict(case))], case.lab)
        calm, elsewhere, here = r["rates"]
        rates = f"{calm:.2f} | {elsewhere:.2f} | {here:.2f} | {elsewhere / calm:.0%} | {here / calm:.0%}"
        shares = " / ".join(f"{share:.0%}" for share in r["shares"])
        memory = " / ".join(f"{size / 1e6:.0f}" for size in r["memory"])
        joined = " / ".join(f"{seconds:.1f}" for seconds in r["joins"])
        print(f"| {name} | {rates} | {shares} | {memory} | {joined} | {r['refused']} |", flush=True)


if __name__ == "__main__":
    main()
