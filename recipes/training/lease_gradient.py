"""The work of a lease: its gradient, or with local steps one gradient after the other, each a step of x_i.

    lease -> H parts, in their order;  each but the last: g_i, x_i <- x_i - optimizer(g_i)
    the last: g_i, which the loop applies where the exchange meets it

While a packet is encoded x_i is read: a local step waits for that, not for the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from recipes.algorithm import one_machine, outer_optimizer_of
from recipes.data import Sample, SampleLimits, batches, unpack_samples
from recipes.errors import ForeignSamples
from recipes.objectives import Measured, objective_of

from .gradient_noise import compared_in
from .micro_batch import shrink_to_fit
from .optimizers import learning_rate
from .types import Event, Lease, Link, Peer, Round


@dataclass(frozen=True)
class Gradient:
    """A gradient, in `.grad` of the parameters: of a lease, or of its last part."""

    lease: Lease
    norm: float
    number: int  # of the step, within the round
    started: float
    finished: float

    def then(self, last: Gradient) -> Gradient:
        """Combine the work of this step and the next."""
        mine, its = self.lease, last.lease
        lease = replace(mine, measured=mine.measured + its.measured, tokens=mine.tokens + its.tokens)
        return replace(last, lease=lease, started=self.started)


def computed(link: Link, peer: Peer, round: Round) -> Generator[Event, None, Gradient | None]:
    """Compute the gradient of this peer's lease, or of its last step, where it has several.

    Returns None when the peer is asked to leave meanwhile: the lease then goes back to the hub with the
    goodbye.
    """
    lease = leased(peer, link.fetch(f"lease/{round.round}"), round.samples)
    beside: dict[str, bytes] = {}
    for extension in peer.trainer.extensions:
        if found := (yield from extension.beside(link, peer, round)):
            beside[extension.name] = found
    steps = min(local_steps(peer, round), max(1, round.steps - round.step))
    done: Gradient | None = None
    for number, part in parts_of(lease, steps):
        if done is not None:
            peer.encoded.wait()  # no longer than it takes to read x_i
            take_step(peer, round, done.number)
            peer.unfinished = True
        share = share_of(peer, round, len(part))
        new = yield from shrink_to_fit(peer, partial(compute, link, peer, round.round, number, part, share))
        if new is None:
            return None
        done = new if done is None else done.then(new)
    return done and replace(done, lease=replace(done.lease, beside=beside))


def leased(peer: Peer, packed: bytes, count: int) -> list[Sample]:
    """Unpack samples that the hub has sent. Raises ForeignSamples where they are not so many, or of other
    lengths than the run's."""
    limits = SampleLimits.of(peer.recipe, peer.vocabulary)
    samples = unpack_samples(packed, peer.vocabulary, limits.tokens)
    if len(samples) != count:
        raise ForeignSamples(f"{len(samples):,} samples came, {count:,} were announced")
    return samples


def local_steps(peer: Peer, round: Round) -> int:
    """Return H of a round."""
    return round.local_steps or peer.recipe.compression.step_rungs[0]


def parts_of(lease: Sequence[Sample], steps: int) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Divide a lease into nearly equal steps; yield those that have a sample."""
    numbers = [-(-(place + 1) * steps // len(lease)) - 1 for place in range(len(lease))]
    for number, places in groupby(range(len(lease)), numbers.__getitem__):
        yield number, [lease[place] for place in places]


def share_of(peer: Peer, round: Round, samples: int) -> float:
    """Return the share of a step's samples that a gradient of this peer has; 1 where its optimizer works for
    itself, as published methods have it."""
    alone = round.peers == 1 or not one_machine(peer.recipe.compression)
    return 1.0 if alone else min(1.0, samples / peer.recipe.training.global_batch_size)


def halves_of(peer: Peer, lease: Sequence[Sample], share: float) -> list[Sequence[Sample]]:
    """Cut a lease in two where the noise in it is to be measured now."""
    half = len(lease) // 2 if share < 1 and compared_in(peer.steps) else 0
    return [lease[:half], lease[half:]] if half else [lease]


def groups_of(peer: Peer, samples: Sequence[Sample]) -> Iterator[list[Sequence[Sample]]]:
    """Cut samples into groups of micro-batches that are computed at once."""
    parts, width = list(batches(samples, peer.micro_batch)), peer.trainer.at_once
    for start in range(0, len(parts), width):
        yield parts[start : start + width]


def compute(
    link: Link, peer: Peer, round: int, number: int, lease: Sequence[Sample], share: float = 1.0
) -> Gradient | None:
    """Compute the gradient of the mean loss over the terms of a step, micro-batch by micro-batch."""
    started, norm = time.monotonic(), None
    terms = objective_of(peer.recipe).terms(lease)
    halves = halves_of(peer, lease, share)
    while norm is None:
        found = Measured()
        peer.trainer.zero(share)
        for half in halves:
            for group in groups_of(peer, half):
                if link.leaving.is_set():
                    return None
                found += peer.trainer.backward(group, terms, round)
            if half is not halves[-1]:
                peer.trainer.partly(found.terms / max(terms, 1))
        norm = peer.trainer.clip(peer.recipe.training.max_grad_norm)
    tokens = sum(sample.count for sample in lease)
    if found.notes:
        parts = [part for half in halves for group in groups_of(peer, half) for part in group]
        notes = {name: in_order(lease, parts, of) for name, of in found.notes.items()}
        found = replace(found, notes=notes)
    return Gradient(Lease(round, found, tokens), norm, number, started, time.monotonic())


def in_order(lease: Sequence[Sample], parts: Sequence[Sequence[Sample]], notes: str) -> str:
    """Bring the notes on micro-batches into the order of their lease."""
    size = len(notes) // len(lease)
    computed = (id(sample) for part in parts for sample in part)
    at = {sample: number * size for number, sample in enumerate(computed)}
    return "".join(notes[at[id(sample)] :][:size] for sample in lease)


def apply(peer: Peer, round: Round, gradient: Gradient | None) -> None:
    """x_i <- x_i - optimizer(g_i): the optimizer's part of line 6."""
    if gradient is None:
        return
    take_step(peer, round, gradient.number)
    peer.compute_s, peer.grad_norm = gradient.finished - gradient.started, gradient.norm
    peer.undelivered.append(gradient.lease)
    peer.unfinished = False


def take_step(peer: Peer, round: Round, number: int) -> None:
    """Take the `number`-th optimizer step of a round."""
    training = peer.recipe.training
    if peer.rate_at is None:
        peer.rate_at = learning_rate(training, round.steps)
    peer.rate = peer.rate_at(round.step + number)
    busy = min(round.peers, training.global_batch_size)  # more than samples have none
    share = outer_optimizer_of(peer.recipe.compression).peers_share(max(busy, 1))
    peer.trainer.step(share * peer.rate, share * training.adam_beta1)
    peer.steps += 1
