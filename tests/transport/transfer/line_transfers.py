"""One transfer on a line: its rate, how late heartbeats are meanwhile, and a fault in the middle.

`late` is how much longer than on the idle line the slowest ping took, in ms: there and back as the hub
measures it, and one way as the peer does. `again` is what was sent or asked for twice, `window` the largest
congestion window, both in KiB.
"""

import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import line_swarm

from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.processes import Line

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


def measure(case: Case) -> Line:
    """Inside the lab: one transfer."""
    size = round(case.megabytes * 1e6)
    if case.congestion:
        lab.congestion(["hub", "p1"], case.congestion)
    settings = {"samples": 1, "global_batch": 1, "ping_s": PING_S, "max_update": size + 1, "linger_s": 1.0}
    settings |= {"peer_timeout": 120.0, "recover_s": 20.0, "grace_s": 30.0}
    objects, packet = {line_swarm.BLOB: size if case.way == "down" else 1}, size if case.way == "up" else 4
    with (
        tempfile.TemporaryDirectory() as folder,
        line_swarm.swarm(Path(folder) / "run", settings, size=packet, objects=objects) as swarm,
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


def strike(case: Case, swarm: line_swarm.Swarm) -> None:
    """Do the fault, and mend what does not mend itself."""
    if case.fault == "forgotten":
        netlab.forget("p1")
    elif case.fault == "hub killed":
        swarm.hub.signal(signal.SIGKILL)
        time.sleep(2.0)
        swarm.start_hub()
    else:
        netlab.link("p1", {"dark": "down", "pulled": "pulled"}[case.fault])
        time.sleep(case.fault_s)
        netlab.link("p1", "up")


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
