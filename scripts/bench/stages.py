"""Pipeline stages as processes with real lines: what they compute, hold, survive and wait for.

    scripts/start scripts.bench.stages equal                     beside whole models: 2 stages x 2 replicas
    scripts/start scripts.bench.stages kill                      kill -9 of a stage in the middle of a step
    scripts/start scripts.bench.stages memory --stages 2 4       bytes of a stage's process, by what they are
    scripts/start scripts.bench.stages machines --stages 2 4     peak of each machine of a real replica
    scripts/start scripts.bench.stages idle --bits 4 --gradient-bits 8     waiting for lines, in a lab

This process stands in for the hub: it leases samples, adds gradients up, holds a snapshot and decides which
step is void.

`idle` is measured at GPT-J's ratios, not at its size: a token's compute on a stage (--token-ms) is slept, and
lines are as much slower than --mbit as activations are narrower than its 4,096 values; --slower slows all of
it. Idle from lines is the share of a step that the same step over unlimited lines does not take.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from cocktail_cli.assembly import recipe_type
from cocktail_cli.extensions.stages.compute import cut_at_layers
from recipes.data import collate
from recipes.models import loss_sum
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.processes import Line, Process, say, started
from scripts.swarms.stage_process import config_of, sample_of
from scripts.swarms.tcp_link import free_port
from transport.protocol import CurveKeys

GPTJ_WIDTH = 4096
PATIENCE = 300.0


@dataclass
class Case:
    """The model, how it is cut, and the work of a step."""

    stages: int = 2
    replicas: int = 2
    layers: int = 4
    width: int = 64
    length: int = 32
    rows: int = 2  # samples of a micro-batch
    micro_batches: int = 4  # of a replica's step
    in_flight: int = 8
    bits: int = 32
    gradient_bits: int = 32
    token_s: float = 0.0
    gone_s: float = 3.0
    tells: bool = False
    weighs: bool = False
    places: int = 64
    members: tuple[str, ...] = ()  # of the lab, one for each stage

    def asked(self, folder: Path, replica: int, number: int) -> Line:
        host = f"{netlab.NET}{netlab.number_of(self.members[number])}" if self.members else "127.0.0.1"
        told = {name: value for name, value in vars(self).items() if name != "members"}
        limit = (1 << 20) + 5 * self.rows * self.length * self.width
        more = {"replica": replica, "number": number, "host": host, "limit": limit, "folder": str(folder)}
        return told | more


@dataclass
class Replicas:
    """All processes, and the samples that they are leased."""

    case: Case
    folder: Path
    begins: Callable[..., Process]
    stages: dict[tuple[int, int], Process] = field(default_factory=dict)
    pool: list[int] = field(default_factory=list)
    counted: Counter[int] = field(default_factory=Counter)
    log: list[tuple[dict[int, list[list[int]]], dict[int, float]]] = field(default_factory=list)
    steps: int = 0

    def start(self, replica: int, number: int) -> Process:
        member = self.case.members[number] if self.case.members else ""
        self.stages[replica, number] = self.begins(
            "stage", member, **self.case.asked(self.folder, replica, number)
        )
        return self.stages[replica, number]

    def connect(self, replica: int) -> None:
        """Tell each stage of a replica its neighbours."""
        count, named = self.case.stages, dict[int, Line]()
        for number in range(count):
            ready = self.stages[replica, number].until("ready")
            host = self.case.asked(self.folder, replica, number)["host"]
            name = f"r{replica}s{number}"
            named[number] = {"name": name, "key": ready["key"], "address": f"{host}:{ready['port']}"}
        for number in range(count):
            both = {"before": named[(number - 1) % count], "after": named[(number + 1) % count]}
            self.stages[replica, number].tell(do="connect", **both)

    def of(self, replica: int) -> list[Process]:
        return [self.stages[replica, number] for number in range(self.case.stages)]

    def lease(self) -> list[list[int]]:
        """Take the samples of one replica's step out of the pool."""
        count = self.case.rows
        taken = [self.pool.pop(0) for _ in range(count * self.case.micro_batches)]
        return [taken[at : at + count] for at in range(0, len(taken), count)]

    def begin(self, replicas: Sequence[int]) -> dict[int, list[list[int]]]:
        self.steps += 1
        leases = {replica: self.lease() for replica in replicas}
        for replica, lease in leases.items():
            for process in self.of(replica):
                process.tell(do="step", number=self.steps, lease=lease, in_flight=self.case.in_flight)
        return leases

    def stepped(self, replica: int) -> list[Line]:
        """Wait until all stages of a replica have their part of the gradient."""
        return [await_step(process, "stepped", self.steps) for process in self.of(replica)]

    def apply(self, leases: dict[int, list[list[int]]]) -> None:
        """Let every stage that is alive take a step on the gradients of these replicas."""
        terms = {replica: self.stepped(replica)[0]["terms"] for replica in leases}
        weights = {replica: terms[replica] / sum(terms.values()) for replica in leases}
        alive = [process for process in self.stages.values() if not process.ended]
        for process in alive:
            process.tell(do="apply", number=self.steps, weights=weights)
        for process in alive:
            await_step(process, "applied", self.steps)
        self.counted.update(one for lease in leases.values() for part in lease for one in part)
        self.log.append((leases, weights))

    def snapshot(self, replica: int) -> list[str]:
        """Save every stage of a replica, as the hub's snapshot of the model."""
        files = [str(self.folder / f"snapshot-{number}.pt") for number in range(self.case.stages)]
        for process, file in zip(self.of(replica), files, strict=True):
            before = len(process.heard("saved"))
            process.tell(do="save", file=file)
            process.until("saved", before + 1)
        return files

    def reference(self) -> dict[str, torch.Tensor]:
        """Take the same steps with whole models, one for each replica's gradient."""
        model = whole(self.case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for leases, weights in self.log:
            optimizer.zero_grad()
            for replica, lease in leases.items():
                parts = [[sample_of(one, self.case.length) for one in part] for part in lease]
                terms = sum(one.count for part in parts for one in part)
                for part in parts:
                    loss = loss_sum(model, collate(part))[0]
                    (loss / terms * weights[replica]).backward()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def difference(self, replica: int) -> Line:
        """Compare a replica's parameters with the whole model's."""
        start = {name: parameter.detach() for name, parameter in whole(self.case).named_parameters()}
        wanted, worst, moved = self.reference(), 0.0, 0.0
        for file in self.snapshot(replica):
            for name, found in torch.load(file)["parameters"].items():
                worst = max(worst, float((found - wanted[name]).abs().max()))
                moved = max(moved, float((wanted[name] - start[name]).abs().max()))
        return {"largest_move": moved, "largest_difference": worst}


def await_step(process: Process, kind: str, step: int) -> Line:
    """Wait for what a process says of this step."""

    def there() -> list[Line]:
        return [line for line in process.heard(kind) if line["step"] == step]

    with process.changed:
        process.changed.wait_for(lambda: there() or process.ended, PATIENCE)
    if not there():
        raise SystemExit(f"no {kind} of step {step}; the last it said: {process.said[-2:]}")
    return there()[0]


def whole(case: Case) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config_of(vars(case))).eval()


