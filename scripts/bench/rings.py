"""Rings of lent machines as real processes of a run: what a kill costs, and how they avoid a thin line.

    scripts/start --test scripts.bench.rings kills --samples 48 --kill stage head     beside another peer
    scripts/start --test scripts.bench.rings kills --samples 48 --kill peer           without a ring
    scripts/start --test scripts.bench.rings thin                                     in a network lab

`kills`: four machines lend, three are the ring, the fourth waits, and an ordinary peer trains. .4 of a round
after a commit one gets a kill -9: stage 1, the head, or the ordinary peer, which is started again at once.
Seconds are from the kill on; rounds are counted as those committed until then. `told`: the first step of the
ring (of that peer) after it.

`thin`: four machines are needed; between the first two that come only --mbit pass. Two more come, the first
of which has such a line to stage 1, and stage 2 gets a kill -9. Prints who is in the ring, in order.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts import ROOT
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.commands import REPLICA
from scripts.swarms.lent_machines import SMOKE, LentMachines, ring_of
from scripts.swarms.processes import Line, Process, say, wait_for
from scripts.swarms.tcp_link import free_port

NAMES = ("ann", "bob", "cid", "dan")
PATIENCE = 1200.0
BEFORE = 5  # rounds of both peers before the kill
LOOK = 0.05
PORT = 29501
QUARTER = "24MB"  # that four machines lend to the model of `thin`, which three do not hold
BUILTIN = ROOT / "recipes" / "builtin" / "tiny-gpt-neox"


def event_of(
    what: str, process: Process, kind: str, wanted: Callable[[Line], object], after: float = 0.0
) -> Line:
    """Wait for an event of a process that comes `after` a time and for which `wanted` holds."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for line in process.heard(kind):
            if line["came"] > after and wanted(line):
                return line
        if process.ended:
            break
        time.sleep(LOOK)
    raise SystemExit(f"no {what}; the last it said: {process.said[-1:]}")


def kills(given: argparse.Namespace) -> None:
    """Kill one machine in a run of its own, for each kind that is asked for."""
    for kind in given.kill:
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            kill(LentMachines(Path(place), stack), kind, given)


def kill(swarm: LentMachines, kind: str, given: argparse.Namespace) -> None:
    keys = [
        f"max_steps={given.steps}",
        f"global_batch_size={given.samples}",
        f"compression.staleness={given.staleness}",
    ]
    host, url = swarm.launch(*keys)
    listen = {name: ("--listen", f"127.0.0.1:{free_port()}") for name in NAMES}
    machines = {name: swarm.join(url, name, "--layers", SMOKE, *listen[name]) for name in NAMES}
    ring = ring_of(event_of("ring", host, "stages", ring_of))
    event_of("ready ring", host, "peer_ready", lambda line: line["peer"] == ring[0] + REPLICA)
    machines["eve"] = swarm.join(url, "eve")
    both = {ring[0] + REPLICA, "eve"}
    event_of("peer beside it", host, "step", lambda line: {*line["accepted"]} == both)
    rounds = f"{BEFORE} rounds of both"
    wait_for(
        lambda: sum({*line["accepted"]} == both for line in host.heard("step")) > BEFORE, rounds, PATIENCE
    )
    steps = [line["came"] for line in host.heard("step")]
    usual = lengths(steps[-BEFORE - 1 :])
    time.sleep(max(0.0, steps[-1] + 0.4 * median(usual) - time.monotonic()))
    victim = {"stage": ring[1], "head": ring[0], "peer": "eve"}[kind]
    machines[victim].signal(signal.SIGKILL)
    killed, load = time.monotonic(), os.getloadavg()[0]
    if kind == "peer":
        machines["eve"] = swarm.join(url, "eve")
        back, again, placed = "eve", machines["eve"], None
    else:
        placed = event_of(
            "replacement", host, "stages", lambda line: victim not in ring_of(line) != [], killed
        )
        back = ring_of(placed)[0] + REPLICA
        again = machines[ring_of(placed)[0]]
    ready = event_of("ready", host, "peer_ready", lambda line: line["peer"] == back, killed)
    told = event_of("step told", again, "step", lambda line: line["loss"] is not None, ready["came"])
    left = {line["peer"]: line["came"] - killed for line in host.heard("peer_left") if line["came"] > killed}
    finished = host.until("run_finished", timeout=PATIENCE)
    commits = [line["came"] for line in host.heard("step")]
    say(
        "killed",
        what=kind,
        samples=given.samples,
        staleness=given.staleness,
        load=round(load, 1),
        round_s=round(median(usual), 2),
        placed_s=placed and round(placed["came"] - killed, 2),
        left_s={peer: round(after, 2) for peer, after in left.items()},
        ready_s=round(ready["came"] - killed, 2),
        ready_rounds=round((ready["came"] - killed) / median(usual), 2),
        ready_commits=sum(killed < at <= ready["came"] for at in commits),
        told_s=round(told["came"] - killed, 2),
        told_commits=sum(killed < at <= told["came"] + 0.5 * min(usual) for at in commits),
        longest_round_s=round(
            max(lengths([at for at in commits if killed - 2 * max(usual) < at < told["came"]])), 2
        ),
        steps=finished["steps"],
        once=swarm.verified() == given.samples * given.steps,
    )


