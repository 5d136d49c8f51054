"""The cost of a fault to cocktail, and to its rivals: the same peers, lines, model and moment.

    scripts/rivals faults                                   every system and fault, about an hour
    scripts/rivals faults --system cocktail --fault kill stop
    scripts/rivals faults --list

kill    every process of the fourth peer is killed, STRIKE seconds into a step
stop    they are stopped for 60 s, as by a laptop that sleeps
dark    its line loses everything for 5 s and is well again
late    a fifth peer comes
none    nothing: how far apart peers are anyway

Four peers on lines of 8 Mbit/s; a step computes for 1 s, and 3.5 s bring FP16 gradients around. `stalled` is
the longest time between two steps of the first peer, less an ordinary step; `over`: no peer goes on. `apart`
counts the peers whose model, after the last step that all have made, is further from the first peer's than 1
% of what that one has moved. `lost` counts the samples whose gradient should be in the model and is not; of
cocktail by its ledger, once the run is over. A row is a line of JSON in --out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from scripts.comparison import systems, work
from scripts.comparison.systems import SYSTEMS
from scripts.netlab import lab as netlab
from scripts.report import rows
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process
from transport import Ledger

FAULTS = {"none": 20.0, "kill": 50.0, "stop": 120.0, "dark": 40.0, "late": 80.0}  # seconds watched after it
LASTS = {"stop": 60.0, "dark": 5.0}
RIVALS = (
    "cocktail",
    "torch DDP FP16",
    "DiLoCo FP16",
    "torchft DDP FP32",
    "torchft DiLoCo FP32",
    "hivemind FP16",
)
WIDTH, SECONDS, MBIT, RTT = 256, 1.0, 8.0, 20.0
BEFORE = 4  # ordinary steps
STRIKE = 0.3  # seconds into a step of cocktail; its packets of 20 kB are under way then
STRIKE_RIVALS = 2.5  # 1.5 s into the exchange
TIMEOUT_S, CHUNK_S = 30.0, 5.0  # that rivals are given; their own defaults are half an hour, and none
APART = 0.01
VICTIM, GUEST = "p4", "p5"
PHASE = {"width": WIDTH, "seconds": SECONDS, "steps": 10_000, "local": 1}


@dataclass(frozen=True)
class Case:
    system: str
    fault: str


def measure(case: Case) -> Line:
    """Inside the lab."""
    for member in ("p1", "p2", "p3", VICTIM, GUEST):
        netlab.change(member, up=MBIT, down=MBIT, rtt=RTT)
    with tempfile.TemporaryDirectory() as folder:
        found = of_cocktail(case, Path(folder)) if case.system == "cocktail" else of_rival(case, Path(folder))
    return {**asdict(case), **found, "date": time.strftime("%Y-%m-%d")}


def strike(fault: str) -> None:
    if fault == "dark":
        netlab.link(VICTIM, "down")
    elif fault in ("kill", "stop"):
        signal_all(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def heal(fault: str) -> None:
    if fault == "dark":
        netlab.link(VICTIM, "up")
    elif fault == "stop":
        signal_all(signal.SIGCONT)


def signal_all(number: int) -> None:
    """Signal every process of the victim: some rivals have several."""
    command = ["ip", "netns", "pids", f"lab-{VICTIM}"]
    for pid in map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()):
        os.kill(pid, number)


def watch(fault: str, struck: float, all_over: Callable[[], bool] = lambda: False) -> None:
    """Mend the fault in time, and wait until it has been watched for long enough."""
    if fault in LASTS:
        time.sleep(max(0.0, struck + LASTS[fault] - time.monotonic()))
        heal(fault)
    while time.monotonic() < struck + FAULTS[fault] and not all_over():
        time.sleep(0.2)


def stall(times: Sequence[float], struck: float, watched: float) -> Line:
    """Compare an ordinary step of the first peer with the longest since the fault, which may still last."""
    usual = median(b - a for a, b in pairwise([t for t in times if t < struck]))
    since = [b - a for a, b in pairwise([*times, watched]) if b >= struck]
    return {"usual": usual, "stalled": max(0.0, max(since) - usual), "steps": len(since) - 1}


# ---- rivals ------------------------------------------------------------------------------------------------


def of_rival(case: Case, folder: Path) -> Line:
    system, members = SYSTEMS[case.system], ["p1", "p2", "p3", VICTIM]
    asked: Line = {"save": str(folder), "timeout": TIMEOUT_S, "chunk_s": CHUNK_S, "all_s": TIMEOUT_S}
    if system.module == systems.HIVEMIND and case.fault == "late":
        asked |= {"group": 5, "matchmaking": 3.0}  # a group waits so long for a fifth
    if system.module == systems.TORCHFT:
        asked["least"] = len(members) // 2 + 1  # a majority, as its documentation recommends
    with systems.ranks(system, members, **asked) as ranks:
        ranks.tell(**PHASE)
        first = ranks.ranks[0]
        first.until("step", BEFORE, timeout=200)
        time.sleep(max(0.0, first.heard("step")[-1]["t"] + STRIKE_RIVALS - time.monotonic()))
        struck = time.monotonic()
        strike(case.fault)
        guest = late(ranks, struck) if case.fault == "late" else {}
        watch(case.fault, struck, lambda: all(rank.ended for rank in ranks.ranks[:3]))
        watched, over = time.monotonic(), all(rank.ended for rank in ranks.ranks[:3])
        steps = [line["t"] for line in first.heard("step")]
        failed = [line["error"] for rank in ranks.ranks for line in rank.heard("failed")[:1]]
        if case.fault in LASTS and (back := joined(ranks.ranks[3], struck + LASTS[case.fault])):
            guest["back"] = back
        if system.module == systems.TORCHFT:
            told = [line for rank in ranks.ranks for line in (*rank.heard("step"), *rank.heard("failed"))]
            missing = not_counted(first.heard("step"), told, case.fault == "kill")
        else:
            missing = lost(case, over, bool(failed))
    survivors = range(3 if case.fault == "kill" else 4)
    errors = sorted({error.rpartition("RuntimeError: ")[2] for error in failed})
    found = stall(steps, struck, watched) | guest | {"errors": errors, "over": over}
    return found | apart(folder, survivors) | {"lost": missing}


def late(ranks: systems.Ranks, struck: float) -> Line:
    """Start a fifth peer as the others were; the seconds until it is in a step, None where it never was."""
    guest = ranks.start(GUEST)
    guest.tell(**PHASE)
    while time.monotonic() < struck + FAULTS["late"]:
        if (after := joined(guest, struck)) is not None:
            return {"joined": after}
        time.sleep(0.1)
    return {"joined": None}


def joined(rank: Process, since: float) -> float | None:
    """Find how long after this moment the peer was in a mean with others."""
    means = (line["t"] for line in rank.heard("averaged") if line["group"] > 1)
    return next((moment - since for moment in means if moment > since), None)


def not_counted(first: Sequence[Line], told: Sequence[Line], killed: int) -> int:
    """Compare the batches that torchft's manager counts in the first peer's model with those computed for it.

    Args:
        first: the steps of the first peer
        told: the steps of all peers, and those that failed
        killed: the peers that were killed in a step
    """
    newest = first[-1]
    tries = [line for line in told if line.get("tried", line["step"]) <= newest["step"]]
    replaced = sum(line.get("replaced", False) for line in tries)
    return work.BATCH * (len(tries) + killed + replaced - newest["batches"])


def lost(case: Case, over: bool, failed: bool) -> int | None:
    """Count the samples. A step that all failed in is lost whole, with a killed peer's share; None: unknown,
    as hivemind does not tell whose parts a mean has."""
    if over:
        return work.PEERS * work.BATCH
    if case.system.startswith("hivemind"):
        return None if failed or case.fault in ("kill", "stop", "dark") else 0
    return 0


def apart(folder: Path, ranks: Sequence[int]) -> Line:
    """Compare the models with the first peer's, after the last step that all have made."""
    made = [{int(p.stem.split("-")[1]) for p in folder.glob(f"{rank}-*.pt")} for rank in ranks]
    if not (common := set.intersection(*made)):
        return {"apart": None, "furthest": None}
    step = max(common)
    models = [torch.load(folder / f"{rank}-{step}.pt") for rank in ranks]
    start = torch.nn.utils.parameters_to_vector(work.make_model(WIDTH).parameters()).detach()
    moved = float((models[0] - start).norm())
    away = [float((model - models[0]).norm()) / max(moved, 1e-12) for model in models[1:]]
    return {"apart": sum(far > APART for far in away), "furthest": max(away), "compared_after": step}