@contextmanager
def running(case: Case, samples: int = 0) -> Iterator[Replicas]:
    """All stages of all replicas, connected."""
    with tempfile.TemporaryDirectory() as folder, started("scripts.swarms.stage_process") as begins:
        made = {name: p.detach().clone() for name, p in whole(case).named_parameters()}
        save_file(made, Path(folder) / "model.safetensors")
        all_of_them = Replicas(case, Path(folder), begins, pool=list(range(samples)))
        for replica in range(case.replicas):
            for number in range(case.stages):
                all_of_them.start(replica, number)
        for replica in range(case.replicas):
            all_of_them.connect(replica)
        yield all_of_them


def equal(given: argparse.Namespace) -> None:
    """Train unquantised, and compare parameters with those of whole models."""
    for stages in given.stages:
        case = Case(stages=stages)
        each = case.replicas * case.rows * case.micro_batches
        with running(case, samples=each * given.steps) as swarm:
            for _ in range(given.steps):
                swarm.apply(swarm.begin(range(case.replicas)))
            found = swarm.difference(0)
        say("equal", stages=stages, replicas=case.replicas, steps=given.steps, **found)


def kill(given: argparse.Namespace) -> None:
    """Kill a stage in the middle of a step: it is noticed, its samples go back, its replica counts again."""
    for stages in given.stages:
        case = Case(
            stages=stages, token_s=1e-3, tells=True, bits=given.bits, gradient_bits=given.gradient_bits
        )
        each = case.replicas * case.rows * case.micro_batches
        with running(case, samples=each * given.steps) as swarm:
            swarm.apply(swarm.begin(range(case.replicas)))
            leases = swarm.begin(range(case.replicas))
            victim = swarm.stages[1, stages - 1]
            victim.until("worked", len(victim.heard("worked")) + 3)
            victim.signal(signal.SIGKILL)
            killed = time.monotonic()
            survivors = [process for process in swarm.of(1) if process is not victim]
            said = [process.until("gone")["came"] - killed for process in (survivors[0], survivors[-1])]
            for process in survivors:
                process.tell(do="void")
                process.until("void")
            swarm.pool = [one for part in leases.pop(1) for one in part] + swarm.pool
            swarm.start(1, stages - 1)
            swarm.apply(leases)  # of the other replica; all apply it that are there
            files = swarm.snapshot(0)
            swarm.stages[1, stages - 1].until("ready")
            swarm.stages[1, stages - 1].tell(do="load", file=files[-1])
            swarm.stages[1, stages - 1].until("loaded")
            swarm.connect(1)
            void, again = swarm.steps, 0
            while len(swarm.pool) >= each:
                swarm.apply(swarm.begin(range(case.replicas)))
                again = again or swarm.steps
            while swarm.pool:
                swarm.apply(swarm.begin([0]))
            mismatches = sum(len(process.heard("mismatch")) for process in swarm.stages.values())
            found = swarm.difference(1)
        once = sorted(swarm.counted.values()) == [1] * each * given.steps
        told = {"gone_said_s": [round(one, 2) for one in said], "void": void, "counts_again": again}
        say("kill", stages=stages, **told, samples_once=once, mismatches=mismatches, **found)


