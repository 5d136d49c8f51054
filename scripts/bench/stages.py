"""Pipeline stages as processes with real lines: what they hold, and how long they wait.

    scripts/start scripts.bench.stages machines --stages 2 4     peak of each machine of a real replica
    scripts/start scripts.bench.stages idle --bits 4 --gradient-bits 8     waiting for lines, in a lab

`idle` is measured at GPT-J's ratios, not at its size: a token's compute on a stage (--token-ms) is slept, and
lines are as much slower than --mbit as activations are narrower than its 4,096 values; --slower slows all of
it. Idle from lines is the share of a step that the same step over unlimited lines does not take.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from cocktail_cli.assembly import recipe_type
from cocktail_cli.extensions.stages.compute import cut_at_layers
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process, say, started
from scripts.swarms.stage_process import config_of
from scripts.swarms.tcp_link import free_port
from transport.protocol import CurveKeys

GPTJ_WIDTH = 4096
LENGTH = 256
ROWS = 4  # samples of a micro-batch


def machines(given: argparse.Namespace) -> None:
    """Say the peak of each machine of a replica, loaded by its head, beside that of an ordinary peer."""
    config = {"width": given.width, "layers": given.layers, "length": 64}
    with tempfile.TemporaryDirectory() as place, started("scripts.swarms.ring_process") as begins:
        base, written = Path(place) / "model", Path(place) / "recipe.json"
        torch.manual_seed(0)
        LlamaForCausalLM(config_of(config)).save_pretrained(base)
        sections = {"model": {"model_name_or_path": str(base)}, "datasets": [{"path": "none"}]}
        told = {"version": 1, "name": "stages", "stages": {}} | sections
        written.write_text(cut_at_layers(recipe_type(told).model_validate(told), base).to_json())
        asked = {"recipe": str(written), "base": str(base), "length": 64, "micro_batches": 8}
        one = begins("whole", "", **asked).until("weighed", timeout=600.0)
        say(
            "machines",
            stages=1,
            peak_mb=round(one["peak"] / 1e6),
            loss=one["loss"],
            parameters=one["parameters"],
        )
        for stages in given.stages:
            addresses = [f"127.0.0.1:{free_port()}" for _ in range(stages)]
            pairs = [CurveKeys.generate() for _ in range(stages)]
            asked |= {"addresses": addresses, "keys": [(pair.public, pair.secret) for pair in pairs]}
            others = [begins("stage", "", number=number, **asked) for number in range(1, stages)]
            for process in others:
                process.until("ready")
            head = begins("head", "", number=0, **asked).until("weighed", timeout=600.0)
            for process in others:
                process.tell(do="weigh")
            found = [head, *(process.until("weighed") for process in others)]
            shares = [round(stages * line["parameters"], 3) for line in found]
            peaks = [round(stages * line["peak"] / one["peak"], 3) for line in found]
            say("machines", stages=stages, shares=shares, peaks=peaks, loss=head["loss"])


def idle(given: argparse.Namespace) -> None:
    """Make the lab, and in it measure the step."""
    stages = max(given.stages)
    program_ = ["-m", "scripts.bench.stages", "inside", "--stages", str(stages), "--bits", str(given.bits)]
    program_ += ["--gradient-bits", str(given.gradient_bits), "--token-ms", str(given.token_ms)]
    program_ += ["--mbit", str(given.mbit), "--rtt", str(given.rtt), "--width", str(given.width)]
    program_ += ["--micro-batches", str(given.micro_batches), "--steps", str(given.steps)]
    program_ += ["--slower", str(given.slower)]
    for row in lab.inside(program_, lab.options(stages, queue=50.0)):
        say("idle", **{name: value for name, value in row.items() if name not in ("t", "kind")})


def inside(given: argparse.Namespace) -> None:
    """In the lab: the same step over unlimited lines and over shaped ones."""
    stages = max(given.stages)
    members = [f"p{number + 1}" for number in range(stages)]
    scale = given.width / GPTJ_WIDTH / given.slower
    took, sent, busy = dict[str, float](), 0.0, dict[str, float]()
    with started("scripts.swarms.stage_process") as begins:
        ring = list[Process]()
        for number, member in enumerate(members):
            asked = {name: getattr(given, name) for name in ("width", "bits", "gradient_bits")}
            asked |= {"number": number, "stages": stages, "layers": stages, "length": LENGTH}
            asked |= {"places": ROWS * given.micro_batches, "token_s": given.token_ms * given.slower / 1e3}
            ring.append(begins("stage", member, host=host_of(member), gone_s=60.0, **asked))
        connect(ring)
        for lines in ("unlimited", "shaped"):
            if lines == "shaped":
                for member in members:
                    rate = given.mbit * scale
                    netlab.change(member, up=rate, down=rate, rtt=given.rtt / 2 * given.slower)
            steps = [step(ring, given.micro_batches) for _ in range(given.steps)]
            took[lines], busy[lines], sent = sorted(steps)[len(steps) // 2]
    say(
        "idle",
        stages=stages,
        bits=[given.bits, given.gradient_bits],
        token_ms=given.token_ms,
        mbit=given.mbit,
        rtt=given.rtt,
        slower=given.slower,
        micro_batches=given.micro_batches,
        seconds={lines: round(value, 2) for lines, value in took.items()},
        busy={lines: round(value, 3) for lines, value in busy.items()},
        idle_from_lines=round(1 - took["unlimited"] / took["shaped"], 3),
        line_used=round(sent * 8e-6 / (given.mbit * scale) / took["shaped"], 3),
    )


def host_of(member: str) -> str:
    return f"{netlab.NET}{netlab.number_of(member)}"


def connect(ring: list[Process]) -> None:
    """Tell each stage its neighbours."""
    named = list[Line]()
    for number, process in enumerate(ring):
        ready = process.until("ready")
        at = f"{host_of(process.member)}:{ready['port']}"
        named.append({"name": f"stage {number}", "key": ready["key"], "address": at})
    for number, process in enumerate(ring):
        process.tell(do="connect", before=named[number - 1], after=named[(number + 1) % len(ring)])


def step(ring: list[Process], micro_batches: int) -> tuple[float, float, float]:
    """Take a step; returns its seconds, the share that a stage works, and the bytes that it sends."""
    number = 1 + len(ring[0].heard("stepped"))
    lease = [[*range(at, at + ROWS)] for at in range(0, ROWS * micro_batches, ROWS)]
    for process in ring:
        process.tell(do="step", number=number, lease=lease, in_flight=6 * len(ring))
    found = [process.until("stepped", number, 300.0) for process in ring]
    whole = max(line["ended"] for line in found) - min(line["first"] for line in found)
    busy, sent = (sum(line[name] for line in found) / len(found) for name in ("busy", "sent"))
    return whole, busy / whole, sent


def main() -> None:
    root = lab.parser(__doc__)
    root.add_argument("what", choices=("machines", "idle", "inside"))
    root.add_argument("--stages", type=int, nargs="+", default=[2])
    root.add_argument("--steps", type=int, default=6)
    root.add_argument("--bits", type=int, default=32)
    root.add_argument("--gradient-bits", type=int, default=32)
    root.add_argument("--layers", type=int, default=24)
    root.add_argument("--width", type=int, default=64)
    root.add_argument("--micro-batches", type=int, default=24)
    root.add_argument("--token-ms", type=float, default=0.5)
    root.add_argument("--mbit", type=float, default=100.0)
    root.add_argument("--rtt", type=float, default=40.0, help="ms between two stages")
    root.add_argument(
        "--slower", type=float, default=1.0, help="compute and lines, on a machine with other work"
    )
    given = root.parse_args()
    globals()[given.what](given)


if __name__ == "__main__":
    main()
