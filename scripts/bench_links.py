"""What our transfers make of lines: rate, and how late heartbeats are meanwhile; faults in the middle of one.

    python scripts/bench_links.py                    all rows of CASES, about ten minutes
    python scripts/bench_links.py CASE [CASE ...]    some of them, by the beginning of their names
    python scripts/bench_links.py --list

Each row is a lab of its own (netlab.py rootless; exit 77 and the reason where it cannot be made). `late` is
how much longer than on the idle line the slowest ping took, in ms: there and back as the hub measures it, and
one way as the peer does (a fault in the middle is in it). `again` is what was sent, or asked for, twice, and
`window` the most that may have been under way at once, both in KiB.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import line_lab as lab

PING_S, QUIET_S = 0.05, 1.0
PAYLOAD = 1448 / 1514  # of a full frame


@dataclass(frozen=True)
class Case:
    way: str = "up"  # or down
    mbit: float = 20.0  # of the peer's line, each way
    rtt: float = 40.0  # ms
    megabytes: float = 100.0
    queue: float = 50.0  # ms of queue at the line's rate: how bloated the router's buffer is
    congestion: str = ""  # "": the kernel's own
    loss: float = 0.0  # percent
    fault: str = ""  # dark, pulled, forgotten, hub killed
    fault_at: float = 2.0  # seconds into the transfer
    fault_s: float = 5.0

    @property
    def lab(self) -> list[str]:
        rates = {"--up": self.mbit, "--down": self.mbit, "--rtt": self.rtt}
        rates |= {"--queue": self.queue, "--loss": self.loss}
        return ["--peers", "1", *(str(word) for pair in rates.items() for word in pair)]


HEARTBEATS = {
    f"late {way}, 20 Mbit/s, {name}": Case(way, **changes)
    for way in ("up", "down")
    for name, changes in {
        "40 ms": {},
        "40 ms, reno": {"congestion": "reno"},
        "40 ms, a second of queue, reno": {"congestion": "reno", "queue": 1000.0},
    }.items()
}
SLOW = {f"slow {way}, 3 Mbit/s": Case(way, 3.0, 40.0, 6.0, 1000.0, "reno") for way in ("up", "down")}
LINES = ((20, 50, 40), (100, 20, 150), (100, 50, 150), (500, 20, 500), (500, 50, 500), (500, 100, 500))
RATES = {
    f"rate {way}, {mbit} Mbit/s, {rtt} ms": Case(way, mbit, rtt, size)
    for way in ("up", "down")
    for mbit, rtt, size in LINES  # MB
}
LOSSY = {f"loss {way}, 100 Mbit/s, 0.1 %": Case(way, 100.0, 50.0, 100.0, loss=0.1) for way in ("up", "down")}
FAULTS = {
    f"{fault} {way}": Case(way, 50.0, 40.0, 40.0, fault=fault)
    for way in ("up", "down")
    for fault in ("dark", "pulled", "forgotten", "hub killed")
}
CASES: dict[str, Case] = HEARTBEATS | SLOW | RATES | LOSSY | FAULTS


def measure(case: Case) -> dict[str, Any]:
    """Inside the lab: one transfer."""
    size = round(case.megabytes * 1e6)
    if case.congestion:
        lab.congestion(["hub", "p1"], case.congestion)
    settings = {"samples": 1, "global_batch": 1, "ping_s": PING_S, "max_update": size + 1, "linger_s": 1.0}
    settings |= {"peer_timeout": 120.0, "recover_s": 20.0, "grace_s": 30.0}
    with tempfile.TemporaryDirectory() as folder:
        objects = {"base/blob": size if case.way == "down" else 1}
        packet = size if case.way == "up" else 4
        with lab.swarm(Path(folder) / "run", settings, size=packet, objects=objects) as swarm:
            peer = swarm.peer("p1", does=case.way, size=packet, blob=size, quiet_s=QUIET_S)
            begins = peer.until("begins")["t"]
            if case.fault:
                time.sleep(max(0.0, begins + case.fault_at - time.monotonic()))
                strike(case, swarm)
            ends = peer.until("ends", timeout=600)["t"]
            done = peer.until("done")
            pongs, pings = swarm.hub_said("pong"), peer.heard("ping")
    seconds, again = ends - begins, (done["bulk"] - size) / 1024
    goodput = size * 8e-6 / seconds
    return {
        "seconds": seconds,
        "mbit": goodput,
        "share": goodput / (case.mbit * PAYLOAD),
        "again": again,
        "window": done["window"] / 1024,
        "late_hub": lateness(pongs, begins, ends),
        "late_peer": lateness(pings, begins, ends),
    }


def lateness(pings: list[dict[str, Any]], begins: float, ends: float) -> float:
    """ms beyond the fastest one before the transfer."""
    idle = min(p["s"] for p in pings if p["t"] < begins)
    return 1000 * (max(p["s"] for p in pings if begins <= p["t"] - p["s"] and p["t"] - p["s"] <= ends) - idle)


def strike(case: Case, swarm: lab.Swarm) -> None:
    if case.fault == "dark":
        lab.link("p1", "down")
        time.sleep(case.fault_s)
        lab.link("p1", "up")
    elif case.fault == "pulled":
        lab.link("p1", "pulled")
        time.sleep(case.fault_s)
        lab.link("p1", "up")
    elif case.fault == "forgotten":
        lab.forget("p1")
    else:
        swarm.hub.signal(lab.KILL)
        time.sleep(2.0)
        swarm.start_hub()


def row(name: str, case: Case) -> dict[str, Any]:
    (found,) = lab.inside(__file__, ["--inside", json.dumps(asdict(case))], case.lab)
    return {"case": name, **found}


def main() -> None:
    chosen = lab.asked_for(__doc__, CASES, measure)
    print("| line | s | Mbit/s | of the line | late, hub / peer | again | window |")
    print("|---|---|---|---|---|---|---|")
    for name, case in chosen.items():
        r = row(name, case)
        rate = f"{r['seconds']:.1f} | {r['mbit']:.1f} | {r['share']:.0%}"
        late = f"{r['late_hub']:.0f} / {r['late_peer']:.0f} ms"
        print(f"| {name} | {rate} | {late} | {r['again']:.0f} | {r['window']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
