"""What peers that lie cost a run, and what the owner can do about it: held-out losses, in one process.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_liars.py [key=value ...] [--lies ...] [--rules ...]

The smoke recipe, shortened, with a GPT-NeoX of 0.14 M parameters and 10 peers in lockstep, among whom the
batch is shared. Two of them lie from round `--from` on, in the numbers of their packets only. A peer whose
packets were refused three times is out, as at a hub; samples whose work was not taken are leased again.
`+probe`: the owner probes as well (recipes.training). `+known`: he knows who lies, whose packets count for
nothing: the floor of what weighing can do. `flip0`: two send nothing, and take their samples.

In some rows nobody lies. `absent`: the two are not there; `code`, `base64`: one peer trains on Python source,
on random bytes as text, instead of prose; `split`: each has a tenth of the text to itself; `young`: at half
time 6 of 10 are new, `fresh`: 3 are; `back`: one was away, with what it has not sent, for the middle half;
`late`: the packets of one come too late, two of three; `tiny`: one has a single sample a round.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median

import torch
from simulate import Peer, build_peer
from torch import Tensor

from compress import PacketError, decode
from recipes.algorithm.cocktail_sgd import Owner, Part, Piece, mix_of
from recipes.algorithm.robust_mean import MEAN, OPEN, RejectedUpdate, Rule, median_of
from recipes.config.loader import load_recipe
from recipes.config.presets import outer_of
from recipes.config.schema import Recipe
from recipes.data.corpus import Corpus, build_corpus
from recipes.models.base_model import load_tokenizer, prepare_base
from recipes.models.causal_lm import evaluate, load_model
from recipes.training.contribution_score import Doubt, Evidence, Gain, Probe, Updates
from recipes.training.optimizers import learning_rate, set_learning_rate
from transport.membership.admission import STRIKES

PEERS, LIARS = 10, 2
SHORT = ["max_steps=40", "global_batch_size=30", "max_length=64", "val_set_size=0.1", "warmup_steps=3"]
SHORT += ["probe_batch_size=8"]
PROBE, KNOWN = "+probe", "+known"
KINDS = {
    "open": OPEN,
    "norms": MEAN,
    "trimmed_mean": Rule("trimmed_mean"),
    "median": Rule("median"),
    "centered_clip": Rule("centered_clip"),
}
RULES = [kind + beside for beside in ("", PROBE, KNOWN) for kind in KINDS]
LIES = ("flip10", "flip2", "flip1", "flip0", "noise1", "noise10", "stale", "drift")
HONEST = ("none", "absent", "code", "base64", "split", "young", "fresh", "back", "late", "tiny")


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
    rounds: int = 0
    out: dict[int, int] = field(default_factory=dict)  # peers that were put out -> in which round
    held: Counter[int] = field(default_factory=Counter)  # rounds in which a peer was held
    refused: Counter[int] = field(default_factory=Counter)  # the same
    weights: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )  # of its packets
    gains: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # b of those
    longest: float = 0.0  # norm of an honest packet, x the median of its round
    against: float = 0.0  # the most that spoke against an honest peer
    probe_s: float = 0.0  # of the probe, all rounds together
    reasons: list[str] = field(default_factory=list)

    def counted(self, peers: Iterable[int]) -> list[float]:
        """Each one's mean weight, of 1."""
        return [mean(self.weights[i]) for i in peers if self.weights[i]]

    def use(self, peers: Iterable[int]) -> list[float]:
        """What the packets of these did, of what the usual one did, each peer's mean."""
        usual = median([b for gains in self.gains.values() for b in gains] or [1.0])
        return [mean(self.gains[i]) / usual for i in peers if self.gains[i]]


