"""A swarm in one process, without a network: what an idea about compression costs in loss.

    python scripts/simulate.py RECIPE [key=value ...] [--peers N] [--prompt TEXT] [--churn KIND --every N]

Runs Algorithm 1 and 2 as they are (recipes.algorithm) with N peers in lockstep, every preset and key of
`compression` included, and prints the held-out loss of x' and the bytes that would travel. `--peers 0` trains
in the ordinary way, one model and no exchange: the reference. Everything is drawn from the recipe's seed, so
a line can be had again.

    python scripts/simulate.py smoke compression.preset=diloco compression.local_steps=50

With --churn one peer after the other is away for some rounds. `crash`: its residual is lost, a new one comes.
`leave`: it hands over its legacy, a new one comes. `return`: it hands over, and comes back as it was. Its
samples are the others' from the moment it goes: what differs is what becomes of residuals and optimizers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim import Optimizer

from recipes.algorithm.cocktail_sgd import Common, Part, Worker, mix_of
from recipes.algorithm.shard_aggregator import Owners, even, owners_of
from recipes.config.loader import load_recipe
from recipes.config.presets import PLAIN, outer_of
from recipes.config.schema import Recipe
from recipes.data.corpus import Corpus, build_corpus, collate
from recipes.models.base_model import load_tokenizer, prepare_base
from recipes.models.causal_lm import evaluate, export, generate, load_model, loss_sum
from recipes.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from recipes.weight_files.parameter_layout import Flat


@dataclass
class Peer:
    """One simulated peer: its model as a vector, its half of the algorithm, its optimizer."""

    flat: Flat
    worker: Worker
    optimizer: Optimizer
    tokens: int = 0  # of its steps since its last exchange

    def backward(self, corpus: Corpus, positions: Sequence[int], limit: float) -> None:
        """The clipped gradient of the mean loss over these samples."""
        self.flat.model.train()
        self.flat.grad.zero_()
        loss, tokens = loss_sum(self.flat.model, collate([corpus.sample(p) for p in positions]))
        (loss / tokens).backward()
        self.tokens += tokens
        torch.nn.utils.clip_grad_norm_(self.flat.model.parameters(), limit or float("inf"))


@dataclass
class Churn:
    """Who is away. In every `every`-th round the next peer of all goes, to be back `away` rounds later."""

    kind: str  # crash, leave, return; none
    every: int
    away: int
    keep: float  # the share of all coordinates that a legacy has
    gone: dict[int, Peer] = field(default_factory=dict)  # place -> who was there
    until: dict[int, int] = field(default_factory=dict)
    handed: list[float] = field(default_factory=list)  # how much smaller a legacy made the residual's norm

    def leaver(self, step: int, count: int) -> int | None:
        """Whose last round this is."""
        return step // self.every % count if self.kind != "none" and step and step % self.every == 0 else None

    def part(self, place: int, peers: dict[int, Peer], owner: Owners, step: int) -> None:
        """It goes, after its exchange."""
        peer, share = peers.pop(place), 1 / (len(peers) + 1)
        if self.kind != "crash":
            before = peer.worker.residual_norm()
            legacy = peer.worker.legacy(1 << 40, self.keep)
            if legacy is not None:
                owner.inherit(str(place), legacy.packet, share)
                peer.worker.take_out(legacy)
                self.handed.append(1 - peer.worker.residual_norm() / before)
        self.gone[place], self.until[place] = peer, step + self.away

    def back(self, peers: dict[int, Peer], recipe: Recipe, folder: Path, step: int) -> None:
        """Those whose time has come, as they were or as somebody new."""
        for place in [p for p, at in self.until.items() if step >= at]:
            peer = self.gone.pop(place)
            del self.until[place]
            if self.kind != "return":
                common = peer.worker.common  # which a new one has by catching up
                peer = build_peer(recipe, folder)
                for vector in (peer.flat.vector, peer.worker.common.vector):
                    vector.copy_(common.vector)
                peer.worker.common.round, peer.worker.common.fingerprint = common.round, common.fingerprint
            peers[place] = peer


def build_peer(recipe: Recipe, folder: Path) -> Peer:
    flat = Flat(load_model(folder))
    common = Common(flat.vector.clone(), mix_of(recipe.compression), recipe.training.seed)
    worker = Worker(flat.vector, common, decay=recipe.compression.error_decay)
    return Peer(flat, worker, build_optimizer(flat.masters, recipe.training))


def simulate(recipe: Recipe, corpus: Corpus, folder: Path, count: int, churn: Churn) -> torch.Tensor:
    """Train, print a line for each evaluation; returns x'."""
    training, compression = recipe.training, recipe.compression
    stale, local_steps = (compression.staleness, compression.local_steps) if count else (0, 1)
    peers = {place: build_peer(recipe, folder) for place in range(max(count, 1))}
    steps = training.total_steps(len(corpus.samples))
    every = recipe.checkpoint.eval_every(steps) or steps
    rate, outer = learning_rate(training, steps), outer_of(compression) if count else PLAIN
    owner = owners_of(recipe, peers[0].flat.layout.size)
    up = down = packets = done = 0
    last = -(-steps // local_steps) - 1 + stale  # one more round brings the last steps home
    started = time.process_time()
    watcher = build_peer(recipe, folder)  # holds x', computes nothing
    shared = watcher.worker.common.vector if count else peers[0].flat.vector
    report(watcher, shared, corpus, "step 0")
    for round in range(last + 1):
        churn.back(peers, recipe, folder, round)
        leaver = churn.leaver(round, count)
        leaver = leaver if leaver in peers and len(peers) > 1 else None
        parts = started_by(peers) if stale else {}
        working = [peer for place, peer in sorted(peers.items()) if place != leaver]
        before = done
        for done in range(before + 1, min(before + local_steps, steps) + 1):
            lease = range((done - 1) * training.global_batch_size, len(corpus))[: training.global_batch_size]
            for place, peer in enumerate(working):
                peer.backward(corpus, lease[place :: len(working)], training.max_grad_norm)
                share = outer.peers_share(len(working))
                set_learning_rate(peer.optimizer, share * rate(done - 1), share * training.adam_beta1)
                peer.optimizer.step()
        if count:
            parts = parts or started_by(peers)
            taken = {place: sent for place, sent in parts.items() if sent.tokens} or parts
            updates = [(str(place), sent.part.packet, float(sent.tokens)) for place, sent in taken.items()]
            updates = even(updates) if compression.weighting == "uniform" else updates
            aggregate = owner.aggregate(round, updates)
            for place, peer in peers.items():
                peer.worker.finish(aggregate, taken[place].part if place in taken else None)
            for absent in (watcher, *churn.gone.values()):
                absent.worker.catch_up(aggregate)
            up, down = up + sum(len(packet) for _, packet, _ in updates), down + len(aggregate)
            packets += len(updates)
        if leaver is not None:
            churn.part(leaver, peers, owner, round)
        if done // every > before // every or round == last:
            report(watcher, shared, corpus, f"step {done}")
    if churn.handed:
        shrunk = sum(churn.handed) / len(churn.handed)
        print(f"{len(churn.handed)} legacies, each made its residual's norm {shrunk:.1%} smaller")
    whole = 2 * shared.numel() * local_steps
    ratios = ""
    if count:
        sent, received = whole * packets / up, whole * (last + 1) / down
        ratios = f"FP16 each step over packets: {sent:.1f} up, {received:.1f} down; "
    print(f"{ratios}{time.process_time() - started:.1f} s of processor time")
    return shared


@dataclass(frozen=True)
class Sent:
    part: Part
    tokens: int  # that it delivers


def started_by(peers: dict[int, Peer]) -> dict[int, Sent]:
    """What each has to say of its steps since the last time."""
    sent = {place: Sent(peer.worker.start(), peer.tokens) for place, peer in peers.items()}
    for peer in peers.values():
        peer.tokens = 0
    return sent


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
    parser.add_argument("--churn", choices=("none", "crash", "leave", "return"), default="none")
    parser.add_argument("--every", type=int, default=10, help="rounds from one departure to the next")
    parser.add_argument("--away", type=int, default=5, help="rounds that a place stays empty")
    parser.add_argument(
        "--legacy", type=float, default=1.0, help="share of all coordinates that a leaver hands over"
    )
    parser.add_argument("--prompt", help="let the model write on from this")
    given = parser.parse_intermixed_args()
    recipe = load_recipe(given.recipe, given.override)
    with tempfile.TemporaryDirectory() as folder:
        base = prepare_base(recipe, Path(folder) / "base")
        tokenizer = load_tokenizer(recipe.model, base.folder)
        corpus = build_corpus(recipe, tokenizer)
        print(f"{', '.join(corpus.found)}; {len(corpus.samples)} samples, {len(corpus.held_out)} held out")
        churn = Churn(given.churn, given.every, given.away, given.legacy)
        vector = simulate(recipe, corpus, base.folder, given.peers, churn)
        if given.prompt is not None:
            layout = Flat(load_model(base.folder)).layout
            out = export(Path(folder) / "out", base.folder, vector, layout)
            print(given.prompt + generate(out, given.prompt, 80, temperature=0.6, seed=0))


if __name__ == "__main__":
    main()