def memory(given: argparse.Namespace) -> None:
    """Say what the processes of a replica hold after a step, beside one process that has the whole model."""
    for stages in given.stages:
        case = Case(stages, 1, given.layers, given.width, 64, 1, 2 * stages, 2 * stages, 4, 8, places=8)
        case.weighs = True
        with running(case, samples=2 * stages) as swarm:
            swarm.apply(swarm.begin([0]))
            parameters = sum(p.numel() for p in whole(case).parameters())
            for number, process in enumerate(swarm.of(0)):
                process.tell(do="packet")
                line = process.until("packet")
                tensors = line["tensors"]
                share = tensors["weights"] / (4 * parameters)
                grown = line["resident"] - line["empty"]
                model = 20 * parameters / stages  # weights, gradient, two moments, x': FP32
                say(
                    "memory",
                    stages=stages,
                    stage=number,
                    parameters=parameters,
                    share=round(share * stages, 3),
                    tensors={name: round(size / 1e6, 1) for name, size in tensors.items()},
                    resident_mb=round(grown / 1e6, 1),
                    beside=round(grown / model, 3),
                )


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
    """Make the lab, and in it measure each pair of bits at each compute."""
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
    members = tuple(f"p{number + 1}" for number in range(stages))
    case = Case(stages, 1, stages, given.width, 256, 4, given.micro_batches, 6 * stages)
    case.bits, case.gradient_bits, case.members = given.bits, given.gradient_bits, members
    case.token_s, case.gone_s, case.places = (
        given.token_ms * given.slower / 1e3,
        60.0,
        4 * given.micro_batches,
    )
    scale = given.width / GPTJ_WIDTH / given.slower
    took, sent, busy = dict[str, float](), 0.0, dict[str, float]()
    with running(case) as swarm:
        for lines in ("unlimited", "shaped"):
            if lines == "shaped":
                for member in members:
                    rate = given.mbit * scale
                    netlab.change(member, up=rate, down=rate, rtt=given.rtt / 2 * given.slower)
            steps = list[tuple[float, float, float]]()
            for _ in range(given.steps):
                swarm.pool = list(range(case.rows * case.micro_batches))
                swarm.begin([0])
                found = swarm.stepped(0)
                whole_step = max(line["ended"] for line in found) - min(line["first"] for line in found)
                share = sum(line["busy"] for line in found) / len(found) / whole_step
                steps.append((whole_step, share, sum(line["sent"] for line in found) / len(found)))
            took[lines], busy[lines], sent = sorted(steps)[len(steps) // 2]
    say(
        "idle",
        stages=stages,
        bits=[case.bits, case.gradient_bits],
        token_ms=given.token_ms,
        mbit=given.mbit,
        rtt=given.rtt,
        slower=given.slower,
        micro_batches=case.micro_batches,
        seconds={lines: round(value, 2) for lines, value in took.items()},
        busy={lines: round(value, 3) for lines, value in busy.items()},
        idle_from_lines=round(1 - took["unlimited"] / took["shaped"], 3),
        line_used=round(sent * 8e-6 / (given.mbit * scale) / took["shaped"], 3),
    )


def main() -> None:
    root = lab.parser(__doc__)
    root.add_argument("what", choices=("equal", "memory", "kill", "machines", "idle", "inside"))
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
