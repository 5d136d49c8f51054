"""What transfers make of a line: their rate, how late heartbeats are meanwhile, and faults in the middle.

    python -m scripts.bench.transfers                    all of CASES, about ten minutes
    python -m scripts.bench.transfers CASE [CASE ...]    some of them, by the beginning of their names
    python -m scripts.bench.transfers --list

Each row is a network lab of its own (exit 77 and the reason where it cannot be made). `late` is how much
longer than on the idle line the slowest ping took, in ms: there and back as the hub measures it, and one way
as the peer does. `again` is what was sent or asked for twice, `window` the largest congestion window, both in
KiB.
"""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.swarms import lab, toy
from scripts.swarms.processes import Line

MODULE = "scripts.bench.transfers"
PING_S, QUIET_S = 0.05, 1.0
PAYLOAD = 1448 / 1514  # of a full frame


@dataclass(frozen=True)
class Case:
    way: str = "up"  # or down
    mbit: float = 20.0  # of the peer's line, each way
    rtt: float = 40.0  # ms
    megabytes: float = 100.0
    queue: float = 50.0  # ms of queue at the line's rate: how bloated the router's buffer is
    congestion: str = ""  # control of the kernels: reno, bbr; "": their default
    loss: float = 0.0  # percent
    fault: str = ""  # dark, pulled, forgotten, hub killed
    fault_at: float = 2.0  # seconds into the transfer
    fault_s: float = 5.0

    @property
    def lab(self) -> list[str]:
        return lab.options(1, up=self.mbit, down=self.mbit, rtt=self.rtt, queue=self.queue, loss=self.loss)


LINES = ((20, 50, 40), (100, 20, 150), (100, 50, 150), (500, 20, 500), (500, 50, 500), (500, 100, 500))
CASES: dict[str, Case] = {}
for way in ("up", "down"):
    CASES |= {
        f"late {way}, 20 Mbit/s, 40 ms": Case(way),
        f"late {way}, 20 Mbit/s, 40 ms, reno": Case(way, congestion="reno"),
        f"late {way}, 20 Mbit/s, 40 ms, a second of queue, reno": Case(way, congestion="reno", queue=1000.0),
        f"slow {way}, 3 Mbit/s": Case(way, 3.0, 40.0, 6.0, 1000.0, "reno"),
        f"loss {way}, 100 Mbit/s, 0.1 %": Case(way, 100.0, 50.0, loss=0.1),
    }
    CASES |= {f"rate {way}, {mbit} Mbit/s, {rtt} ms": Case(way, mbit, rtt, size) for mbit, rtt, size in LINES}
    for fault in ("dark", "pulled", "forgotten", "hub killed"):
        CASES[f"{fault} {way}"] = Case(way, 50.0, 40.0, 40.0, fault=fault)


def measure(case: Case) -> Line:
    """Inside the lab: one transfer."""
    size = round(case.megabytes * 1e6)
    if case.congestion:
        lab.congestion(["hub", "p1"], case.congestion)
    settings = {"samples": 1, "global_batch": 1, "ping_s": PING_S, "max_update": size + 1, "linger_s": 1.0}
    settings |= {"peer_timeout": 120.0, "recover_s": 20.0, "grace_s": 30.0}
    objects, packet = {toy.BLOB: size if case.way == "down" else 1}, size if case.way == "up" else 4
    with (
        tempfile.TemporaryDirectory() as folder,
        toy.swarm(Path(folder) / "run", settings, size=packet, objects=objects) as swarm,
    ):
        peer = swarm.peer("p1", does=case.way, size=packet, blob=size, quiet_s=QUIET_S)
        begins = peer.until("begins")["t"]
        if case.fault:
            time.sleep(max(0.0, begins + case.fault_at - time.monotonic()))
            strike(case, swarm)
        ends = peer.until("ends", timeout=600)["t"]
        done = peer.until("done")
        pongs, pings = swarm.hub_said("pong"), peer.heard("ping")
    goodput = size * 8e-6 / (ends - begins)
    return {
        "seconds": ends - begins,
        "mbit": goodput,
        "share": goodput / (case.mbit * PAYLOAD),
        "again": (done["bulk"] - size) / 1024,
        "window": done["window"] / 1024,
        "late_hub": lateness(pongs, begins, ends),
        "late_peer": lateness(pings, begins, ends),
    }


def lateness(pings: list[Line], begins: float, ends: float) -> float:
    """The ms beyond the fastest ping before the transfer."""
    idle = min(p["s"] for p in pings if p["t"] < begins)
    return 1000 * (max(p["s"] for p in pings if begins <= p["t"] - p["s"] <= ends) - idle)


def strike(case: Case, swarm: toy.Swarm) -> None:
    """Do the fault, and mend what does not mend itself."""
    if case.fault == "forgotten":
        lab.forget("p1")
    elif case.fault == "hub killed":
        swarm.hub.signal(signal.SIGKILL)
        time.sleep(2.0)
        swarm.start_hub()
    else:
        lab.link("p1", {"dark": "down", "pulled": "pulled"}[case.fault])
        time.sleep(case.fault_s)
        lab.link("p1", "up")


def main() -> None:
    head = "| line | s | Mbit/s | of the line | late, hub / peer | again | window |\n" + "|---" * 7 + "|"
    for name, r in lab.in_a_lab(MODULE, __doc__, CASES, measure, head):
        rate = f"{r['seconds']:.1f} | {r['mbit']:.1f} | {r['share']:.0%}"
        late = f"{r['late_hub']:.0f} / {r['late_peer']:.0f} ms"
        print(f"| {name} | {rate} | {late} | {r['again']:.0f} | {r['window']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