# ---- cocktail ----------------------------------------------------------------------------------------------


def of_cocktail(case: Case, folder: Path) -> Line:
    rounds = BEFORE + 16 + round(FAULTS[case.fault] / SECONDS)
    with systems.cocktail(systems.Cocktail(folder, WIDTH, SECONDS), rounds, together=2) as run:
        first = run.peers[0]
        run.until_round(0, 120)  # all are in
        run.until_round(first.heard("round")[-1]["round"] + BEFORE, 120)
        time.sleep(max(0.0, first.heard("round")[-1]["end"] + STRIKE - time.monotonic()))
        struck = time.monotonic()
        strike(case.fault)
        guest = run.join(GUEST) if case.fault == "late" else None
        watch(case.fault, struck)
        run.hub.until("run_finished")
        survivors = [p for p in run.members if not (case.fault == "kill" and p.member == VICTIM)]
        for member in survivors:
            member.end()
        told = {p.member: p.heard("round") for p in survivors if p is not run.hub}
        prints = [{r["round"]: r["fingerprint"] for r in each} for each in told.values()]
        last = max(set.intersection(*(set(p) for p in prints)))
        times = [r["end"] for r in told[first.member]]
        found = stall(times, struck, times[-1]) | {"errors": [], "over": False, "compared_after": last}
        found["apart"] = sum(p[last] != prints[0][last] for p in prints[1:])
        found["furthest"] = None if found["apart"] else 0.0
        if guest:
            found["joined"] = counted_after(told[GUEST], struck)
        if case.fault in LASTS:
            found["back"] = counted_after(told[VICTIM], struck + LASTS[case.fault])
        with Ledger(folder / "out" / "ledger", write=False) as ledger:
            audit = ledger.verify()
    return found | {"lost": audit.missing, "counted": audit.counted}


def counted_after(told: list[Line], since: float) -> float | None:
    """Find how long after this moment the first round ended that has the peer's packet."""
    return next((r["end"] - since for r in told if r["accepted"] and r["end"] > since), None)


def main() -> None:
    args = rows.options(__doc__, rows.FOLDER / "faults.jsonl", system=RIVALS, fault=FAULTS).parse_args()
    if args.inside:
        print(json.dumps(measure(Case(**json.loads(args.inside)))))
        return
    if args.list:
        print("\n".join([*RIVALS, *FAULTS]))
        return
    for case in [Case(system, fault) for system in args.system for fault in args.fault]:
        own = ["-m", "scripts.comparison.faults", "--inside", json.dumps(asdict(case))]
        (found,) = lab.inside(own, lab.options(5))
        rows.keep(args.out, found, ("system", "fault"))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
