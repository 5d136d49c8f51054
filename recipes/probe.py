"""Who hurts: each peer's packets against the gradient of a batch that the owner has himself, over rounds.

    g = gradient of the probe batch's mean loss at x', on the round's sample        (m,)
    b_i = -<g, s_i u_i> / (|g| M)       by what u_i, as it is taken, lowers that loss: a cosine times a length
    R = median of b over all packets of the last ROUNDS rounds: what a usual packet does
    S = 1.4826 x their median distance from the median of their round, more where it lasts; at least R / 2
    h_i = -b_i / R, and 1 more where u_i is held                        harm, in what a usual packet does good
    L_i <- max(0, L_i + (h_i - 1/2) (R / S)^2);   L_i > FOUND: found

L is Page's test (1954) of "it undoes what a usual packet does", b ~ N(-R, S^2), against "it is of no use",
b ~ N(0, S^2). All is measured in what the others of this run do, so nothing is tuned for a model; while fewer
than half lie, R and S are the honest ones'. To be of no use (noise, old packets, other data) is no offence,
unless at more than twice the usual length: there the test is "of no use" against "of the usual use".

A verdict follows from rounds before and from when a gradient was ready. So it refuses packets and never
shortens one: e is replayed from those that were accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi, sin

import numpy as np
import torch

from recipes.aggregate import FEWEST, HELD, median_of
from recipes.apart import check_apart
from recipes.cocktail_sgd import Common, mix_of, read
from recipes.data import Corpus, collate, shuffled
from recipes.flat import Flat
from recipes.model import loss_sum
from recipes.opened import length
from recipes.schema import Recipe

ROUNDS = 16  # rounds that say what is usual
ENOUGH = 24  # packets that say it
FOUND = 16.0  # were harm normal, a useless peer would be found once in e^16 rounds (LOG.md)
FARTHEST = 2.0  # the most harm that counts in one round: three are needed
LASTS = 0.9  # the most that a deviation is believed to follow from that of the round before
ORDER = 1 << 33  # the epoch in whose order rows are probed: no run reaches it, none is held out by it

Updates = Sequence[tuple[str, bytes, float]]


@dataclass(frozen=True)
class Verdict:
    """Packets of one peer hurt."""

    peer: str
    rounds: int  # since L was 0
    harm: float  # mean -b / R over them

    @property
    def why(self) -> str:
        """For its sender and for the owner."""
        what = f"its last {self.rounds} packets"
        if self.harm < 0.5:
            return (
                f"{what} are longer than the others and of no use: they lower the loss of the owner's probe "
                f"batch by {max(-self.harm, 0.0):.1f} times what the usual packet does"
            )
        return (
            f"{what} raise the loss of the owner's probe batch, "
            f"by {self.harm:.1f} times what the usual packet lowers it"
        )


@dataclass(frozen=True)
class Case:
    """What speaks against a peer."""

    level: float = 0.0  # L
    rounds: int = 0
    harm: float = 0.0  # the sum of -b / R

    def and_then(self, harm: float, held: bool, weight: float) -> Case:
        """After one more round; weight: (R / S)^2."""
        level = self.level + (min(harm + held, FARTHEST) - 0.5) * weight
        return Case(level, self.rounds + 1, self.harm + harm) if level > 0 else Case()


class Evidence:
    """The test, for every peer of a run. Knows no model."""

    def __init__(self) -> None:
        self.recent: deque[Mapping[str, float]] = deque(maxlen=ROUNDS)  # b by peer
        self.cases: dict[str, Case] = {}  # of those with L > 0

    def add(self, gains: Mapping[str, float], held: Collection[str] = ()) -> list[Verdict]:
        """A round's b, by peer, and whose packets were shortened; who is found by it."""
        if len(gains) < FEWEST:
            return []
        self.recent.append(gains)
        usual = float(np.median([b for round in self.recent for b in round.values()]))  # R
        if sum(map(len, self.recent)) < ENOUGH or usual <= 0:  # the probe knows nothing
            return []
        weight = (usual / max(self._spread(), usual / 2)) ** 2
        # where most packets seem to hurt it is the batch that is unusual
        zero = min(0.0, median_of(list(gains.values())))
        for peer, gain in gains.items():
            case = self.cases.get(peer, Case())
            self.cases[peer] = case.and_then((zero - gain) / usual, peer in held, weight)
        found = {peer: case for peer, case in sorted(self.cases.items()) if case.level > FOUND}
        # who was found begins anew, should there still be a peer of this name
        self.cases = {p: case for p, case in self.cases.items() if case.level > 0 and p not in found}
        return [Verdict(peer, case.rounds, case.harm / case.rounds) for peer, case in found.items()]

    def _spread(self) -> float:
        """S, of which half of the packets know nothing. What lasts for rounds is one event, not many:
        S^2 grows by (1 + r) / (1 - r), r the correlation of deviations in successive rounds, by their signs.
        """
        off = [deviations(round) for round in self.recent]
        spread = 1.4826 * float(np.median([abs(d) for round in off for d in round.values()] or [0.0]))
        same = [was[p] * now[p] > 0 for was, now in pairwise(off) for p in was.keys() & now.keys()]
        lasts = min(max(sin(pi * (float(np.mean(same)) - 0.5)), 0.0), LASTS) if same else 0.0
        return spread * float(((1 + lasts) / (1 - lasts)) ** 0.5)


