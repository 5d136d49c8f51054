"""What peers that own shards send and receive over shaped links, and how long a round takes them.

    python scripts/bench_owners.py --peers 4 --mbit 20 --rtt 40 --steps 40

Real `cocktail launch` and `cocktail join --listen` in a network lab, each peer behind a link of its own, with
the whole vector in FP16 (2 MB) as packet. The paper's bound: each way 2 (N-1)/N packets a peer and round,
half of it parts, half of it aggregates. `counted` is what a peer says it sent (ZMTP and CURVE framing, leases
and all messages included), `wire` what its network card says, with TCP, IP and Ethernet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import line_lab as lab

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transport import Ledger

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ["smoke", "swarm.owners=peers", "compression.shards=16", "preset=allreduce"]
RECIPE += ["data.max_length=32", "global_batch_size=8", "eval_steps=100000", "swarm.step_timeout=120"]
RECIPE += ["weight_decay=0.1"]  # every coordinate moves: what owners have is alike
FIRST = 5  # the first round that is measured: before, everybody joins


def command(member: str, folder: Path, *words: str, stdin: str = "") -> subprocess.Popen[str]:
    """`cocktail` in the namespace of a member, a machine of its own; its events in `told` of its folder."""
    folder.mkdir(parents=True)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", f"lab-{member}", sys.executable, "-m", "cocktail_cli", *words, "--json"],
        stdin=subprocess.PIPE,
        stdout=(folder / "told").open("w"),
        stderr=(folder / "said").open("w"),
        env=os.environ | environment | {"COCKTAIL_HOME": str(folder / "home")},
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    return process


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "told").read_text().splitlines(keepends=True)
    return [e for e in map(json.loads, (x for x in lines if x.endswith("\n"))) if e.get("event") == kind]


def on_the_wire(member: str) -> dict[str, int]:
    """Bytes of its network card so far."""
    shown = subprocess.run(
        ["ip", "-n", f"lab-{member}", "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True
    )
    counted = json.loads(shown.stdout)[0]["stats64"]
    return {"up": counted["tx"]["bytes"], "down": counted["rx"]["bytes"]}


def measure(peers: int, steps: int, folder: Path) -> dict[str, Any]:
    """Inside the lab: one run."""
    hub, out = folder / "hub", folder / "out"
    launch = ["launch", *RECIPE, f"max_steps={steps}", f"swarm.min_peers={peers}", "--no-train"]
    launch += ["--advertise", "10.77.0.1", "-o", str(out)]
    processes = [command("hub", hub, *launch)]
    try:
        lab.wait_for(lambda: told(hub, "run_started"), "the hub", 120)
        url = told(hub, "run_started")[0]["url"]
        members = [f"p{i}" for i in range(1, peers + 1)]
        for number, member in enumerate(members, 11):
            listen = ["--listen", "0.0.0.0:29401", "--advertise", f"10.77.0.{number}"]
            join = ["join", "-", "-y", "--name", member, *listen]
            processes.append(command(member, folder / member, *join, stdin=url + "\n"))

        def newest() -> int:
            ended = [process.args for process in processes if process.poll()]
            assert not ended, f"{ended[0]} has failed; {folder}"
            return max((event["round"] for event in told(hub, "step")), default=-1)

        lab.wait_for(lambda: newest() >= FIRST, f"round {FIRST}; {folder}", 300)
        before, began, started = {m: on_the_wire(m) for m in members}, newest(), time.monotonic()
        lab.wait_for(lambda: newest() >= steps - 2, f"the last round; {folder}", 500)
        seconds, ended = time.monotonic() - started, newest()
        after = {m: on_the_wire(m) for m in members}
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
    still = [e["message"] for e in told(hub, "warning")]
    return {"seconds": seconds / (ended - began), "warnings": still} | found(
        folder, members, (began, ended), before, after
    )


def found(folder: Path, members: list[str], rounds: tuple[int, int], before: Any, after: Any) -> Any:
    """Bytes over the bound, peer by peer, after the first of these rounds to the end of the second."""
    share, began, ended = (len(members) - 1) / len(members), *rounds
    with Ledger(folder / "out" / "ledger", write=False) as ledger:
        sizes = [row.length for row in ledger.rounds()]
    counted: dict[str, list[float]] = {"up": [], "down": []}
    cards: dict[str, list[float]] = {"up": [], "down": []}
    for member in members:
        steps = [step for step in told(folder / member, "step") if began < step["round"] <= ended]
        bound = share * sum(step["packet_bytes"] + sizes[step["round"]] for step in steps)
        wire = share * 2 * sum(sizes[began + 1 : ended + 1])
        for way in ("up", "down"):
            counted[way].append(sum(step[f"{way}_bytes"][member] for step in steps) / bound)
            cards[way].append((after[member][way] - before[member][way]) / wire)
    return {"packet": sizes[-1], "bound": 2 * share * sizes[-1], "counted": counted, "wire": cards}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--peers", type=int, default=4)
    asked.add_argument("--mbit", type=float, default=20.0, help="of each peer's link, either way")
    asked.add_argument("--rtt", type=float, default=40.0, help="ms")
    asked.add_argument("--steps", type=int, default=40)
    asked.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.inside:
        print(json.dumps(measure(given.peers, given.steps, given.inside)))
        return
    line = ["--peers", str(given.peers), "--up", str(given.mbit), "--down", str(given.mbit)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--peers", str(given.peers), "--steps", str(given.steps), "--inside", folder]
        (row,) = lab.inside(__file__, arguments, [*line, "--rtt", str(given.rtt)])
    floor = row["bound"] * 8 / given.mbit / 1e6
    print(f"{given.peers} peers, {given.mbit:g} Mbit/s each way, {given.rtt:g} ms, {row['packet']:,} bytes")
    print(f"each way {row['bound']:,.0f} bytes a peer and round, {floor:.2f} s of the line")
    for way in ("up", "down"):
        for what in ("counted", "wire"):
            shares = " ".join(f"{share:.4f}" for share in row[what][way])
            print(f"{way:<5} {what:<8} {shares} of that, by peer")
    print(f"a round took {row['seconds']:.2f} s")
    for warning in row["warnings"]:
        print(f"warning: {warning}")


if __name__ == "__main__":
    main()
