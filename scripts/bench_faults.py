"""Faults in the middle of a round, on lines: how long until the next commit, and what becomes of everybody.

    python scripts/bench_faults.py                   all rows of CASES, about twenty minutes
    python scripts/bench_faults.py CASE [CASE ...]   some of them, by the beginning of their names
    python scripts/bench_faults.py --list

Four peers with packets of 40 MB at 100 Mbit/s each; for long stalls and slow computers packets of 1 MB at
20. Each row is a lab of its own (netlab.py rootless; exit 77 and the reason where it cannot be made).
`deadline` and `commit` are seconds after the round was opened, `after` is from the fault to the commit,
`back` from its end until a round that was opened since is committed with the victim's packet. A row ends
the program where the ledger does not verify, or where somebody who can come back does not.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import line_lab as lab


@dataclass(frozen=True)
class Case:
    # kill, pulled, dark, forgotten, stop, slow; "": none; "dark+kill": the last peer and the one before
    fault: str = ""
    fault_s: float = 0.0  # how long it lasts; 0: the victim does not come back, or it ends by itself
    first: bool = False  # it hits the first round, when no pace is known; else the fifth
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
        rates = {"--peers": self.peers, "--up": self.mbit, "--down": self.mbit, "--rtt": self.rtt}
        return [str(word) for pair in rates.items() for word in pair]


def small(fault: str, fault_s: float = 0.0) -> Case:
    return Case(fault, fault_s, at=0.4, megabytes=1.0, mbit=20.0, compute_s=0.5, tail=3)


CASES: dict[str, Case] = {
    "no fault": Case(),
    "kill -9": Case("kill"),
    "cable pulled": Case("pulled"),
    "SIGSTOP": Case("stop"),
    "kill -9, first round": Case("kill", first=True),
    "cable pulled, first round": Case("pulled", first=True),
    "SIGSTOP, first round": Case("stop", first=True),
    "kill -9, started again": small("kill", 4.0),
    "SIGSTOP 5 s": small("stop", 5.0),
    "SIGSTOP 60 s": small("stop", 60.0),
    "dark 5 s": small("dark", 5.0),
    "dark 60 s": small("dark", 60.0),
    "half-open": small("forgotten"),
    "10x slower": small("slow"),
}


def measure(case: Case) -> dict[str, Any]:
    """Inside the lab."""
    settings: dict[str, Any] = {"samples": 100_000, "global_batch": 8}
    settings |= {"first_peers": case.peers, "first_s": 60.0}
    settings |= {"step_timeout": case.step_timeout, "peer_timeout": case.peer_timeout, "ping_s": case.ping_s}
    size = round(case.megabytes * 1e6)
    settings |= {"max_update": size + 1, "linger_s": 5.0}
    asked = {"does": "rounds", "size": size, "compute_s": case.compute_s}
    with tempfile.TemporaryDirectory() as there, lab.swarm(Path(there) / "run", settings, size=size) as swarm:
        peers = {f"p{n}": swarm.peer(f"p{n}", **asked) for n in range(1, case.peers + 1)}
        victims = dict(zip(reversed(peers), filter(None, case.fault.split("+")), strict=False))
        hit = 0 if case.first else 4
        swarm.hub.until("RoundOpened", hit + 1, 300)
        opened = next(e["t"] for e in swarm.hub.heard("RoundOpened") if e["round"] == hit)
        time.sleep(max(0.0, opened + case.at - time.monotonic()))
        struck = time.monotonic()
        for name, fault in victims.items():
            strike(fault, peers[name])
        swarm.hub.until("RoundCommitted", hit + 1, 300)
        found = round_of(swarm, hit) | {"after": swarm.hub.heard("RoundCommitted")[hit]["t"] - struck}
        back = [n for n, fault in victims.items() if case.fault_s or fault in ("forgotten", "slow")]
        time.sleep(max(0.0, struck + case.fault_s - time.monotonic()) if back else 0.0)
        healed = time.monotonic()
        for name in back:
            heal(victims[name], peers[name])
            if victims[name] == "kill":
                peers[name] = swarm.peer(name, **asked)
        found["back"] = {name: accepted_since(swarm, name, healed) - healed for name in back}
        done = len(swarm.hub.heard("RoundCommitted"))
        swarm.hub.until("RoundCommitted", done + case.tail, 300)
        swarm.hub.signal(lab.signal.SIGTERM)
        survivors = [name for name in peers if name in back or name not in victims]
        ends = [peers[name].until("over", timeout=120)["sha256"] for name in survivors]
        audit = swarm.hub.until("audit", timeout=120)
        commits = swarm.hub.heard("RoundCommitted")
        said = sorted([*swarm.hub.heard("PeerLeft"), *swarm.hub.heard("Warned")], key=time_of)
    return found | {
        "usual": sorted(c["seconds"] for c in commits)[len(commits) // 2],
        "equal": len({*ends, audit["sha256"]}) == 1,
        "rounds": audit["rounds"],
        "counted": audit["counted"],
        "beyond": max(c["seconds"] - c["deadline"] for c in commits),
        "told": {v: [told(e) for e in said if e["t"] >= struck and v in told(e)] for v in victims},
    }


def time_of(event: dict[str, Any]) -> float:
    return float(event["t"])


def told(event: dict[str, Any]) -> str:
    if event["kind"] == "PeerLeft":
        return f"{event['peer']} left: {event['reason']}"
    return " ".join(filter(None, [event["peer"], event["message"]]))


def round_of(swarm: lab.Swarm, round: int) -> dict[str, Any]:
    commit = swarm.hub.heard("RoundCommitted")[round]
    return {"commit": commit["seconds"], "deadline": commit["deadline"], "accepted": len(commit["accepted"])}


def accepted_since(swarm: lab.Swarm, name: str, since: float) -> float:
    """When a round was committed that was opened since then, with this peer's packet in it."""

    def found() -> list[float]:
        opened = {e["round"] for e in swarm.hub.heard("RoundOpened") if e["t"] >= since}
        commits = [c for c in swarm.hub.heard("RoundCommitted") if c["round"] in opened]
        return [c["t"] for c in commits if name in c["accepted"]]

    lab.wait_for(found, f"{name} in a round again", 180)
    return found()[0]


