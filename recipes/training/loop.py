"""One peer's training: rounds come in, work is done, events come out.

    for event in finetune(link, peer): show(event)

The exchange of round t runs in a thread of its own during the compute of round t, all micro-batches. The
two meet at the join (Algorithm 1, line 6), so x_i is never written while a gradient is computed from it. With
staleness 0 the exchange follows the step instead: synchronous data-parallel training, the reference.

Asked to leave, a peer finishes the exchange in flight, drops a gradient it has not applied (its lease is done
by others), and hands the largest part of its residual to the aggregators.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from torch import nn

from recipes.algorithm import DecodedPacket, SideStream, worker_of
from recipes.config import Recipe
from recipes.data import Sample, unpack_samples
from recipes.models import check_packing_isolation
from recipes.objectives import Measured

from .lease_gradient import Gradient, apply, computed
from .micro_batch import first_line, global_model_fits, is_full, shrink_to_fit
from .stochastic_rounding import RoundedLocalModel
from .trainer import SingleDeviceTrainer
from .types import (
    CaughtUp,
    Delivery,
    EvaluatedPart,
    Event,
    Flight,
    HandedOver,
    Interrupted,
    Lease,
    Left,
    Link,
    Lowered,
    NotHandedOver,
    Peer,
    Round,
    StepDone,
)


@dataclass(frozen=True)
class Exchanged:
    """An exchange that has ended: from encoding to the aggregate's arrival."""

    sent: DecodedPacket
    delivered: list[Lease]
    accepted: bool
    refused: str  # why the aggregator could not use the packet; "": it could, or it came too late
    aggregate: DecodedPacket
    started: float
    finished: float


def build_peer(
    model: nn.Module,
    recipe: Recipe,
    micro_batch: int,
    name: str = "",
    round: int = 0,
    device: torch.device | str | None = None,
) -> Peer:
    """Build a peer called `name` whose model is x' of `round`: the base weights, or a snapshot's.

    Args:
        device: where it trains; None: where the model is. A model in the host's memory is brought there.
    """
    if recipe.data.isolates_documents:
        check_packing_isolation(model)
    own = crc32(name.encode())
    local = SingleDeviceTrainer(model, recipe, own, None if device is None else torch.device(device))
    flat, x = local.flat, local.flat if isinstance(local.flat, RoundedLocalModel) else local.flat.vector
    beside = global_model_fits(local, recipe)
    if isinstance(flat, RoundedLocalModel):
        if beside:
            flat.bring_global_model()
        vector = flat.global_model
    else:
        vector = flat.vector.to(local.device if beside else torch.device("cpu"), copy=True)
    worker = worker_of(recipe, x, vector, flat.layout.name_at, own, round)
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    return Peer(local, worker, recipe, vocabulary, micro_batch, side=SideStream(local.device))


def finetune(link: Link, peer: Peer, now: int) -> Iterator[Event]:
    """Take part in a run until it is over or `link.leaving` is set.

    Args:
        now: the round the swarm is at; the packets before it are fetched and applied first.

    Raises:
        NonFiniteError: this peer's model has diverged; names the parameter.
        Whatever `link` raises when the hub cannot be reached any more.
    """
    with suppress(Interrupted):  # nothing is lost: what was not committed stays here, its leases go back
        yield from take_part(link, peer, now)
    if link.ended is None:
        peer.trainer.check()
        try:
            with suppress(Interrupted):
                if (handed_over := hand_over(link, peer)) is not None:
                    yield handed_over
        except (RuntimeError, MemoryError) as error:
            if not is_full(error):
                raise
            yield NotHandedOver(first_line(error))  # and go on to the goodbye, after which it is kept
    if link.ended is None:
        link.leave("left on request")
    yield Left(link.ended or "left on request", finished=link.ended is not None)


