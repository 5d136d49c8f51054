"""A swarm in one process, without a network: what an idea about compression costs in loss.

    python scripts/simulate.py RECIPE [key=value ...] [--peers N] [--prompt TEXT]

Runs Algorithm 1 and 2 as they are (recipes/cocktail_sgd.py) with N peers in lockstep, and prints the held-out
loss of x' and the bytes that would travel. `--peers 0` trains in the ordinary way, one model and no exchange:
the reference. Everything is drawn from the recipe's seed, so a line can be had again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from recipes.base import load_tokenizer, prepare_base
from recipes.cocktail_sgd import Common, Owner, Worker, mix_of
from recipes.data import Corpus, build_corpus, collate
from recipes.flat import Flat
from recipes.model import evaluate, export, generate, load_model, loss_sum
from recipes.optim import build_optimizer, learning_rate, set_learning_rate
from recipes.recipe import load_recipe
from recipes.schema import Recipe


@dataclass
class Peer:
    """One simulated peer: its model as a vector, its half of the algorithm, its optimizer."""

    flat: Flat
    worker: Worker
    optimizer: Optimizer

    def backward(self, corpus: Corpus, positions: Sequence[int], limit: float) -> None:
        """The clipped gradient of the mean loss over these samples."""
        self.flat.model.train()
        self.flat.grad.zero_()
        loss, tokens = loss_sum(self.flat.model, collate([corpus.sample(p) for p in positions]))
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.flat.model.parameters(), limit or float("inf"))


def build_peer(recipe: Recipe, folder: Path) -> Peer:
    flat = Flat(load_model(folder))
    common = Common(flat.vector.clone(), mix_of(recipe.compression), recipe.training.seed)
    return Peer(flat, Worker(flat.vector, common), build_optimizer(flat.model, recipe.training))


def simulate(recipe: Recipe, corpus: Corpus, folder: Path, count: int) -> torch.Tensor:
    """Train, print a line for each evaluation; returns x'."""
    training, stale = recipe.training, recipe.compression.staleness
    peers = [build_peer(recipe, folder) for _ in range(max(count, 1))]
    steps = training.total_steps(len(corpus.samples))
    every = recipe.checkpoint.eval_every(steps) or steps
    rate = learning_rate(training, steps)
    owner = Owner(peers[0].flat.layout.size, mix_of(recipe.compression), training.seed)
    up = down = rounds = 0
    started = time.process_time()
    shared = peers[0].worker.common.vector if count else peers[0].flat.vector
    report(peers[0], shared, corpus, "step 0")
    for step in range(steps + (stale if count else 0)):  # one more round brings the last step home
        parts = [peer.worker.start() for peer in peers] if count and stale else []
        if step < steps:
            first = step * training.global_batch_size
            lease = range(first, min(first + training.global_batch_size, len(corpus)))
            for place, peer in enumerate(peers):
                peer.backward(corpus, lease[place :: len(peers)], training.max_grad_norm)
                set_learning_rate(peer.optimizer, rate(step))
                peer.optimizer.step()
        if count:
            parts = parts or [peer.worker.start() for peer in peers]
            aggregate = owner.aggregate(step, [(str(i), p.packet, 1.0) for i, p in enumerate(parts)])
            for peer, part in zip(peers, parts, strict=True):
                peer.worker.finish(aggregate, part)
            up, down = up + sum(len(p.packet) for p in parts), down + len(aggregate)
            rounds += 1
        if (step + 1) % every == 0 or step + 1 == steps + (stale if count else 0):
            report(peers[0], shared, corpus, f"step {min(step + 1, steps)}")
    whole = 2 * shared.numel() * rounds
    ratios = f"FP16 over packets: {whole * count / up:.1f} up, {whole / down:.1f} down; " if count else ""
    print(f"{ratios}{time.process_time() - started:.1f} s of processor time")
    return shared


def report(peer: Peer, shared: torch.Tensor, corpus: Corpus, what: str) -> None:
    with peer.flat.use(shared):
        total, tokens = evaluate(peer.flat.model, corpus.held_out, 16)
    print(f"{what}: held-out loss of x' {total / tokens:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("override", nargs="*")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--prompt", help="let the model write on from this")
    given = parser.parse_intermixed_args()
    recipe = load_recipe(given.recipe, given.override)
    with tempfile.TemporaryDirectory() as folder:
        base = prepare_base(recipe, Path(folder) / "base")
        tokenizer = load_tokenizer(recipe.model, base.folder)
        corpus = build_corpus(recipe, tokenizer)
        print(f"{', '.join(corpus.found)}; {len(corpus.samples)} samples, {len(corpus.held_out)} held out")
        vector = simulate(recipe, corpus, base.folder, given.peers)
        if given.prompt is not None:
            layout = Flat(load_model(base.folder)).layout
            out = export(Path(folder) / "out", base.folder, vector, layout)
            print(given.prompt + generate(out, given.prompt, 80, temperature=0.6, seed=0))


if __name__ == "__main__":
    main()
