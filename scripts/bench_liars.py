"""What peers that lie cost a run, and what the owner can do about it: held-out losses, in one process.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_liars.py [key=value ...] [--lies ...] [--rules ...]

The smoke recipe, shortened, with a GPT-NeoX of 0.14 M parameters and 10 peers in lockstep, among whom the
batch is shared. Two of them lie from round `--from` on, in the numbers of their packets only. A peer whose
packets were refused three times is out, as at a hub. `+probe`: the owner probes as well (recipes/probe.py).

In some rows nobody lies. `absent`: the two are not there; `code`, `base64`: one peer trains on Python source,
on random bytes as text, instead of prose; `young`: at half time 6 of 10 are new; `back`: one was away, with
all that it has not sent, for the middle half.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from simulate import Peer, build_peer
from torch import Tensor

from compress import PacketError, decode
from recipes.aggregate import MEAN, OPEN, RejectedUpdate, Rule, median_of
from recipes.base import load_tokenizer, prepare_base
from recipes.cocktail_sgd import Owner, Part, Piece, mix_of
from recipes.data import Corpus, build_corpus
from recipes.model import evaluate, load_model
from recipes.optim import learning_rate, set_learning_rate
from recipes.probe import Evidence, Probe
from recipes.recipe import load_recipe
from recipes.schema import Recipe
from transport.admission import STRIKES

PEERS, LIARS = 10, 2
SHORT = ["max_steps=40", "global_batch_size=30", "max_length=64", "val_set_size=0.1", "warmup_steps=3"]
SHORT += ["probe_batch_size=8"]
PROBE = "+probe"
KINDS = {
    "open": OPEN,
    "norms": MEAN,
    "trimmed_mean": Rule("trimmed_mean"),
    "median": Rule("median"),
    "centered_clip": Rule("centered_clip"),
}
RULES = [*KINDS, *(kind + PROBE for kind in KINDS)]
LIES = ("flip10", "flip2", "flip1", "noise1", "noise10", "stale", "drift")
HONEST = ("none", "absent", "code", "base64", "young", "back")


@dataclass
class Liar:
    """Turns the packet that an honest peer would send into the one that it sends."""

    lie: str
    seed: int
    sent: list[bytes] = field(default_factory=list)

    def packet(self, part: Part, peer: Peer, round: int) -> bytes:
        [piece], mix = part.pieces, peer.worker.common.mix
        u = piece.update.dense()
        if self.lie == "stale":  # its first packet with something in it that fits this round
            self.sent += [part.packet] if bool(u.any()) else []
            return next((p for p in self.sent if fits(p, len(u))), part.packet)
        if self.lie.startswith("flip"):
            return mix.encode(-float(self.lie[4:]) * u)
        if self.lie.startswith("noise"):
            return mix.encode(pushed(torch.zeros_like(u), float(self.lie[5:]), u, self.seed + round))
        # a slow drift: one direction of all parameters, stronger by 5 % of an honest norm each round
        return mix.encode(pushed(u, 0.05 * round, u, self.seed, piece))


def fits(packet: bytes, m: int) -> bool:
    try:
        decode(packet, m)
    except PacketError:
        return False
    return True


def pushed(base: Tensor, times: float, u: Tensor, seed: int, piece: Piece | None = None) -> Tensor:
    """`base` and a random direction, `times` as long as u. With `piece`: the same one each round."""
    n = len(u) if piece is None else piece.sample.n
    push = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    push = push if piece is None else piece.sample.take(push)
    return base + times * u.norm() / push.norm() * push


@dataclass
class Outcome:
    loss: float = 0.0
    out: dict[int, int] = field(default_factory=dict)  # peers that were put out -> in which round
    held: Counter[int] = field(default_factory=Counter)  # rounds in which a peer was held
    refused: Counter[int] = field(default_factory=Counter)  # the same
    longest: float = 0.0  # norm of an honest packet, x the median of its round
    against: float = 0.0  # the most that spoke against an honest peer
    probe_s: float = 0.0  # of the probe, all rounds together
    reasons: list[str] = field(default_factory=list)


class Watch:
    """The probe, without its thread."""

    def __init__(self, recipe: Recipe, corpus: Corpus, folder: Path) -> None:
        self.probe, self.evidence = Probe(load_model(folder), recipe, corpus), Evidence()
        self.found: dict[str, str] = {}
        self.seconds = 0.0

    def refuse(self, peers: Sequence[str]) -> None:
        for peer in peers:
            if peer in self.found:
                raise RejectedUpdate(peer, self.found[peer])

    def committed(
        self, updates: Sequence[tuple[str, bytes, float]], held: frozenset[str], aggregate: bytes
    ) -> None:
        started = time.process_time()
        self.probe.look()
        for verdict in self.evidence.add(self.probe.gains(updates), held):
            self.found[verdict.peer] = verdict.why
        self.probe.common.apply(aggregate)
        self.seconds += time.process_time() - started


@dataclass
class Trial:
    """One run to its end. corpora: the run's, and the one of a peer with other data."""

    recipe: Recipe
    corpora: Sequence[Corpus]
    folder: Path
    lie: str
    rule: str
    since: int

    def run(self) -> Outcome:
        training, corpus = self.recipe.training, self.corpora[0]
        self.steps = training.total_steps(len(corpus.samples))
        rate = learning_rate(training, self.steps)
        self.peers = {i: build_peer(self.recipe, self.folder) for i in range(PEERS)}
        self.strikes, self.outcome = Counter[int](), Outcome()
        self.liars = {i: Liar(self.lie, 1000 + i) for i in range(LIARS)} if self.lie in LIES else {}
        kind = KINDS[self.rule.removesuffix(PROBE)]
        size, mix = self.peers[0].flat.layout.size, mix_of(self.recipe.compression)
        self.owner = Owner(size, mix, training.seed, kind)
        self.watch = Watch(self.recipe, corpus, self.folder) if self.rule.endswith(PROBE) else None
        for i in range(LIARS if self.lie == "absent" else 0):
            del self.peers[i]
        for step in range(self.steps + 1):
            away = self.come_and_go(step)
            present = {i: peer for i, peer in self.peers.items() if i != away}
            parts = {i: peer.worker.start() for i, peer in present.items()}
            packets = {i: part.packet for i, part in parts.items()}
            for i in self.liars.keys() & present.keys():
                told = self.liars[i].packet(parts[i], present[i], step)
                packets[i] = told if step >= self.since else packets[i]
            self.measure(parts)
            if step < self.steps:
                for rank, (i, peer) in enumerate(present.items()):
                    data = self.corpora[self.lie in ("code", "base64") and i == PEERS - 1]
                    first = step * training.global_batch_size
                    lease = range(first, first + training.global_batch_size)[rank :: len(present)]
                    peer.backward(data, lease, training.max_grad_norm)
                    set_learning_rate(peer.optimizer, rate(step))
                    peer.optimizer.step()
            aggregate, taken = self.aggregate(step, packets)
            for i, peer in list(self.peers.items()):
                peer.worker.finish(aggregate, parts[i] if i in taken else None)
                if self.strikes[i] >= STRIKES:
                    self.outcome.out[i] = step
                    del self.peers[i]
        last = self.peers[max(self.peers)]
        with last.flat.use(last.worker.common.vector):
            total, tokens = evaluate(last.flat.model, corpus.held_out, 16)
        self.outcome.loss = total / tokens
        self.outcome.probe_s = self.watch.seconds if self.watch else 0.0
        return self.outcome

    def come_and_go(self, step: int) -> int | None:
        """Who is away in this round."""
        if self.lie == "young" and step == self.steps // 2:
            for i in range(4, PEERS):
                self.peers[i] = newcomer(self.peers[0], self.recipe, self.folder)
        return PEERS - 1 if self.lie == "back" and step % self.steps in middle(self.steps) else None

    def aggregate(self, step: int, packets: dict[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """The aggregate, and whose packets are in it."""
        taken = dict(packets)
        while True:
            updates = [(f"{i}", packet, 1.0) for i, packet in taken.items()]
            try:
                if self.watch:
                    self.watch.refuse([peer for peer, _, _ in updates])
                aggregate = self.owner.aggregate(step, updates)
                break
            except RejectedUpdate as refused:
                taken.pop(int(refused.peer))
                self.strikes[int(refused.peer)] += 1
                self.outcome.refused[int(refused.peer)] += 1
                self.outcome.reasons.append(str(refused))
        self.outcome.held.update(int(t.peer) for t in self.owner.held)
        if self.watch:
            self.watch.committed(updates, frozenset(t.peer for t in self.owner.held), aggregate)
            honest = [c.level for peer, c in self.watch.evidence.cases.items() if int(peer) not in self.liars]
            self.outcome.against = max([self.outcome.against, *honest])
        return aggregate, taken

    def measure(self, parts: dict[int, Part]) -> None:
        norms = {i: float(part.pieces[0].update.values.norm()) for i, part in parts.items()}
        if (usual := median_of(list(norms.values()))) > 0:
            honest = [n for i, n in norms.items() if i not in self.liars]
            self.outcome.longest = max(self.outcome.longest, max(honest) / usual)


def middle(steps: int) -> range:
    return range(steps // 4, 3 * steps // 4)


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


def other_texts(lie: str) -> list[str]:
    if lie == "base64":
        dice = random.Random(1)
        return [base64.b64encode(dice.randbytes(300)).decode() for _ in range(300)]
    return [path.read_text() for path in sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("override", nargs="*", help="of the shortened smoke recipe")
    parser.add_argument("--lies", nargs="+", choices=(*HONEST, *LIES), default=(*HONEST, *LIES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=("norms", "norms+probe"))
    parser.add_argument("--from", dest="since", type=int, default=0, help="the first round with lies")
    given = parser.parse_intermixed_args()
    recipe = load_recipe("smoke", [*SHORT, *given.override])
    print("| lie | rule | seed | held-out loss | put out, round | held | refused | longest | against | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for lie in given.lies:
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "other.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in other_texts(lie)))
            other = load_recipe("smoke", [*SHORT, *given.override, f"datasets.0.path={file}"])
            base = prepare_base(recipe, Path(name) / "base")
            smaller(base.folder, recipe.training.seed)
            tokenizer = load_tokenizer(recipe.model, base.folder)
            corpora = [build_corpus(r, tokenizer) for r in (recipe, other)]
            for rule in given.rules:
                o = Trial(recipe, corpora, base.folder, lie, rule, given.since).run()
                print(row(lie, rule, recipe.training.seed, o), flush=True)
                for reason in o.reasons[:1] + o.reasons[-1:]:
                    print(f"    {reason}", flush=True)


def row(lie: str, rule: str, seed: int, o: Outcome) -> str:
    held, refused = (", ".join(f"{i}: {n}" for i, n in sorted(c.items())) for c in (o.held, o.refused))
    out = ", ".join(f"{i}: {at}" for i, at in o.out.items())
    cells = [lie, rule, seed, f"{o.loss:.4f}", out, held, refused, f"{o.longest:.2f}"]
    return "| " + " | ".join(map(str, [*cells, f"{o.against:.1f}", f"{o.probe_s:.1f}"])) + " |"


if __name__ == "__main__":
    main()