def thin(given: argparse.Namespace) -> None:
    """Make the lab, and in it a ring around a thin line."""
    program = ["-m", "scripts.bench.rings", "inside", "--mbit", str(given.mbit)]
    for row in lab.inside(program, lab.options(6)):
        say("thin", **{name: value for name, value in row.items() if name not in ("t", "kind")})


def inside(given: argparse.Namespace) -> None:
    """In the lab: form the ring, let two more come, and kill one."""
    names = (*NAMES, "eve", "fay")
    members = {name: f"p{number}" for number, name in enumerate(names, 1)}
    netlab.between(members["ann"], members["bob"], given.mbit)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        swarm = LentMachines(Path(place), stack, members | {"host": "hub"})
        keys = [
            f"model.model_name_or_path={model(Path(place))}",
            "data.max_length=32",
            "global_batch_size=24",
        ]
        at_hub = f"{netlab.NET}{netlab.number_of('hub')}"
        host, url = swarm.launch("--advertise", at_hub, "max_steps=400", *keys)

        def lend(name: str) -> Process:
            listen = f"{netlab.NET}{netlab.number_of(members[name])}:{PORT}"
            return swarm.join(url, name, "--layers", QUARTER, "--listen", listen)

        machines = {name: lend(name) for name in NAMES}
        ring = ring_of(event_of("ring", host, "stages", ring_of))
        came = max((line["waiting"] for line in host.heard("stages")), key=len)
        slow, killed = ring[1], ring[2]
        netlab.between(members["eve"], members[slow], given.mbit)
        for name in ("eve", "fay"):
            machines[name] = lend(name)
            event_of(name, host, "stages", lambda line, name=name: name in line["waiting"])
        steps = [line["came"] for line in host.heard("step")]
        machines[killed].signal(signal.SIGKILL)
        at = time.monotonic()
        placed = event_of("replacement", host, "stages", lambda line: killed not in ring_of(line) != [], at)
        again = event_of("round", host, "step", lambda line: line["loss"] is not None, placed["came"] + 1.0)
        say(
            "inside",
            mbit=given.mbit,
            came=[*came, *({*NAMES} - {*came})],
            ring=ring,
            round_s=round(median(lengths(steps[2:])), 2),
            slow=["eve", slow],
            killed=killed,
            then=ring_of(placed),
            placed_s=round(placed["came"] - at, 2),
            step_s=round(again["came"] - at, 2),
            load=round(os.getloadavg()[0], 1),
        )


def model(folder: Path) -> Path:
    """Make the model of `smoke` with four layers; return its folder."""
    made = folder / "four-layers"
    shutil.copytree(BUILTIN, made)
    config = AutoConfig.from_pretrained(made)
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def lengths(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    root = lab.parser(__doc__)
    root.add_argument("what", choices=("kills", "thin", "inside"))
    root.add_argument("--kill", nargs="+", choices=("stage", "head", "peer"), default=["stage", "head"])
    root.add_argument("--samples", type=int, default=48, help="of a round")
    root.add_argument("--steps", type=int, default=40)
    root.add_argument("--staleness", type=int, default=1)
    root.add_argument("--mbit", type=float, default=0.4, help="of a thin line; 0: it is not thin")
    given = root.parse_args()
    globals()[given.what](given)


if __name__ == "__main__":
    main()