def strike(fault: str, victim: lab.Member) -> None:
    if fault in ("kill", "stop", "slow"):
        victim.signal({"kill": lab.KILL, "stop": lab.STOP, "slow": lab.SLOWER}[fault])
    elif fault == "forgotten":
        lab.forget(victim.member)
    else:
        lab.link(victim.member, {"dark": "down", "pulled": "pulled"}[fault])


def heal(fault: str, victim: lab.Member) -> None:
    """What does not heal by itself. A slow computer stays slow: it is to be waited for in the end."""
    if fault == "stop":
        victim.signal(lab.CONT)
    elif fault in ("dark", "pulled"):
        lab.link(victim.member, "up")


def row(case: Case) -> dict[str, Any]:
    (found,) = lab.inside(__file__, ["--inside", json.dumps(asdict(case))], case.lab)
    return found


def main() -> None:
    chosen = lab.asked_for(__doc__, CASES, measure)
    print("| fault | usual round | deadline | commit | after | packets in it | back | equal | told |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in chosen.items():
        r = row(case)
        back = ", ".join(f"{seconds:.1f} s" for seconds in r["back"].values())
        times = " | ".join(f"{r[key]:.1f} s" for key in ("usual", "deadline", "commit", "after"))
        equal = "yes" if r["equal"] else "NO"
        said = "; ".join(dict.fromkeys(text for each in r["told"].values() for text in each))
        print(f"| {name} | {times} | {r['accepted']} | {back} | {equal} | {said} |", flush=True)


if __name__ == "__main__":
    main()