def take_part(link: Link, peer: Peer, now: int) -> Iterator[Event]:
    """Take part in round after round, until there is none."""
    global_model = peer.worker.global_model
    stale = peer.recipe.compression.staleness == 1
    held_out: list[Sample] = []
    if peer.flight is not None and peer.flight.moved is not None:  # of a session that is over: x_i follows x'
        settle(peer)
    peer.flight = None  # what it held stays in the residual
    peer.encoded.set()
    peer.evaluated.set()
    yield catch_up(link, peer, max(now, global_model.round))
    link.ready(global_model.round, global_model.fingerprint)
    with ThreadPoolExecutor(1, thread_name_prefix="exchange") as thread:
        # asked to leave between two exchanges: one more delivers the step just made, if a round is open
        while (peer.undelivered or not link.leaving.is_set()) and (round := link.next_round()) is not None:
            if round.round < global_model.round:  # announced before a stall, read after it
                continue
            if round.round > global_model.round:
                yield catch_up(link, peer, round.round)
            exchange: Future[Exchanged] | None = None
            if round.exchange and stale:
                peer.encoded.clear()
                if round.eval_parts:
                    peer.evaluated.clear()
                exchange = thread.submit(exchanged, link, peer, round, time.monotonic(), peer.side.mark())
            try:
                if round.eval_parts and not link.leaving.is_set():
                    held_out = held_out or unpack_samples(link.fetch("eval"), peer.vocabulary)
                    part = partial(evaluate_part, link, peer, round, held_out)
                    yield (yield from shrink_to_fit(peer, part))
            finally:
                peer.evaluated.set()
            wanted = round.samples and not link.leaving.is_set()
            gradient = (yield from computed(link, peer, round)) if wanted else None
            if link.leaving.is_set():
                gradient = None  # its lease goes back with the goodbye: it would be in x_i twice
                if not stale:
                    break
            if round.exchange and not stale:  # fresh: the packet holds the step just made
                apply(peer, round, gradient)
                exchange = thread.submit(exchanged, link, peer, round, time.monotonic(), peer.side.mark())
            if exchange is not None:
                done = exchange.result()
                if stale:
                    gradient = None if link.leaving.is_set() else gradient
                    apply(peer, round, gradient)
                yield join(link, peer, round, gradient, done)
                yield from leave_room(peer)


def catch_up(link: Link, peer: Peer, now: int) -> CaughtUp:
    """Apply the packets this peer has not seen, up to round `now`."""
    start = peer.worker.global_model.round
    for packet in link.packets(start, now):
        peer.worker.catch_up(packet)
    return CaughtUp(now, now - start)


def exchanged(
    link: Link, peer: Peer, round: Round, started: float, mark: torch.cuda.Event | None
) -> Exchanged:
    """Encode, send, wait for the commit, receive (lines 1 to 5), move x' (line 7). x_i stays as it is: this
    runs beside the compute, in a thread and on a stream of its own.

    mark: the device has x_i of this round behind it.
    """
    global_model, delivered = peer.worker.global_model, list(peer.undelivered)
    try:
        with peer.side.behind(mark):
            sent = peer.worker.start(link.fits, alone=len(round.members) == 1)
    finally:
        peer.encoded.set()
    flight = peer.flight = Flight(sent, delivered)
    work = sum((lease.measured for lease in delivered), Measured())
    try:
        committed = link.exchange(
            sent.packet,
            Delivery(
                round=global_model.round,
                fingerprint=global_model.fingerprint,
                delivers=[lease.round for lease in delivered],
                loss_sum=work.loss_sum,
                tokens=work.terms,
                rewards=work.rewards,
                compute_s=peer.compute_s,
                wait_s=peer.wait_s,
                grad_norm=peer.grad_norm,
            ),
        )
    except Interrupted as interrupted:
        flight.taken = interrupted.arrived
        raise
    accepted = flight.taken = link.name in committed.accepted
    aggregate = global_model.decode(link.fetch(f"packet/{global_model.round}"))
    refused = committed.refused.get(link.name, "")
    if not peer.worker.local_model.from_global_model:
        peer.evaluated.wait()
        with peer.side.behind(mark):
            move(peer, aggregate)
    peer.worker.bring(aggregate, sent if accepted else None)
    return Exchanged(sent, delivered, accepted, refused, aggregate, started, time.monotonic())


def move(peer: Peer, aggregate: DecodedPacket) -> None:
    """Move x' alone (line 7); from here on x_i has to follow, or their difference would be no residual."""
    assert peer.flight is not None
    peer.worker.global_model.move(aggregate)
    peer.flight.moved = aggregate


