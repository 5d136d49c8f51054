"""The contribution score of each peer: its packets against the gradient of a batch of the host's own, over
rounds. It finds peers that do harm, and gives those of no use less weight.

    g = gradient of the probe batch's mean loss at x', on the round's sample        (m,)
    b_i = -<g, s_i u_i> / (|g| M)       by what u_i, as it is taken, lowers that loss: a cosine times a length
    R = median of b over all packets of the last ROUNDS rounds: what a usual packet does
    S = 1.4826 x their median distance from the median of their round, more where it lasts; at least R / 2
    h_i = -b_i / R, and 1 more where u_i is shortened                   harm, in what a usual packet does good
    L_i <- max(0, L_i + (h_i - 1/2) (R / S)^2);   L_i > FOUND: found
    r_i = x_i min(R, median of b in this round)                         what u_i would do were it a usual one
    U_i <- max(0, U_i + r_i (r_i / 2 - b_i) / S^2);   weight e^(DOUBTED - U_i), at most 1

L is Page's test (1954) of "it undoes what a usual packet does", b ~ N(-R, S^2), against "it is of no use",
b ~ N(0, S^2); U the same of "it is of no use" against "it does what a usual packet does". All is measured in
what the others of this run do, so nothing is tuned for a model; while fewer than half lie, R and S are the
honest ones'. To be of no use (noise, old packets, other data) is no offence, unless at more than twice the
usual length. A peer in doubt counts for what it was of use, at least. x_i (at most 1) excuses a peer that had
few samples, or whose packets are short because its residual has yet to fill.

A verdict and a weight follow from rounds before and from when a gradient was ready. So packets are refused or
weighed, never shortened: e is replayed from those that were accepted, with the weights that they had.

A thread beside the hub judges rounds, and says whose packets are refused or count for less (ProbeThread):

    commit thread   aggregate: objection? refused; doubt? reweighted -> ledger -> committed(packet, updates)
    this thread     gradient g at x' -> a round is committed: its updates along g -> x' moves on -> g ...

The hub never waits for it: a round committed before a gradient is ready is not judged, and each gradient
judges one round. An error here is a warning, and the run goes on without the probe.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, pi, sin

import numpy as np
import torch

from cocktail_cli.assembly import UpdateJudge
from cocktail_cli.errors import explain
from recipes.algorithm import FEWEST, HELD, GlobalModel, adaptive_rate_of, median_of
from recipes.config import Recipe
from recipes.data import Corpus, shuffled_order
from recipes.models import check_packing_isolation
from recipes.objectives import objective_of
from recipes.training import FlatParameters
from transport.membership import STRIKES
from transport.protocol import WeightedPacket

ROUNDS = 16  # rounds that say what is usual
ENOUGH = 24  # packets that say it
FOUND = 16.0  # were harm normal, a useless peer would be found once in e^16 rounds (LOG.md)
FARTHEST = 2.0  # the most harm that counts in one round: three are needed
DOUBTED = 4.0  # U up to which a packet counts in full, and the most that one packet adds to it
LASTS = 0.9  # the most that a deviation is believed to follow from that of the round before
ORDER = 1 << 33  # the epoch in whose order rows are probed: no run reaches it, none is held out by it

Updates = Sequence[WeightedPacket]


@dataclass(frozen=True)
class Gain:
    """The measured effect of one packet."""

    b: float
    length: float = 1.0  # n_i / M
    share: float = 1.0  # its weight, x the median weight


@dataclass(frozen=True)
class HarmScore:
    """The evidence that a peer does harm."""

    level: float = 0.0  # L
    rounds: int = 0  # since L was 0
    harm: float = 0.0  # the sum of -b / R over them

    def and_then(self, harm: float, held: bool, weight: float) -> HarmScore:
        """Return the score after one more round; weight: (R / S)^2."""
        level = self.level + (min(harm + held, FARTHEST) - 0.5) * weight
        return HarmScore(level, self.rounds + 1, self.harm + harm) if level > 0 else HarmScore()

    @property
    def why(self) -> str:
        """Explain to the peer and to the host that it is found."""
        what, harm = f"its last {self.rounds} packets", self.harm / self.rounds
        if harm < 0.5:
            return (
                f"{what} are longer than the others and of no use: they lower the loss of the host's probe "
                f"batch by {max(-harm, 0.0):.1f} times what the usual packet does"
            )
        return (
            f"{what} raise the loss of the host's probe batch, "
            f"by {harm:.1f} times what the usual packet lowers it"
        )


@dataclass(frozen=True)
class UsefulnessScore:
    """The evidence that a peer is of no use."""

    level: float = 0.0  # U, at most FOUND
    rounds: int = 0  # since it was 0
    did: float = 0.0  # the sum of b over them
    due: float = 0.0  # the sum of r

    def and_then(self, did: float, due: float, spread: float) -> UsefulnessScore:
        """Return the score after one more round."""
        speaks = min(due * (due / 2 - did) / spread**2, DOUBTED)
        level = min(self.level + speaks, FOUND)
        if level <= 0:
            return UsefulnessScore()
        return UsefulnessScore(level, self.rounds + 1, self.did + did, self.due + due)

    @property
    def weight(self) -> float:
        """Weight of its packets: 1, or when in doubt at least what they were of use."""
        return max(exp(min(DOUBTED - self.level, 0.0)), self.use)

    @property
    def use(self) -> float:
        """Share, from 0 to 1, of what usual packets would have done that its packets did."""
        return min(max(self.did / self.due, 0.0), 1.0) if self.due else 1.0

    @property
    def why(self) -> str:
        """Explain the weight to the host."""
        return (
            f"its last {self.rounds} packets lower the loss of the host's probe batch by "
            f"{self.use:.1f} times what usual ones would, and count for no more than that"
        )


class Evidence:
    """The tests, for every peer of a run; they know no model.

    Args:
        fills: rounds after which a residual is as long as it gets.
    """

    def __init__(self, fills: float) -> None:
        self.fills = fills
        self.recent: deque[Mapping[str, Gain]] = deque(maxlen=ROUNDS)  # by peer
        self.cases: dict[str, HarmScore] = {}  # of those with L > 0
        self.doubts: dict[str, UsefulnessScore] = {}  # of those with U > 0
        self.stays: dict[str, int] = {}  # rounds in a row, of those in the newest

    def add(self, gains: Mapping[str, Gain], held: Collection[str] = ()) -> dict[str, HarmScore]:
        """Judge a round: its gains by peer, and whose packets were shortened; returns the peers found."""
        if len(gains) < FEWEST:
            return {}
        self.recent.append(gains)
        self.stays = {peer: self.stays.get(peer, 0) + 1 for peer in gains}
        usual = float(np.median([g.b for round in self.recent for g in round.values()]))  # R
        if sum(map(len, self.recent)) < ENOUGH or usual <= 0:  # the probe knows nothing
            return {}
        spread = max(self._spread(), usual / 2)  # S
        here = median_of([g.b for g in gains.values()])
        zero = min(0.0, here)  # where most packets seem to hurt it is the batch that is unusual
        for peer, gain in gains.items():
            case = self.cases.get(peer, HarmScore())
            self.cases[peer] = case.and_then((zero - gain.b) / usual, peer in held, (usual / spread) ** 2)
            due = self._excused(peer, gain) * max(min(usual, here), 0.0)  # r
            self.doubts[peer] = self.doubts.get(peer, UsefulnessScore()).and_then(gain.b, due, spread)
        found = {peer: case for peer, case in sorted(self.cases.items()) if case.level > FOUND}
        # who was found begins anew, should there still be a peer of this name
        self.cases = {p: case for p, case in self.cases.items() if case.level > 0 and p not in found}
        self.doubts = {p: doubt for p, doubt in self.doubts.items() if doubt.level > 0 and p not in found}
        return found

    def _excused(self, peer: str, gain: Gain) -> float:
        """Compute x: gradients of fewer samples are that much noisier, and a residual grows for rounds."""
        settled = min(median_of([float(stay) for stay in self.stays.values()]), self.fills)
        grown = min(max(gain.length, self.stays[peer] / settled), 1.0)
        return grown * float(min(gain.share, 1.0) ** 0.5)

    def _spread(self) -> float:
        """Compute S, of which half of the packets know nothing. A deviation that lasts for rounds is one
        event, not many: S^2 grows by (1 + r) / (1 - r), r the correlation of deviations in successive
        rounds, by their signs.
        """
        off = [deviations(round) for round in self.recent]
        spread = 1.4826 * float(np.median([abs(d) for round in off for d in round.values()] or [0.0]))
        same = [was[p] * now[p] > 0 for was, now in pairwise(off) for p in was.keys() & now.keys()]
        lasts = min(max(sin(pi * (float(np.mean(same)) - 0.5)), 0.0), LASTS) if same else 0.0
        return spread * float(((1 + lasts) / (1 - lasts)) ** 0.5)


def deviations(gains: Mapping[str, Gain]) -> dict[str, float]:
    """Subtract the round's median, and leave out the peer whose it is."""
    ranked = sorted(gains, key=lambda peer: gains[peer].b)
    middle = ranked[(len(ranked) - 1) // 2]
    return {peer: gains[peer].b - gains[middle].b for peer in ranked if peer != middle}


def norm_of(values: np.ndarray) -> float:
    """Compute the Euclidean norm in float64, where the squares of float32 cannot overflow."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


class Probe:
    """The global model on the host's machine, and what a batch of training samples says of a round's packets.

    Takes 8 bytes a parameter (x', which the model computes with, and g), and one sample's activations.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe, corpus: Corpus, batch: int) -> None:
        if recipe.data.isolates_documents:
            check_packing_isolation(model)
        self.flat, self.corpus, self.batch = FlatParameters(model), corpus, batch
        self.objective = objective_of(recipe)
        rate = adaptive_rate_of(recipe.compression)
        self.sparsest = rate.ladder[0]  # of the compressors that a peer may use
        self.global_model = GlobalModel(self.flat.vector, self.sparsest, recipe.training.seed)
        self.order = shuffled_order(len(corpus.samples), recipe.training.seed, ORDER)
        self.next = 0  # row in that order

    def start_from(self, model: GlobalModel) -> None:
        """Go on from x' of a later round."""
        self.flat.vector.copy_(model.vector)
        self.global_model.round, self.global_model.fingerprint = model.round, model.fingerprint

    def look(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Compute g at x' on the next rows of the training data; held-out rows stay unseen."""
        rows = [self.order[(self.next + i) % len(self.order)] for i in range(self.batch)]
        self.next += self.batch
        samples = [self.corpus.samples[row] for row in rows]
        terms, device = self.objective.terms(samples), torch.device("cpu")
        self.flat.grad.zero_()
        for sample in samples:  # one at a time: a batch's activations would be more than all else
            if stop():
                return
            loss = self.objective.loss(self.flat.model, [sample], device)
            (loss.sum / terms).backward()  # type: ignore[no-untyped-call]

    @property
    def fills(self) -> float:
        """Rounds after which the sparsest sender's packets have held as much as there was: 1 / (p K)."""
        return 1 / (self.sparsest.random_ratio * self.sparsest.topk_ratio)

    def gains(self, packets: Updates) -> dict[str, Gain]:
        """Measure the packets of the round of x'; empty where nothing was sent, or x' has diverged."""
        g = dict[int, np.ndarray]()  # on the round's sample, by number of the shard
        norms, falls = dict[str, float](), dict[str, float]()
        for peer, packet, _ in packets:
            pieces = self.global_model.decode(packet).shard_updates
            for one in pieces:
                if one.shard.number not in g:
                    g[one.shard.number] = one.sample.take(one.shard.of(self.flat.grad)).numpy()
            updates = [(piece.shard.number, piece.update.decoded()) for piece in pieces]
            values = np.concatenate([update.values.numpy() for _, update in updates])
            slopes = np.concatenate([g[number][update.positions.numpy()] for number, update in updates])
            norms[peer] = norm_of(values)
            falls[peer] = -float(np.dot(slopes.astype(np.float64), values))
        steep = norm_of(np.concatenate([*g.values()])) if g else 0.0
        usual = median_of(list(norms.values()))  # M
        if not (usual > 0 and 0 < steep < float("inf")):
            return {}
        whole = median_of([weight for _, _, weight in packets]) or 1.0
        gains = dict[str, Gain]()
        for peer, _, weight in packets:
            size = norms[peer] / usual
            b = falls[peer] * min(1.0, HELD / max(size, 1.0)) / (steep * usual)
            gains[peer] = Gain(b, size, weight / whole)
        return gains


log = logging.getLogger(__name__)

ENDS_WITHIN = 10.0  # seconds for a forward and backward pass under way


@dataclass(frozen=True)
class Committed:
    """A committed round, with the updates to judge, if any."""

    packet: bytes
    updates: Updates = ()
    held: frozenset[str] = frozenset()  # peers whose packets were shortened


class ProbeThread(UpdateJudge):
    """Runs the probe.

    Args:
        load: builds the probe at the global model of the round the run goes on with; called in the thread.
        tell: (peer, message) for the host.
    """

    def __init__(self, load: Callable[[], Probe], tell: Callable[[str, str], None]) -> None:
        self.load, self.tell = load, tell
        self.found: dict[str, str] = {}  # harmful peer -> why
        self.refused = Counter[str]()  # harmful peer -> refused packets
        self.weights: Mapping[str, float] = {}  # of peers whose packets count for less
        self.doubted = set[str]()  # peers that the host was told of
        self.rounds: queue.SimpleQueue[Committed | None] = queue.SimpleQueue()
        self.ready = threading.Event()  # a gradient has been computed that has judged no round
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._guarded, name="probe", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def committed(self, packet: bytes, updates: Updates, held: frozenset[str] = frozenset()) -> None:
        """Hand over the next durable round."""
        if self.thread.is_alive():
            self.rounds.put(Committed(packet, updates if self.ready.is_set() else (), held))

    def objection(self, peer: str, packet: bool = True) -> str:
        """Return why a peer's packet is refused, or "". After STRIKES a peer of this name is another one."""
        why = self.found.get(peer, "")
        self.refused[peer] += bool(why and packet)
        if self.refused[peer] == STRIKES:
            del self.found[peer], self.refused[peer]
        return why

    def weight(self, peer: str) -> float:
        """Return less than 1 for a doubted peer."""
        return self.weights.get(peer, 1.0)

    def close(self) -> None:
        self.stopped.set()
        self.rounds.put(None)
        if self.thread.ident is not None:
            self.thread.join(ENDS_WITHIN)

    # ---- in the thread -------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.warning("the probe ended", exc_info=True)
            self.tell("", f"the run goes on without its probe: {explain(error).message}")

    def _work(self) -> None:
        probe = self.load()
        evidence = Evidence(probe.fills)
        while not self.stopped.is_set():
            if self.rounds.empty() and not self.ready.is_set():
                probe.look(self.stopped.is_set)
                self.ready.set()
            round = self.rounds.get()
            if round is None:
                return
            if round.updates and self.ready.is_set():
                self.ready.clear()
                found = evidence.add(probe.gains(round.updates), round.held)
                self.found |= {peer: case.why for peer, case in found.items()}
                self._doubt(evidence.doubts)
            probe.global_model.apply(round.packet)

    def _doubt(self, doubts: Mapping[str, UsefulnessScore]) -> None:
        """Set the weights of doubted peers; tell the host once of each that counts for less than half."""
        self.weights = {peer: doubt.weight for peer, doubt in doubts.items() if doubt.weight < 1}
        for peer in [p for p, weight in self.weights.items() if weight < 0.5 and p not in self.doubted]:
            self.doubted.add(peer)
            self.tell(peer, doubts[peer].why)
