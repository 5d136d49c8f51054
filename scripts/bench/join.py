"""The time that a late peer takes to join a real run, on a line as people have it at home.

    scripts/start scripts.bench.join --rate 20 --rtt 40 --megabytes 40 --rounds 20

In a network lab (exit 77 and the reason where it cannot be made): `cocktail launch` with one local peer, and
once `--rounds` are committed a `cocktail join` behind a line of `--rate` Mbit/s both ways. It prints the
seconds from the hub's welcome until the global model is here, against 1.15 x bytes / bandwidth + 2 s, how
long Python, imports and the dialling took before, and the rounds committed meanwhile. With --alone the other
peer is stopped meanwhile (SIGSTOP): the late one has the processor to itself, as on a machine of its own.
With --helpers so many peers with lines like the late one's train already, can be reached, and pass files on;
--hub is then the rate of the hub's line.
With --out the figures, with the time until a round has the late peer's packet, become a line of that file, in
the place of the older one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from scripts.netlab import lab as netlab
from scripts.report import rows
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process, wait_for
from scripts.swarms.random_models import save_random


def make_model(folder: Path, megabytes: float) -> None:
    """Save a GPT-NeoX of about that size in FP32, with the builtin tokenizer."""
    width = 256
    layers = max(1, round((megabytes * 1e6 / 4 - 2 * 2048 * width) / (12 * width * width)))
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "max_position_embeddings": 128}
    sizes |= {"vocab_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 4}
    save_random(folder, "GPTNeoXConfig", **sizes)


def cocktail(member: str, home: Path, *arguments: str) -> Process:
    home.mkdir()
    return Process([sys.executable, "-m", "cocktail_cli", *arguments], member, COCKTAIL_HOME=str(home))


def helper(folder: Path, url: str, number: int) -> Process:
    """Start a peer that others reach."""
    member = f"p{number + 2}"
    listen = f"{netlab.NET}{netlab.number_of(member)}:29501"
    where = folder / f"helper-{number}"
    return cocktail(member, where, "join", url, "-y", "--json", "--name", where.name, "--listen", listen)


def state(line: Line) -> str:
    """Name the late peer's progress: its `state`, else the event."""
    return str(line.get("state", line.get("event", ""))).split(" to round")[0]


def measure(folder: Path, args: argparse.Namespace) -> Line:
    """Inside the lab: one launch and one join."""
    make_model(folder / "model", args.megabytes)
    recipe = [f"model.model_name_or_path={folder / 'model'}", "data.max_length=32"]
    recipe += ["training.max_steps=5000", "training.global_batch_size=2", *args.override]
    place = ["--bind", "10.77.0.1", "--port", "29400", "--advertise", "10.77.0.1", "-o", str(folder / "out")]
    launch = cocktail("hub", folder / "host", "launch", "smoke", "--json", *place, *recipe)
    join, helpers = None, list[Process]()
    try:
        url = launch.until("run_started")["url"]
        helpers += [helper(folder, url, number) for number in range(args.helpers)]
        for one in helpers:
            one.until("step", 1, 600)
        if args.hub:
            netlab.change("hub", up=args.hub, down=args.hub)
        last = launch.until("step", args.rounds + 1, 600)["round"]
        other = int((folder / "out" / "peers" / "local-1.pid").read_text())
        if args.alone:
            os.kill(other, signal.SIGSTOP)
        started = time.monotonic()
        join = cocktail("p1", folder / "volunteer", "join", url, "-y", "--json", "--name", "late")
        wait_for(lambda: join.ended or any(state(line) == "caught up" for line in list(join.said)), "it", 600)
        if args.alone:
            os.kill(other, signal.SIGCONT)
        counted = join.until("step")["came"] if args.out else started
    finally:
        for process in filter(None, (join, *helpers, launch)):
            process.stop(signal.SIGINT, 60)
    times: dict[str, float] = {}
    for line in join.said:
        times.setdefault(state(line), line["came"])
    caught_up = next(line for line in join.said if state(line) == "caught up")
    size = [line["done"] for line in join.heard("progressed") if line["unit"] == "bytes"][-1]
    found = {"mbit": args.rate, "megabytes": args.megabytes, "bytes": size, "date": time.strftime("%Y-%m-%d")}
    if args.helpers:
        found["helpers"], found["hub"] = args.helpers, args.hub
    seconds = {"here_s": times["caught up"] - times["joined"], "start_s": times["joined"] - started}
    seconds["counted_s"] = counted - started
    rounds = int(caught_up["state"].split()[4]) - last
    phases = {name: at - times["joined"] for name, at in times.items()}
    return found | seconds | {"rounds": rounds, "phases": phases}


def main() -> None:
    asked = lab.parser(__doc__)
    asked.add_argument("--rate", type=float, default=20.0, help="Mbit/s, both ways")
    asked.add_argument("--rtt", type=float, default=40.0, help="ms")
    asked.add_argument("--megabytes", type=float, default=40.0, help="of the model in FP32")
    asked.add_argument("--rounds", type=int, default=20, help="committed before the late peer starts")
    asked.add_argument("--helpers", type=int, default=0, help="peers that pass files on")
    asked.add_argument("--hub", type=float, default=0.0, help="Mbit/s of the hub's line; 0: unlimited")
    asked.add_argument("--alone", action="store_true", help="the other peer is stopped meanwhile")
    asked.add_argument("--out", type=Path)
    asked.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("override", nargs="*", help="of the recipe")
    args = asked.parse_args()
    if args.inside:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), args)))
        return
    line = lab.options(1 + args.helpers, up=args.rate, down=args.rate, rtt=args.rtt)
    (found,) = lab.inside(["-m", "scripts.bench.join", "--inside", *sys.argv[1:]], line)
    floor, phases, rounds = found["bytes"] * 8 / (args.rate * 1e6), found.pop("phases"), found.pop("rounds")
    print(f"{args.rate:g} Mbit/s, {args.rtt:g} ms: {found['bytes'] / 1e6:.1f} MB, here after", end=" ")
    print(f"{found['here_s']:.1f} s (bound {1.15 * floor + 2:.1f} s, bytes / bandwidth {floor:.1f} s)")
    print(f"before it {found['start_s']:.1f} s of start-up and dialling")
    print(f"rounds committed since its command was given: {rounds}")
    print("phases:", ", ".join(f"{name} {seconds:+.1f}" for name, seconds in phases.items()))
    if args.out:
        rows.keep(args.out, found, ("mbit", "megabytes"))


if __name__ == "__main__":
    main()
