"""Audits: how far sketches of one gradient are apart in a real swarm, and how soon simulated liars are found.

scripts/start --test scripts.study.audits distances 1e-3 --rounds 60 lora_r=8       recipe keys at the end
scripts/start --test scripts.study.audits liars --batch 64 128 --runs 100
scripts/start --test scripts.study.audits accomplices --runs 100
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import reach_tests

PEERS, SAMPLES, LAGS = 4, 24, (0, 2, 4, 7)


def distances(rate: float, rounds: int, keys: Sequence[str]) -> None:
    """Print by how many of 128 bits sketches differ between peers and rounds of the recipe smoke."""
    import numpy as np
    import torch
    from in_process import Swarm
    from numpy.typing import NDArray

    from cocktail_cli.assembly import recipe_type
    from cocktail_cli.extensions.audits.model import sketching
    from recipes.config import load_resolved
    from recipes.data import Sample, batches
    from recipes.training import StepDone

    usual = (f"learning_rate={rate}", f"max_steps={rounds}", "global_batch_size=32", "eval_steps=null")
    states: dict[tuple[str, int], torch.Tensor] = {}

    def watch(member: Any, event: object) -> None:
        if isinstance(event, StepDone):
            states[member.name, event.round] = member.peer.trainer.flat.vector.clone()

    names = [f"peer-{number}" for number in range(PEERS)]
    folder = Path(tempfile.mkdtemp())
    recipe = load_resolved("smoke", [*usual, *keys], extend=recipe_type).recipe
    with Swarm(recipe, folder, min_peers=PEERS) as swarm:
        for member in [swarm.prepare(name) for name in names]:
            swarm.go(member, watch)
        swarm.finish()
    trainer: Any = swarm.members[names[0]].peer.trainer
    samples = [swarm.corpus.sample(number) for number in range(SAMPLES)]

    def bits(x: torch.Tensor, half: bool = False, share: float = 1.0) -> NDArray[np.uint8]:
        """Sketch the samples at x: (SAMPLES, 128); of their first part where `share` is below 1."""
        trainer.flat.vector.copy_(x)
        trainer.half = torch.bfloat16 if half else None
        parts = [Sample(s.tokens[: (n := int(len(s.tokens) * share))], s.trained[:n]) for s in samples]
        found: dict[int, bytes] = {}
        for part in batches(parts, 4):
            trainer.zero()
            with sketching(trainer.model, part, "key") as sketches:
                with trainer.precision():
                    loss = trainer.objective.loss(trainer.model, part, trainer.device)
                loss.sum.backward()
            found |= {id(sample): bytes.fromhex(one) for sample, one in zip(part, sketches, strict=True)}
        whole = b"".join(found[id(sample)] for sample in parts)
        return np.unpackbits(np.frombuffer(whole, np.uint8)).reshape(SAMPLES, -1)

    def row(what: str, pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
        off = np.concatenate([(a != b).sum(axis=1) for a, b in pairs])
        print(f"{what:32} {np.median(off):8.1f} {np.quantile(off, 0.99):8.1f} {off.max():8}")

    print(f"{'bits of 128 that differ':32} {'median':>8} {'p99':>8} {'max':>8}")
    for at in [r for r in (2, 5, 10, 30, 50, 90) if r + LAGS[-1] < rounds]:
        own = bits(states[names[0], at])
        print(f"round {at}")
        row("bfloat16", [(own, bits(states[names[0], at], half=True))])
        for lag in LAGS:
            row(f"another peer, {lag} rounds later", [(own, bits(states[n, at + lag])) for n in names[1:]])
        row("the first half of each sample", [(own, bits(states[names[0], at], share=0.5))])
        row("other samples", [(own, np.roll(own, 1, axis=0))])


def liars(batches: Sequence[int], runs: int) -> None:
    """Print after how many rounds two lazy peers of ten are found at 2 % extra compute."""
    from test_audit_book import ten

    print("two lazy peers of ten      samples a round   median, p95, at most   honest ones found")
    for kind in ("zero", "copied", "stale"):
        for batch in batches:
            last, falsely = list[int](), 0
            for seed in range(runs):
                swarm = ten(kind, kind, seed=seed, batch=batch).run(45)  # type: ignore[arg-type]
                lazy = [peer for peer, of in swarm.kinds.items() if of != "honest"]
                last.append(max(swarm.found.get(peer, 99) for peer in lazy))
                falsely += len(swarm.found.keys() - set(lazy))
            last.sort()
            found = f"{last[runs // 2]}, {last[runs * 95 // 100]}, {last[-1]}"
            print(f"{kind:26} {batch:15}   {found:20} {falsely:10}")


def accomplices(runs: int) -> None:
    """Print whom peers expel that work honestly and slander all others as auditors, in 300 rounds of 128."""
    from test_audit_book import ten

    print("slanderers of ten   runs   of them found   honest peers expelled")
    for count in (1, 2, 3, 4):
        found = falsely = 0
        for seed in range(runs):
            swarm = ten(*["slanders"] * count, seed=seed, batch=128)  # type: ignore[arg-type]
            liars = {peer for peer, of in swarm.kinds.items() if of != "honest"}
            swarm.friends = liars
            swarm.run(300)
            found += len(swarm.found.keys() & liars)
            falsely += len(swarm.found.keys() - liars)
        print(f"{count:17} {runs:6} {found:15} {falsely:23}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("distances", "liars", "accomplices"))
    parser.add_argument("rate", nargs="?", type=float, default=1e-3, help="learning rate of smoke")
    parser.add_argument("keys", nargs="*", help="of the recipe")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--runs", type=int, default=100)
    asked = parser.parse_args()
    reach_tests()
    if asked.what == "distances":
        distances(asked.rate, asked.rounds, asked.keys)
    elif asked.what == "liars":
        liars(asked.batch, asked.runs)
    else:
        accomplices(asked.runs)


if __name__ == "__main__":
    main()
