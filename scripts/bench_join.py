"""How long a late peer takes to join a real run, on a line as people have it at home (needs netlab).

    python scripts/bench_join.py --rate 20 --rtt 40 --megabytes 40 --rounds 20

Starts `cocktail launch` with one local peer in the hub's namespace, waits until `--rounds` are committed,
then starts `cocktail join` behind a line of `--rate` Mbit/s both ways. Told: seconds from the hub's welcome
until x' is here, against 1.15 x bytes / bandwidth + 2 s; how long Python, imports and the dialling took
before; and how the other peer's rounds went on meanwhile. With --alone that peer is stopped meanwhile
(SIGSTOP): the late one has the processor to itself, as on a machine of its own. With --out the figures go
into a file as well, a line of JSON that replaces the older one of this rate and size, with the time until a
round is committed that has the late peer's packet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measured import keep

ROOT = Path(__file__).resolve().parent.parent
NETLAB = [sys.executable, str(ROOT / "scripts" / "netlab.py")]
LAB = "benchjoin"
COCKTAIL = [sys.executable, "-m", "cocktail_cli"]


class Command:
    """A command of ours in a namespace; its events with the time they came at."""

    def __init__(self, member: str, home: Path, *arguments: str) -> None:
        environment = os.environ | {"COCKTAIL_HOME": str(home), "PYTHONPATH": str(ROOT)}
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*NETLAB, "exec", LAB, member, "--", *COCKTAIL, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=home,
        )

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield time.monotonic(), json.loads(line)

    def until(self, event: str, **at_least: int) -> tuple[float, dict[str, Any]]:
        for at, told in self.events():
            if told.get("event") == event and all(told[key] >= value for key, value in at_least.items()):
                return at, told
            if "error" in told:
                raise SystemExit(told["error"]["message"])
        raise SystemExit(f"the command ended with {self.process.wait()} before it told {event}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def make_model(folder: Path, megabytes: float) -> None:
    """A GPT-NeoX of about that size in FP32, with the tokenizer of the builtin one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

    width = 256
    layers = max(1, round((megabytes * 1e6 / 4 - 2 * 2048 * width) / (12 * width * width)))
    config = GPTNeoXConfig(
        vocab_size=2048,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "builtin" / "tiny-gpt-neox").save_pretrained(folder)


@contextmanager
def lab(rate: float, rtt: float) -> Iterator[None]:
    line = ["--up", str(rate), "--down", str(rate), "--rtt", str(rtt)]
    subprocess.run([*NETLAB, "up", LAB, "--peers", "1", *line], check=True)
    try:
        yield
    finally:
        subprocess.run([*NETLAB, "down", LAB], check=True)


def measure(folder: Path, args: argparse.Namespace) -> None:
    make_model(folder / "model", args.megabytes)
    overrides = [f"model.model_name_or_path={folder / 'model'}", "data.max_length=32"]
    overrides += ["training.max_steps=5000", "training.global_batch_size=2", *args.override]
    place = ["--bind", "10.77.0.1", "--port", "29400", "--advertise", "10.77.0.1", "-o", str(folder / "out")]
    for home in ("owner", "volunteer"):
        (folder / home).mkdir()
    launch = Command("hub", folder / "owner", "launch", "smoke", "--json", *place, *overrides)
    try:
        _, started = launch.until("run_started")
        _, last = launch.until("step", round=args.rounds)
        other = int((folder / "out" / "peers" / "local-1.pid").read_text())
        if args.alone:
            os.kill(other, signal.SIGSTOP)
        join = Command("p1", folder / "volunteer", "join", started["url"], "-y", "--json", "--name", "late")
        times: dict[str, float] = {}
        for at, told in join.events():
            if "error" in told:
                raise SystemExit(told["error"]["message"])
            state = told.get("state", told.get("event", "")).split(" to round")[0]
            times.setdefault(state, at)
            if told.get("event") == "progressed" and told["unit"] == "bytes":
                size = told["done"]
            if state == "caught up":
                break
        if args.alone:
            os.kill(other, signal.SIGCONT)
        counted = join.until("step")[0] if args.out else 0.0
        join.end()
        rounds = int(told["state"].split()[4]) - last["round"]
        took, bound = times["caught up"] - times["joined"], 1.15 * size * 8 / (args.rate * 1e6) + 2
        print(
            f"{args.rate:g} Mbit/s, {args.rtt:g} ms: {size / 1e6:.1f} MB, here after "
            f"{took:.1f} s (bound {bound:.1f} s, bytes / bandwidth {size * 8 / (args.rate * 1e6):.1f} s); "
            f"of this from `loading the model` on {times['caught up'] - times['loading the model']:.1f} s; "
            f"before it {times['joined'] - join.started:.1f} s of start-up and dialling"
        )
        print(f"rounds committed since its command was given: {rounds}")
        if args.out:
            keep(
                args.out,
                {
                    "mbit": args.rate,
                    "megabytes": args.megabytes,
                    "bytes": size,
                    "here_s": took,
                    "start_s": times["joined"] - join.started,
                    "counted_s": counted - join.started,
                    "date": time.strftime("%Y-%m-%d"),
                },
                ("mbit", "megabytes"),
            )
        print("phases:", ", ".join(f"{name} {at - times['joined']:+.1f}" for name, at in times.items()))
    finally:
        launch.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s, both ways")
    parser.add_argument("--rtt", type=float, default=40.0, help="ms")
    parser.add_argument("--megabytes", type=float, default=40.0, help="of the model in FP32")
    parser.add_argument("--rounds", type=int, default=20, help="committed before the late peer starts")
    parser.add_argument("--alone", action="store_true", help="the other peer is stopped meanwhile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("override", nargs="*", help="of the recipe")
    args = parser.parse_args()
    with lab(args.rate, args.rtt), tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args)


if __name__ == "__main__":
    main()