def join(link: Link, peer: Peer, round: Round, gradient: Gradient | None, done: Exchanged) -> StepDone:
    """Move x_i by the exchange (line 6), and x' where that waited. A refused packet stays unsent."""
    worker, started = peer.worker, time.monotonic()
    with peer.side.turn():
        if peer.flight is not None and peer.flight.moved is None:
            move(peer, done.aggregate)
        worker.follow(done.aggregate, done.sent if done.accepted else None)
    peer.flight, join_s = None, time.monotonic() - started
    if done.accepted:
        peer.undelivered = [lease for lease in peer.undelivered if lease not in done.delivered]
    if (not done.accepted or round.spans > 1) and not link.leaving.is_set():
        # left out of this round, or of those since: a member again from the next one that opens
        link.ready(worker.global_model.round, worker.global_model.fingerprint)
    peer.wait_s = max(0.0, done.finished - gradient.finished) if gradient else peer.wait_s
    return StepDone(
        round=round.round,
        step=round.step,
        tokens=gradient.lease.tokens if gradient else 0,
        loss=gradient.lease.measured.mean if gradient else None,
        grad_norm=gradient.norm if gradient else None,
        lr=peer.rate,
        fingerprint=worker.global_model.fingerprint,
        accepted=done.accepted,
        refused=done.refused,
        sent_bytes=len(done.sent.packet),
        received_bytes=len(done.aggregate.packet),
        exchange_started=done.started,
        exchange_finished=done.finished,
        compute_started=gradient.started if gradient else None,
        compute_finished=gradient.finished if gradient else None,
        join_s=join_s,
    )


def leave_room(peer: Peer) -> Iterator[Lowered]:
    """Halve the micro-batch where an exchange found no room beside it."""
    if peer.worker.short_of_memory:
        peer.worker.short_of_memory = False
        if peer.micro_batch > 1:
            peer.micro_batch = (peer.micro_batch + 1) // 2
            yield Lowered(peer.micro_batch, "the exchange had no room beside the compute")


def settle(peer: Peer) -> None:
    """Complete an exchange that ended and is not joined, or take a packet that was under way out of the
    residual: the loop has ended.

    Where it is not known what became of a packet it is taken out as well: it may be lost, once, but never be
    in the run twice. Its leases then count as not delivered, since others may do them again.
    """
    peer.side.rejoin()
    flight, peer.flight = peer.flight, None
    if flight is None:
        return
    with peer.side.turn():
        if flight.moved is not None:
            peer.worker.follow(flight.moved, flight.sent if flight.taken else None)
        elif flight.taken is not False:
            peer.worker.subtract(flight.sent)
    if flight.taken:
        peer.undelivered = [lease for lease in peer.undelivered if lease not in flight.delivered]


def hand_over(link: Link, peer: Peer) -> HandedOver | None:
    """Hand the largest part of the residual to the aggregator; the rest stays this peer's, should it come
    back.

    Returns None where nothing went: there is nothing, no time for it, or work in x_i that others will do
    again.
    """
    settle(peer)
    worker, room = peer.worker, link.room
    if peer.undelivered or peer.unfinished or not room or (part := worker.handoff(room)) is None:
        return None
    before, taken = worker.residual_norm(), None
    try:
        taken = link.hand_over(worker.global_model.round, part.packet)
    finally:
        if taken is not False:  # whatever became of it: never in the run twice
            worker.subtract(part)
    smaller = 1 - worker.residual_norm() / before if taken is not False else 0.0
    return HandedOver(worker.global_model.round, len(part.packet), smaller, taken)


def evaluate_part(link: Link, peer: Peer, round: Round, held_out: list[Sample]) -> EvaluatedPart:
    """Evaluate x' (not x_i) on every `eval_parts`-th held-out sample."""
    part = held_out[round.eval_part :: round.eval_parts]
    peer.encoded.wait()  # it reads x_i, which may be set aside meanwhile
    found = peer.trainer.evaluate(peer.worker.global_model.vector, part, peer.micro_batch)
    link.evaluated(round.round, round.eval_part, found)
    return EvaluatedPart(round.round, found)
