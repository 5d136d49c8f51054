"""A fault in the middle of a round, on lines: the time until the next commit, and what becomes of the peers.

`deadline` and `commit` are seconds after the round was opened, `after` is from the fault to the commit,
`back` from the fault's end until a round that was opened since is committed with the victim's packet. It ends
the program where the ledger does not verify, or where a peer that can come back does not.
"""

import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import line_swarm

from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process, wait_for

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "slow": signal.SIGUSR1}
LINKS = {"dark": "down", "pulled": "pulled"}


@dataclass(frozen=True)
class Case:
    # kill, pulled, dark, forgotten, stop, slow; "": none; "dark+kill": the last peer and the one before
    fault: str = ""
    fault_s: float = 0.0  # how long it lasts; 0: the victim does not come back, or it ends by itself
    first: bool = False  # it hits the first round, before any straggler deadline is known; else the fifth
    at: float = 2.2  # seconds into that round
    megabytes: float = 40.0  # of a packet
    mbit: float = 100.0
    rtt: float = 20.0
    peers: int = 4
    compute_s: float = 0.3
    ping_s: float = 1.0
    peer_timeout: float = 30.0
    step_timeout: float = 120.0
    tail: int = 2  # rounds after it

    @property
    def lab(self) -> list[str]:
        return lab.options(self.peers, up=self.mbit, down=self.mbit, rtt=self.rtt)


def measure(case: Case) -> Line:
    """Inside the lab: one run until some rounds after the fault."""
    size = round(case.megabytes * 1e6)
    settings: dict[str, Any] = {
        "samples": 100_000,
        "global_batch": 8,
        "first_peers": case.peers,
        "first_s": 60.0,
    }
    settings |= {"step_timeout": case.step_timeout, "peer_timeout": case.peer_timeout, "ping_s": case.ping_s}
    settings |= {"max_update": size + 1, "linger_s": 5.0}
    asked = {"does": "rounds", "size": size, "compute_s": case.compute_s}
    with (
        tempfile.TemporaryDirectory() as there,
        line_swarm.swarm(Path(there) / "run", settings, size=size) as swarm,
    ):
        peers = {f"p{n}": swarm.peer(f"p{n}", **asked) for n in range(1, case.peers + 1)}
        victims = dict(zip(reversed(peers), filter(None, case.fault.split("+")), strict=False))
        hit = 0 if case.first else 4
        swarm.hub.until("RoundOpened", hit + 1, 300)
        opened = next(e["t"] for e in swarm.hub.heard("RoundOpened") if e["round"] == hit)
        time.sleep(max(0.0, opened + case.at - time.monotonic()))
        struck = time.monotonic()
        for name, fault in victims.items():
            strike(fault, peers[name])
        commit = swarm.hub.until("RoundCommitted", hit + 1, 300)
        back = [n for n, fault in victims.items() if case.fault_s or fault in ("forgotten", "slow")]
        time.sleep(max(0.0, struck + case.fault_s - time.monotonic()) if back else 0.0)
        healed = time.monotonic()
        for name in back:
            heal(victims[name], peers[name])
            if victims[name] == "kill":
                peers[name] = swarm.peer(name, **asked)
        returned = {name: accepted_since(swarm, name, healed) - healed for name in back}
        swarm.hub.until("RoundCommitted", len(swarm.hub.heard("RoundCommitted")) + case.tail, 300)
        swarm.hub.signal(signal.SIGTERM)
        survivors = [name for name in peers if name in back or name not in victims]
        ends = [peers[name].until("over", timeout=120)["sha256"] for name in survivors]
        audit = swarm.hub.until("audit", timeout=120)
        commits = swarm.hub.heard("RoundCommitted")
        said = sorted([*swarm.hub.heard("PeerLeft"), *swarm.hub.heard("Warned")], key=lambda e: float(e["t"]))
    return {
        "commit": commit["seconds"],
        "deadline": commit["deadline"],
        "accepted": len(commit["accepted"]),
        "missed": [name for name in victims if name not in commit["accepted"]],
        "after": commit["t"] - struck,
        "back": returned,
        "usual": sorted(c["seconds"] for c in commits)[len(commits) // 2],
        "equal": len({*ends, audit["sha256"]}) == 1,
        "beyond": max(c["seconds"] - c["deadline"] for c in commits),
        "told": {v: [told(e) for e in said if e["t"] >= struck and v in told(e)] for v in victims},
    }


def told(event: Line) -> str:
    if event["kind"] == "PeerLeft":
        return f"{event['peer']} left: {event['reason']}"
    return " ".join(filter(None, [event["peer"], event["message"]]))


def accepted_since(swarm: line_swarm.Swarm, name: str, since: float) -> float:
    """Find when a round was committed that was opened since then and has this peer's packet."""

    def found() -> list[float]:
        opened = {e["round"] for e in swarm.hub.heard("RoundOpened") if e["t"] >= since}
        commits = [c for c in swarm.hub.heard("RoundCommitted") if c["round"] in opened]
        return [c["t"] for c in commits if name in c["accepted"]]

    wait_for(found, f"{name} in a round again", 180)
    return found()[0]


def strike(fault: str, victim: Process) -> None:
    if fault in SIGNALS:
        victim.signal(SIGNALS[fault])
    elif fault == "forgotten":
        netlab.forget(victim.member)
    else:
        netlab.link(victim.member, LINKS[fault])


def heal(fault: str, victim: Process) -> None:
    """Mend what does not mend itself. A slow computer stays slow: the hub has to wait for it in the end."""
    if fault == "stop":
        victim.signal(signal.SIGCONT)
    elif fault in LINKS:
        netlab.link(victim.member, "up")


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