class Watch:
    """The probe, without its thread."""

    def __init__(self, recipe: Recipe, corpus: Corpus, folder: Path) -> None:
        self.probe = Probe(load_model(folder), recipe, corpus)
        self.evidence = Evidence(self.probe.fills)
        self.found: dict[str, str] = {}
        self.seconds = 0.0

    def refuse(self, peers: Sequence[str]) -> None:
        for peer in peers:
            if peer in self.found:
                raise RejectedUpdate(peer, self.found[peer])

    def weight(self, i: int) -> float:
        return self.evidence.doubts.get(f"{i}", Doubt()).weight

    def committed(self, updates: Updates, held: frozenset[str], aggregate: bytes) -> Mapping[str, Gain]:
        started = time.process_time()
        self.probe.look()
        gains = self.probe.gains(updates)
        for verdict in self.evidence.add(gains, held):
            self.found[verdict.peer] = verdict.why
        self.probe.common.apply(aggregate)
        self.seconds += time.process_time() - started
        return gains


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
        self.steps, self.batch = training.total_steps(len(corpus.samples)), training.global_batch_size
        self.rate = learning_rate(training, self.steps)
        self.peers = {i: build_peer(self.recipe, self.folder) for i in range(PEERS)}
        self.strikes, self.outcome = Counter[int](), Outcome()
        self.liars = {i: Liar(self.lie, 1000 + i) for i in range(LIARS)} if self.lie in LIES else {}
        size, mix = self.peers[0].flat.layout.size, mix_of(self.recipe.compression)
        self.outer = outer_of(self.recipe.compression)
        self.owner = Owner(size, mix, training.seed, KINDS[self.rule.split("+")[0]], outer=self.outer)
        self.watch = Watch(self.recipe, corpus, self.folder) if self.rule.endswith(PROBE) else None
        for i in range(LIARS if self.lie == "absent" else 0):
            del self.peers[i]
        self.todo = deque(range(self.steps * self.batch))  # samples to be leased
        self.owed: dict[int, list[int]] = {}  # samples whose work the next packet delivers, by peer
        while self.todo or any(self.owed.values()):
            self.round(self.outcome.rounds)
            self.outcome.rounds += 1
        last = self.peers[max(self.peers)]
        with last.flat.use(last.worker.common.vector):
            total, tokens = evaluate(last.flat.model, corpus.held_out, 16)
        self.outcome.loss = total / tokens
        self.outcome.probe_s = self.watch.seconds if self.watch else 0.0
        return self.outcome

    def round(self, round: int) -> None:
        away = self.come_and_go(round)
        present = {i: peer for i, peer in self.peers.items() if i != away}
        parts = {i: peer.worker.start() for i, peer in present.items()}
        packets = {i: part.packet for i, part in parts.items()}
        for i in self.liars.keys() & present.keys():
            told = self.liars[i].packet(parts[i], present[i], round)
            packets[i] = told if round >= self.since else packets[i]
        self.measure(parts)
        delivers, rate = self.owed, self.rate(self.steps - 1 - max(len(self.todo) - 1, 0) // self.batch)
        self.owed = self.leases(list(present))
        for i, lease in self.owed.items():
            if lease:
                present[i].backward(self.data(i), lease, self.recipe.training.max_grad_norm)
                share = self.outer.peers_share(len(present))
                beta1 = self.recipe.training.adam_beta1
                set_learning_rate(present[i].optimizer, share * rate, share * beta1)
                present[i].optimizer.step()
        aggregate, taken = self.aggregate(round, packets, delivers)
        for i, peer in list(self.peers.items()):
            peer.worker.finish(aggregate, parts[i] if i in taken else None)
            if self.strikes[i] >= STRIKES:
                self.outcome.out[i] = round
                self.give_back(self.owed.pop(i))
                del self.peers[i]

    def come_and_go(self, round: int) -> int | None:
        """Who is away in this round."""
        first = {"young": 4, "fresh": 7}.get(self.lie, PEERS)
        if round == self.steps // 2:
            for i in range(first, PEERS):
                self.peers[i] = newcomer(self.peers[0], self.recipe, self.folder)
                self.give_back(self.owed.pop(i))
        away = PEERS - 1 if self.lie == "back" and round in middle(self.steps) else None
        if away is not None:
            self.give_back(self.owed.pop(away, []))
        return away

    def leases(self, present: list[int]) -> dict[int, list[int]]:
        lease = [self.todo.popleft() for _ in range(min(self.batch, len(self.todo)))]
        if self.lie == "tiny":
            return {i: lease[1:][i :: PEERS - 1] for i in present[:-1]} | {present[-1]: lease[:1]}
        return {i: lease[rank :: len(present)] for rank, i in enumerate(present)}

    def give_back(self, lease: list[int]) -> None:
        self.todo.extendleft(reversed(lease))

    def data(self, i: int) -> Corpus:
        corpus = self.corpora[self.lie in ("code", "base64") and i == PEERS - 1]
        if self.lie != "split":
            return corpus
        size = len(corpus.samples) // PEERS
        return replace(corpus, samples=corpus.samples[i * size : (i + 1) * size], _orders={})

    def aggregate(
        self, round: int, packets: dict[int, bytes], delivers: dict[int, list[int]]
    ) -> tuple[bytes, dict[int, bytes]]:
        """The aggregate, and whose packets are in it: of those that deliver work, if any does."""
        if self.lie == "late" and round % 3:
            packets.pop(PEERS - 1)
            self.give_back(delivers.pop(PEERS - 1, []))
        taken = {i: packet for i, packet in packets.items() if delivers.get(i)} or packets
        while True:
            updates = [(f"{i}", packet, float(len(delivers.get(i, ())) or 1)) for i, packet in taken.items()]
            weights = {i: self.weight(i) for i in taken}
            weighed = [(peer, packet, weight * weights[int(peer)]) for peer, packet, weight in updates]
            try:
                if self.watch:
                    self.watch.refuse([peer for peer, _, _ in updates])
                aggregate = self.owner.aggregate(round, weighed)
                break
            except RejectedUpdate as refused:
                i = int(refused.peer)
                taken.pop(i)
                self.give_back(delivers.pop(i, []))
                self.strikes[i] += 1
                self.outcome.refused[i] += 1
                self.outcome.reasons.append(str(refused))
        held = frozenset(t.peer for t in self.owner.held)
        self.outcome.held.update(map(int, held))
        for i, weight in weights.items():
            self.outcome.weights[i].append(weight)
        if self.watch:
            for peer, gain in self.watch.committed(updates, held, aggregate).items():
                self.outcome.gains[int(peer)].append(gain.b)
            honest = [c.level for peer, c in self.watch.evidence.cases.items() if int(peer) not in self.liars]
            self.outcome.against = max([self.outcome.against, *honest])
        return aggregate, taken

    def weight(self, i: int) -> float:
        if self.rule.endswith(KNOWN):
            return float(i not in self.liars)
        return self.watch.weight(i) if self.watch else 1.0

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
    print(
        "| lie | rule | seed | loss | rounds | out, in round | held | refused | longest | against "
        "| liars: weight, use | honest, least: weight, its mean, use | s |"
    )
    print("|---" * 13 + "|")
    with tempfile.TemporaryDirectory() as name:
        base = prepare_base(recipe, Path(name) / "base")
        smaller(base.folder, recipe.training.seed)
        tokenizer = load_tokenizer(recipe.model, base.folder)
        corpus = build_corpus(recipe, tokenizer)
        for lie in given.lies:
            file = Path(name) / "other.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in other_texts(lie)))
            other = load_recipe("smoke", [*SHORT, *given.override, f"datasets.0.path={file}"])
            corpora = [corpus, build_corpus(other, tokenizer)]
            for rule in given.rules:
                o = Trial(recipe, corpora, base.folder, lie, rule, given.since).run()
                print(row(lie, rule, recipe.training.seed, o), flush=True)
                for reason in o.reasons[:1] + o.reasons[-1:]:
                    print(f"    {reason}", flush=True)


def row(lie: str, rule: str, seed: int, o: Outcome) -> str:
    held, refused = (", ".join(f"{i}: {n}" for i, n in sorted(c.items())) for c in (o.held, o.refused))
    out = ", ".join(f"{i}: {at}" for i, at in o.out.items())
    liars = range(LIARS if lie in LIES else 0)
    honest = [i for i in o.weights if i not in liars]
    lied = f"{max(o.counted(liars), default=1.0):.2f}, {max(o.use(liars), default=0.0):.2f}"
    kept = min(min(o.weights[i]) for i in honest)
    told = f"{kept:.2f}, {min(o.counted(honest)):.2f}, {min(o.use(honest), default=1.0):.2f}"
    cells = [lie, rule, seed, f"{o.loss:.4f}", o.rounds, out, held, refused, f"{o.longest:.2f}"]
    return "| " + " | ".join(map(str, [*cells, f"{o.against:.1f}", lied, told, f"{o.probe_s:.1f}"])) + " |"


if __name__ == "__main__":
    main()