def deviations(gains: Mapping[str, float]) -> dict[str, float]:
    """From the round's median, without the peer whose it is."""
    ranked = sorted(gains, key=lambda peer: gains[peer])
    middle = ranked[(len(ranked) - 1) // 2]
    return {peer: gains[peer] - gains[middle] for peer in ranked if peer != middle}


class Probe:
    """x' on the owner's machine, and what a batch of training samples says of a round's packets.

    Takes 8 bytes a parameter (x', which the model computes with, and g), and one sample's activations.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe, corpus: Corpus) -> None:
        if recipe.data.apart:
            check_apart(model)
        self.flat, self.corpus, self.batch = Flat(model), corpus, recipe.swarm.probe_batch_size
        self.common = Common(self.flat.vector, mix_of(recipe.compression), recipe.training.seed)
        self.order = shuffled(len(corpus.samples), recipe.training.seed, ORDER)
        self.next = 0  # row in that order

    def start_from(self, common: Common) -> None:
        """x' of a later round."""
        self.flat.vector.copy_(common.vector)
        self.common.round, self.common.fingerprint = common.round, common.fingerprint

    def look(self, stop: Callable[[], bool] = lambda: False) -> None:
        """g, at x' as it is now, of the next rows: training data, so that what is held out stays unseen."""
        rows = [self.order[(self.next + i) % len(self.order)] for i in range(self.batch)]
        self.next += self.batch
        samples = [self.corpus.samples[row] for row in rows]
        tokens = sum(sample.count for sample in samples)
        self.flat.grad.zero_()
        for sample in samples:  # one at a time: a batch's activations would be more than all else
            if stop():
                return
            loss, _ = loss_sum(self.flat.model, collate([sample]))
            (loss / tokens).backward()  # type: ignore[no-untyped-call]

    def gains(self, updates: Updates) -> dict[str, float]:
        """b of the packets of x's round; none where nothing was sent, or x' has diverged."""
        where = list(self.common.samples())
        g = [sample.take(shard.of(self.flat.grad)).numpy() for shard, sample in where]
        steep = length(np.concatenate(g))
        norms, falls = dict[str, float](), dict[str, float]()
        for peer, packet, _ in updates:
            pieces = read(packet, where, len(where)).pieces
            values = np.concatenate([piece.update.values.numpy() for piece in pieces])
            slopes = np.concatenate([g[p.shard.number][p.update.positions.numpy()] for p in pieces])
            norms[peer] = length(values)
            falls[peer] = -float(np.dot(slopes.astype(np.float64), values))
        usual = median_of(list(norms.values()))  # M
        if not (usual > 0 and 0 < steep < float("inf")):
            return {}
        return {
            peer: fall * min(1.0, HELD * usual / max(norms[peer], usual)) / (steep * usual)
            for peer, fall in falls.items()
        }
