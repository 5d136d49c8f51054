"""What `compression.auto` and shares that follow speed make of peers whose lines and machines differ.

    python scripts/bench_slot.py loss [SETTING ...] [--seed N]    held-out loss at equal time
    python scripts/bench_slot.py lines [CASE ...]                 real processes over shaped lines
    python scripts/bench_slot.py lines --list                     the cases; `loss --list`: the settings

`loss` trains `smoke` by Algorithm 1 in this process with three peers, whose packets are real, and reckons how
long each round takes: the compute, or the slowest packet up and then the aggregate down the slowest line.
Each setting gets the same seconds, and a learning rate that follows the steps it comes to. Only the lines are
made up.

`lines` is a hub and peers (`cocktail launch`, `cocktail join`) in a network lab. A gradient is a real one and
takes as long as the case says: that stands for the device. `idle` is the share of the time in which a peer's
device has its gradient and waits for the exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
MBIT = 1e6 / 8
Line = dict[str, Any]

# ---- loss at equal time ------------------------------------------------------------------------------------

RATES = (1000.0, 100.0, 20.0)  # Mbit/s, each way
COMPUTE_S, BUDGET = 1.0, 150  # of a step; steps of compute that the time is enough for
# The lines carry this model's packets as they would carry one's so many times as large.
LARGER = 350
SETTINGS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "auto, up to K=0.4": ("compression.topk_ratio_max=0.4",),
    "K=0.2, 4 bit": ("compression.auto=false", "compression.quant_bits=4"),
    "K=0.2, 2 bit": ("compression.auto=false",),
    "K=0.1, 2 bit": ("compression.auto=false", "compression.topk_ratio=0.1"),
    "K=0.05, 2 bit": ("compression.auto=false", "compression.topk_ratio=0.05"),
    "K=0.025, 2 bit": ("compression.auto=false", "compression.topk_ratio=0.025"),
}


def loss(name: str, seed: int, larger: float) -> Line:
    """One setting trained for the time there is."""
    import torch
    from simulate import build_peer

    from recipes.algorithm.adaptive_rate import fill_of
    from recipes.algorithm.shard_aggregator import owners_of
    from recipes.config.loader import load_recipe
    from recipes.config.presets import outer_of
    from recipes.data.corpus import build_corpus
    from recipes.models.base_model import load_tokenizer, prepare_base
    from recipes.models.causal_lm import evaluate
    from recipes.training.optimizers import learning_rate, set_learning_rate
    from transport.transfer.bandwidth_budget import Slot

    torch.set_num_threads(1)
    recipe = load_recipe("smoke", [*SETTINGS[name], f"seed={seed}", "max_steps=200", "global_batch_size=24"])
    rates = [mbit * MBIT / larger for mbit in RATES]
    with tempfile.TemporaryDirectory() as folder:
        base = prepare_base(recipe, Path(folder) / "base")
        corpus = build_corpus(recipe, load_tokenizer(recipe.model, base.folder))
        peers, slots = [build_peer(recipe, base.folder) for _ in RATES], [Slot() for _ in RATES]
    owner, batch = owners_of(recipe, peers[0].flat.layout.size), recipe.training.global_batch_size
    outer = outer_of(recipe.compression)
    for peer in peers:
        peer.worker.fill = fill_of(recipe.compression)
    now, step, idle, done = 0.0, 0, 0.0, 0.0
    held = Counter[str]()
    sizes: list[tuple[int, ...]] = []
    while now < BUDGET * COMPUTE_S:
        parts = [peer.worker.start(round(slot.up / larger)) for peer, slot in zip(peers, slots, strict=True)]
        for place, peer in enumerate(peers):
            lease = [i % len(corpus) for i in range(step * batch, (step + 1) * batch)][place :: len(peers)]
            peer.backward(corpus, lease, recipe.training.max_grad_norm)
        updates = [(str(i), part.packet, 1.0) for i, part in enumerate(parts)]
        owner.fits(round(min(slot.down for slot in slots) / larger))
        aggregate = owner.aggregate(step, updates)
        held.update(taken.peer for taken in owner.held)
        up = [len(part.packet) / rate for part, rate in zip(parts, rates, strict=True)]
        down = [len(aggregate) / rate for rate in rates]
        took = max(COMPUTE_S, max(up) + max(down))
        # the schedule's end is when the time is over, at the pace of the newest round
        steps = step + max(1, round((BUDGET * COMPUTE_S - now) / took))
        rate = learning_rate(recipe.training, steps)
        for peer, part, slot_of in zip(peers, parts, range(len(peers)), strict=True):
            share = outer.peers_share(len(peers))
            set_learning_rate(peer.optimizer, share * rate(step), share * recipe.training.adam_beta1)
            peer.optimizer.step()
            peer.worker.finish(aggregate, part)
            slots[slot_of] = (
                slots[slot_of].computed(COMPUTE_S).sent(round(larger * len(part.packet)), up[slot_of])
            )
            came = slots[slot_of].came(round(larger * len(aggregate)), down[slot_of])
            slots[slot_of] = came.ended(max(up) + max(down))
        sizes.append((*(len(part.packet) for part in parts), len(aggregate)))
        now, step = now + took, step + 1
        idle, done = idle + max(0.0, took - COMPUTE_S), done + took
    with peers[0].flat.use(peers[0].worker.common.vector):
        total, tokens = evaluate(peers[0].flat.model, corpus.held_out, 16)
    usual = [int(median(column)) for column in zip(*sizes, strict=True)]
    return {
        "loss": total / tokens,
        "steps": step,
        "idle": idle / done,
        "bytes": usual,
        "held": [held[str(i)] for i in range(len(rates))],
    }


def compare(names: list[str], seed: int, larger: float) -> None:
    print(f"seed {seed}, {BUDGET * COMPUTE_S:.0f} s, lines of {RATES} Mbit/s for {larger:g} times the model")
    print("| setting | held-out loss | steps | device idle | packets up, and down, kB | shortened |")
    print("|---|---|---|---|---|---|")
    for name in names:
        r = loss(name, seed, larger)
        kilobytes = ", ".join(f"{size / 1e3:.1f}" for size in r["bytes"])
        held = ", ".join(map(str, r["held"]))
        row = f"{r['loss']:.3f} | {r['steps']} | {r['idle']:.1%} | {kilobytes} | {held}"
        print(f"| {name} | {row} |", flush=True)


# ---- real processes over shaped lines ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    recipe: tuple[str, ...] = ()  # beside COMMON
    mbit: tuple[float, ...] = RATES  # of each peer's line, each way
    slower: tuple[float, ...] = ()  # how many times as long each peer computes
    sample_s: float = 0.1  # what a sample takes
    rounds: int = 40
    rtt: float = 20.0

    @property
    def lab(self) -> list[str]:
        lines = [f"p{i}:up={mbit:g},down={mbit:g}" for i, mbit in enumerate(self.mbit, 1)]
        shaped = [word for line in lines for word in ("--peer", line)]
        return ["--peers", str(len(self.mbit)), "--rtt", str(self.rtt), *shaped]


# All coordinates each round: a model of 1 M parameters then sends what one of 10 M would.
COMMON = ("compression.random_ratio=1.0", "checkpoint.eval_steps=null", "checkpoint.save_steps=null")
COMMON += ("global_batch_size=18", "max_length=32", "val_set_size=64")
FIXED = ("compression.auto=false",)
RICH = ("compression.topk_ratio=0.9", "compression.quant_bits=8")
CASES: dict[str, Case] = {
    "1000, 100, 20 Mbit/s, auto": Case(RICH),
    "1000, 100, 20 Mbit/s, fixed K=0.9 8 bit": Case((*RICH, *FIXED)),
    "1000, 100, 20 Mbit/s, fixed K=0.2 4 bit": Case(FIXED),
    "three alike": Case(FIXED, (1000.0,) * 3),
    "three alike and one 5 x slower": Case(FIXED, (1000.0,) * 4, (1.0, 1.0, 1.0, 5.0)),
    "three alike and one 20 x slower": Case(FIXED, (1000.0,) * 4, (1.0, 1.0, 1.0, 20.0)),
}
LEARNT = 8  # rounds at the start that do not count: lines and speeds are not known yet


def inside_lab(case: Case) -> Line:
    """One run."""
    import line_lab as lab

    with tempfile.TemporaryDirectory() as folder:
        home = {"COCKTAIL_HOME": f"{folder}/home", "HF_HUB_OFFLINE": "1"}
        os.environ.update(home)
        count = len(case.mbit)
        asked = [
            "launch",
            "smoke",
            *COMMON,
            f"max_steps={case.rounds}",
            *case.recipe,
            f"swarm.min_peers={count}",
        ]
        hub = lab.Member(
            "hub",
            "cocktail",
            {"args": [*asked, "--no-train", "--advertise", "10.77.0.1", "--json", "-o", f"{folder}/out"]},
            Path(__file__),
        )
        members = [hub]
        try:
            url = told(hub, "run_started")["url"]
            for i in range(count):
                slower = case.slower[i] if case.slower else 1.0
                args = ["join", url, "--name", f"p{i + 1}", "--device", "cpu", "-y", "--json"]
                peer = {"args": args, "sample_s": case.sample_s * slower}
                members.append(lab.Member(f"p{i + 1}", "cocktail", peer, Path(__file__)))
            ended = told(hub, "run_finished", 200 + 10 * case.rounds * case.sample_s)
            for member in members:
                member.end()
        finally:
            for member in members:
                member.kill()
    found = [[line for line in member.said if line.get("event") == "joined_round"] for member in members[1:]]
    return {"loss": ended.get("eval_loss"), "peers": [summed(rounds) for rounds in found]}


def told(member: Any, event: str, timeout: float = 120.0) -> Line:
    import line_lab as lab

    lab.wait_for(
        lambda: any(line.get("event") == event or "error" in line for line in list(member.said)),
        f"{member.member}: {event}",
        timeout,
    )
    found = [line for line in member.said if line.get("event") == event]
    if not found:
        raise SystemExit(f"{member.member}: {[line for line in member.said if 'error' in line]}")
    return found[0]


def summed(rounds: list[Line]) -> Line:
    """What one peer's rounds come to."""
    rounds = [r for r in rounds if r["compute"]][LEARNT:-1]
    seconds = rounds[-1]["end"] - rounds[0]["end"]
    idle = sum(r["idle"] for r in rounds[1:])
    return {
        "rounds": rounds[-1]["round"] - rounds[0]["round"],
        "in": len(rounds),
        "seconds": seconds,
        "idle": idle / seconds,
        "compute": median(r["compute"] for r in rounds),
        "up": median(r["sent"] for r in rounds),
        "down": median(r["received"] for r in rounds),
    }


