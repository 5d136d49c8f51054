"""An honest swarm's rounds while somebody attacks its hub, and without, in the same run.

    scripts/bench_attack                  all of CASES, about eight minutes
    scripts/bench_attack CASE [CASE ...]  some of them, by the beginning of their names
    scripts/bench_attack --list

Each row is a lab of its own (netlab.py rootless; exit 77 and the reason where it cannot be made): a hub, four
peers that compute by sleeping and upload 256 KiB a round, the attacker (attacks.py has each with its rate),
all behind lines of 100 Mbit/s and 20 ms; the attacker's process gives way to the others (nice 19). Rounds a
second before and after the attack together, and during it; the hub's memory before, at most, and when all
is over; how long a newcomer took from the start of its process to its welcome, before and during the attack;
what the hub's status counts as refused; the share of a core that the hub took before and during the attack.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import line_lab as lab
from attacks import ATTACKS, BLOB

SCRIPT = Path(__file__).resolve().with_name("attacks.py")
PEERS, ATTACKER, EARLY, LATE = 4, "p5", "p6", "p7"
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    attack: str = "idle"
    calm_s: float = 8.0  # each of two times
    attack_s: float = 12.0
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
        joined = {"calm": joins(swarm, EARLY)}
        used, began = processor(swarm), time.monotonic()
        before, memory = rounds_in(swarm, case.calm_s), [resident(swarm)]
        share = {"calm": (processor(swarm) - used) / (time.monotonic() - began)}
        refused = status(swarm)["refused"]
        attacker = lab.Member(ATTACKER, case.attack, {"url": swarm.url, "seconds": case.attack_s}, SCRIPT)
        swarm.processes.append(attacker)
        time.sleep(1.0)  # it starts
        used, began = processor(swarm), time.monotonic()
        during = rounds_in(swarm, case.attack_s / 2, memory)
        share["attacked"] = (processor(swarm) - used) / (time.monotonic() - began)
        joined["attacked"] = joins(swarm, LATE)
        during += rounds_in(swarm, case.attack_s / 2 - 2.0, memory)
        refused = status(swarm)["refused"] - refused
        attacker.kill()
        time.sleep(1.0)
        after = rounds_in(swarm, case.calm_s, memory)
        peers = {line["name"] for line in status(swarm)["peers"]}
    assert peers >= {f"p{number}" for number in range(1, PEERS + 1)}, "all honest peers are still there"
    return {
        "calm": rate(before + after),
        "attacked": rate(during),
        "joins": joined,
        "memory": {"before": memory[0], "most": max(memory), "after": memory[-1]},
        "refused": refused,
        "share": share,
    }


def joins(swarm: lab.Swarm, member: str) -> float:
    """Seconds until a newcomer is welcomed. It leaves at once."""
    began = time.monotonic()
    newcomer = swarm.peer(member, does="visit")
    return float(newcomer.until("connected", timeout=60)["t"]) - began


def rounds_in(swarm: lab.Swarm, seconds: float, memory: list[int] | None = None) -> list[float]:
    """Seconds from each commit to the next that came in this time."""
    since = time.monotonic()
    while time.monotonic() < since + seconds:
        time.sleep(0.1)
        if memory is not None:
            memory.append(resident(swarm))
    times = [float(e["t"]) for e in swarm.hub.heard("RoundCommitted")]
    return [later - t for t, later in itertools.pairwise(times) if later >= since]


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
    print("| attack | rounds/s without | with | ratio | hub's core | hub's MB | joins s | refused |")
    print("|---|---|---|---|---|---|---|---|")
    for name, case in chosen.items():
        (r,) = lab.inside(__file__, ["--inside", json.dumps(asdict(case))], case.lab)
        memory = " / ".join(f"{r['memory'][when] / 1e6:.0f}" for when in ("before", "most", "after"))
        came = f"{r['joins']['calm']:.1f} / {r['joins']['attacked']:.1f}"
        ratio = r["attacked"] / r["calm"]
        rates = f"{r['calm']:.2f} | {r['attacked']:.2f} | {ratio:.0%}"
        share = f"{r['share']['calm']:.0%} / {r['share']['attacked']:.0%}"
        print(f"| {name} | {rates} | {share} | {memory} | {came} | {r['refused']} |", flush=True)


if __name__ == "__main__":
    main()
