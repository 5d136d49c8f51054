"""What peers that lie cost a run, and what the owner can do about it: held-out losses, in one process.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_liars.py [key=value ...] [--lies ...] [--rules ...]

The smoke recipe, shortened, with a GPT-NeoX of 0.14 M parameters and 10 peers in lockstep. Two of them lie
from round `--from` on, in the numbers of their packets only. A peer whose packets were refused three times is
out, as at a hub. In two rows nobody lies: `foreign`, one peer trains on Python source instead of prose;
`young`, at half time 6 of 10 are new.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from simulate import Peer, build_peer
from torch import Tensor

from recipes.aggregate import MEAN, OPEN, RejectedUpdate, Rule, median_of
from recipes.base import load_tokenizer, prepare_base
from recipes.cocktail_sgd import Owner, Part, Piece, mix_of
from recipes.data import Corpus, build_corpus
from recipes.model import evaluate
from recipes.optim import learning_rate, set_learning_rate
from recipes.recipe import load_recipe
from recipes.schema import Recipe

PEERS, LIARS, STRIKES = 10, 2, 3
SHORT = ["max_steps=40", "global_batch_size=30", "max_length=64", "val_set_size=0.1", "warmup_steps=3"]
RULES = {
    "open": OPEN,
    "norms": MEAN,
    "trimmed_mean": Rule("trimmed_mean"),
    "median": Rule("median"),
    "centered_clip": Rule("centered_clip"),
}
LIES = ("none", "flip10", "flip2", "noise", "stale", "drift", "foreign", "young")


@dataclass
class Liar:
    """Turns the packet that an honest peer would send into the one that it sends."""

    lie: str
    seed: int
    sent: list[bytes] = field(default_factory=list)

    def packet(self, part: Part, peer: Peer, round: int) -> bytes:
        [piece], mix = part.pieces, peer.worker.common.mix
        u = piece.update.dense()
        self.sent.append(part.packet)
        if self.lie == "stale":  # its first packet with something in it, for ever
            return next(p for p in self.sent if len(p) > len(self.sent[0]) or p is part.packet)
        if self.lie.startswith("flip"):
            return mix.encode(-float(self.lie[4:]) * u)
        if self.lie == "noise":
            return mix.encode(pushed(torch.zeros_like(u), 10.0, u, self.seed + round))
        # a slow drift: one direction of all parameters, stronger by 5 % of an honest norm each round
        return mix.encode(pushed(u, 0.05 * round, u, self.seed, piece))


def pushed(base: Tensor, times: float, u: Tensor, seed: int, piece: Piece | None = None) -> Tensor:
    """`base` and a random direction, `times` as long as u. With `piece`: the same one each round."""
    n = len(u) if piece is None else piece.sample.n
    push = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    push = push if piece is None else piece.sample.take(push)
    return base + times * u.norm() / push.norm() * push


@dataclass
class Outcome:
    loss: float
    out: set[int] = field(default_factory=set)  # peers that were put out
    held: Counter[int] = field(default_factory=Counter)  # rounds in which a peer was held
    largest: float = 0.0  # norm of an honest packet, x the median of its round


def run(recipe: Recipe, corpora: Sequence[Corpus], folder: Path, lie: str, rule: Rule, since: int) -> Outcome:
    """One run to its end. corpora: the run's, and the one of a peer with other data."""
    training, corpus = recipe.training, corpora[0]
    steps = training.total_steps(len(corpus.samples))
    rate = learning_rate(training, steps)
    peers = {i: build_peer(recipe, folder) for i in range(PEERS)}
    owner = Owner(peers[0].flat.layout.size, mix_of(recipe.compression), training.seed, rule)
    lying = lie not in ("none", "foreign", "young")
    liars = {i: Liar(lie, 1000 + i) for i in range(LIARS)} if lying else {}
    outcome, strikes = Outcome(0.0), Counter[int]()
    each = training.global_batch_size // PEERS
    for step in range(steps + 1):
        if lie == "young" and step == steps // 2:
            for i in range(4, PEERS):
                peers[i] = newcomer(peers[0], recipe, folder)
        parts = {i: peer.worker.start() for i, peer in peers.items()}
        packets = {i: part.packet for i, part in parts.items()}
        for i, liar in liars.items():
            if i in peers:
                told = liar.packet(parts[i], peers[i], step)
                packets[i] = told if step >= since else packets[i]
        norms = {i: float(part.pieces[0].update.values.norm()) for i, part in parts.items()}
        if median_of(list(norms.values())) > 0:
            honest = [n for i, n in norms.items() if i not in liars]
            outcome.largest = max(outcome.largest, max(honest) / median_of(list(norms.values())))
        for i, peer in peers.items():
            if step < steps:
                data = corpora[lie == "foreign" and i == PEERS - 1]
                first = (step * PEERS + i) * each
                peer.backward(data, range(first, first + each), training.max_grad_norm)
                set_learning_rate(peer.optimizer, rate(step))
                peer.optimizer.step()
        taken = dict(packets)
        while True:
            try:
                aggregate = owner.aggregate(step, [(f"{i}", p, 1.0) for i, p in taken.items()])
                break
            except RejectedUpdate as refused:
                taken.pop(int(refused.peer))
                strikes[int(refused.peer)] += 1
        outcome.held.update(int(t.peer) for t in owner.held)
        for i, peer in list(peers.items()):
            peer.worker.finish(aggregate, parts[i] if i in taken else None)
            if strikes[i] >= STRIKES:
                outcome.out.add(i)
                del peers[i]
    last = peers[max(peers)]
    with last.flat.use(last.worker.common.vector):
        total, tokens = evaluate(last.flat.model, corpus.held_out, 16)
    outcome.loss = total / tokens
    return outcome


def newcomer(old: Peer, recipe: Recipe, folder: Path) -> Peer:
    """One that has just caught up: x' and nothing else."""
    new, common = build_peer(recipe, folder), old.worker.common
    for vector in (new.flat.vector, new.worker.common.vector):
        vector.copy_(common.vector)
    new.worker.common.round, new.worker.common.fingerprint = common.round, common.fingerprint
    return new


def smaller(folder: Path, seed: int) -> None:
    """Make the model in `folder` one of 0.14 M parameters: minutes are short."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 64, 256, 4
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("override", nargs="*", help="of the shortened smoke recipe")
    parser.add_argument("--lies", nargs="+", choices=LIES, default=LIES)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=tuple(RULES))
    parser.add_argument("--from", dest="since", type=int, default=0, help="the first round with lies")
    given = parser.parse_intermixed_args()
    recipe = load_recipe("smoke", [*SHORT, *given.override])
    with tempfile.TemporaryDirectory() as name:
        code = Path(name) / "code.jsonl"  # the standard library's
        texts = [path.read_text() for path in sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))]
        code.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        other = load_recipe("smoke", [*SHORT, *given.override, f"datasets.0.path={code}"])
        base = prepare_base(recipe, Path(name) / "base")
        smaller(base.folder, recipe.training.seed)
        tokenizer = load_tokenizer(recipe.model, base.folder)
        corpora = [build_corpus(r, tokenizer) for r in (recipe, other)]
        print("| lie | rule | held-out loss | put out | rounds held | longest honest packet |")
        print("|---|---|---|---|---|---|")
        for lie in given.lies:
            for rule in given.rules:
                o = run(recipe, corpora, base.folder, lie, RULES[rule], given.since)
                held = ", ".join(f"{i}: {n}" for i, n in sorted(o.held.items()))
                out = ", ".join(map(str, sorted(o.out)))
                print(f"| {lie} | {rule} | {o.loss:.3f} | {out} | {held} | {o.largest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