def compare_lines(cases: Mapping[str, Case]) -> None:
    import line_lab as lab

    print("| case | held-out loss | peer | idle | rounds/s | rounds with it | compute s | kB up | kB down |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        (found,) = lab.inside(__file__, ["--inside", json.dumps(asdict(case))], case.lab)
        for i, p in enumerate(found["peers"], 1):
            row = f"{p['idle']:.1%} | {p['rounds'] / p['seconds']:.2f} | {p['in']} of {p['rounds']}"
            size = f"{p['up'] / 1e3:.0f} | {p['down'] / 1e3:.0f}"
            print(
                f"| {name} | {found['loss']:.3f} | p{i} | {row} | {p['compute']:.2f} | {size} |", flush=True
            )


def cocktail(asked: Line) -> None:
    """`cocktail` as it is; of a peer each gradient takes as long as it is told, and each round is said."""
    import recipes.training.lease_gradient as work
    import recipes.training.loop as loop

    compute, join = work.compute, loop.join

    def takes_its_time(link: Any, peer: Any, round: int, number: int, lease: Any) -> Any:
        done = compute(link, peer, round, number, lease)
        if done is None or "sample_s" not in asked:
            return done
        until = done.started + asked["sample_s"] * len(lease)
        while (left := until - time.monotonic()) > 0 and not link.leaving.is_set():
            time.sleep(min(0.05, left))
        return replace(done, finished=time.monotonic())

    def told(link: Any, peer: Any, round: Any, gradient: Any, done: Any) -> Any:
        step = join(link, peer, round, gradient, done)
        compute_s = gradient.finished - gradient.started if gradient else 0.0
        idle = max(0.0, done.finished - gradient.finished) if gradient else 0.0
        row = {"event": "joined_round", "round": round.round, "end": time.monotonic(), "compute": compute_s}
        row |= {"idle": idle, "sent": step.sent_bytes, "received": step.received_bytes}
        row |= {"fingerprint": step.fingerprint, "accepted": step.accepted}
        print(json.dumps(row), flush=True)
        return step

    work.compute, loop.join = takes_its_time, told
    from cocktail_cli.main import main as command

    sys.argv = ["cocktail", *asked["args"]]
    command()


def main() -> None:
    if sys.argv[1:2] == ["cocktail"]:
        cocktail(json.loads(sys.argv[2]))
        return
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", nargs="?", choices=("loss", "lines"))
    asked.add_argument("names", nargs="*")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--larger", type=float, default=LARGER)
    asked.add_argument("--list", action="store_true")
    asked.add_argument("--inside", help=argparse.SUPPRESS)
    args = asked.parse_args()
    if args.inside:
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(args.inside).items()}
        print(json.dumps(inside_lab(Case(**fields))))
        return
    all_of_them = SETTINGS if args.what == "loss" else CASES
    wanted = [name for name in all_of_them if not args.names or name.startswith(tuple(args.names))]
    if args.list:
        print("\n".join(wanted))
    elif args.what == "loss":
        compare(wanted, args.seed, args.larger)
    else:
        compare_lines({name: CASES[name] for name in wanted})


if __name__ == "__main__":
    main()
