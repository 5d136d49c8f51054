"""One peer's training: rounds come in, work is done, events come out.

    for event in finetune(link, peer): show(event)

The exchange of round t runs in threads of its own during the compute of round t, all micro-batches. The
two meet at the join (Algorithm 1, line 6), so x_i is never written while a gradient is computed from it. With
staleness S above 1 they meet after the compute of round t + S - 1. With staleness 0 the exchange follows the
step instead: synchronous data-parallel training, the reference.

The work of a lease is its gradient, or with local steps one gradient after the other, each a step of x_i.

    lease -> H parts, in their order;  each but the last: g_i, x_i <- x_i - optimizer(g_i)
    the last: g_i, which the loop applies where the exchange meets it

While a packet is encoded x_i is read: a local step waits for that, not for the exchange.

Asked to leave, a peer finishes the exchanges in flight, drops a gradient it has not applied (its lease is
done by others), and hands the largest part of its residual to the aggregators.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import TypeVar
from zlib import crc32

import torch
from torch import nn

from compress import PacketError
from recipes.algorithm import DecodedPacket, SideStream, worker_of
from recipes.config import Recipe
from recipes.data import Sample, StoredSamples, batches, unpack_samples
from recipes.errors import ForeignPacket, ForeignSamples
from recipes.models import check_packing_isolation
from recipes.objectives import Measured

from .gradient_noise import compared_in
from .micro_batch import MemoryFull, first_line, fixes, global_model_fits, is_full, release
from .optimizers import learning_rate, mask_momentum
from .trainer import RoundedLocalModel, SingleDeviceTrainer
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

T = TypeVar("T")


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
    at, config = None if device is None else torch.device(device), getattr(model, "config", None)
    local = SingleDeviceTrainer(model, recipe, crc32(name.encode()), at)
    return peer_of(local, recipe, round, micro_batch, getattr(config, "vocab_size", None))


def peer_of(
    local: SingleDeviceTrainer, recipe: Recipe, round: int, micro_batch: int, vocabulary: int | None = None
) -> Peer:
    """Build the peer of a trainer, whose model is x' of `round`."""
    flat, x = local.flat, local.flat if isinstance(local.flat, RoundedLocalModel) else local.flat.vector
    beside = global_model_fits(local, recipe)
    if isinstance(flat, RoundedLocalModel):
        if beside:
            flat.bring_global_model()
        vector = flat.global_model
    else:
        vector = flat.vector.to(local.device if beside else torch.device("cpu"), copy=True)
    worker = worker_of(recipe, x, vector, flat.layout.name_at, round)
    if recipe.compression.momentum_masking:
        worker.on_taken = partial(mask_momentum, local.optimizer, flat.masters, flat.layout.offsets)
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
    global_model, staleness = peer.worker.global_model, peer.recipe.compression.staleness
    most = max(rung.staleness for rung in peer.rungs)
    held_out: StoredSamples | None = None
    settle(peer, unknown_stays=True)  # of a session that is over
    peer.encoded.set()
    yield catch_up(link, peer, max(now, global_model.round))
    link.ready(global_model.round, global_model.fingerprint)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(most + 2, thread_name_prefix="exchange"))
        stack.enter_context(abandoned_on_fault(link))
        stack.enter_context(stopped_within(peer, link.leaving))
        exchanges = Exchanges(link, peer, threads)
        # asked to leave between two exchanges: one more delivers the step just made, if a round is open
        while (peer.undelivered or not link.leaving.is_set()) and (round := link.next_round()) is not None:
            follows = global_model.round + len(peer.flights)
            if round.round < follows:  # announced before a stall, read after it
                continue
            if round.round > follows or round.eval_parts or not round.exchange:  # x' of this very round
                yield from exchanges.join_down_to(0)
            if round.round > global_model.round + len(peer.flights):
                yield catch_up(link, peer, round.round)
            if not round.exchange and not round.eval_parts:  # a call: this peer's turn is near
                link.ready(global_model.round, global_model.fingerprint)
            with peer.reading if round.eval_parts else nullcontext():
                if round.exchange and staleness:  # no ladder has fresh rungs beside others
                    exchanges.start(round)
                if round.eval_parts and not link.leaving.is_set():
                    if held_out is None:
                        held_out = StoredSamples(stack.enter_context(link.fetched("eval")), peer.limits)
                    part = partial(evaluate_part, link, peer, round, held_out)
                    with suppress(Interrupted):  # what is in flight is finished
                        yield (yield from shrink_to_fit(peer, part))
            wanted = round.samples and not link.leaving.is_set()
            gradient = (yield from computed(link, peer, round)) if wanted else None
            if link.leaving.is_set():
                gradient = None  # its lease goes back with the goodbye: it would be in x_i twice
                if not staleness:
                    break
            if round.exchange and not staleness:  # fresh: the packet holds the step just made
                apply(peer, round, gradient)
                exchanges.start(round)
            if round.exchange:
                exchanges.wait()
                if staleness:
                    gradient = None if link.leaving.is_set() else gradient
                    apply(peer, round, gradient)
                exchanges.computed(gradient)
                leaves = link.leaving.is_set() or round.spans > 1
                yield from exchanges.join_down_to(0 if leaves else exchanges.most - 1)
                yield from leave_room(peer)
        yield from exchanges.join_down_to(0)


@contextmanager
def stopped_within(peer: Peer, leaving: threading.Event) -> Iterator[None]:
    """Raise Interrupted before a forward pass once this peer was asked to leave, and on a CPU, where a
    micro-batch may take minutes, within a forward or backward pass."""
    trainer, within = peer.trainer, peer.trainer.kind == "cpu"

    def look(*_: object) -> None:
        if leaving.is_set():
            raise Interrupted("asked to leave")

    with ExitStack() as hooks:
        if isinstance(trainer, SingleDeviceTrainer) and not peer.recipe.training.torch_compile:
            for module in trainer.model.modules() if within else [trainer.model]:
                hooks.callback(module.register_forward_pre_hook(look).remove)
            for parameter in trainer.model.parameters():
                if within and parameter.requires_grad:
                    hooks.callback(parameter.register_hook(look).remove)  # type: ignore[no-untyped-call]
        yield


@dataclass
class Exchange:
    """A round in flight: its thread's work, and the step that was computed beside it."""

    round: Round
    flight: Flight
    committed: Future[None]
    arrived: Future[None]
    landed: Future[None] | None = None
    gradient: Gradient | None = None


class Exchanges:
    """The exchanges of a peer in flight. With staleness S, S at most while it computes, S - 1 between rounds;
    in the first round of a smaller S one more, which is joined with that round.

        start      encode, send, wait for the commit; receive (lines 1 to 5), beside the compute
        wait       until the newest round is committed, and the oldest has arrived where S are in flight
        join       x' and x_i move by the oldest

    So x' and x_i move by a round's aggregate after the compute of S rounds, however early it is here: what is
    computed depends on no line. The hub opens a round when the one before is committed. So at most one update
    is not decided on, and what it left out is known before the next one is encoded.
    """

    def __init__(self, link: Link, peer: Peer, threads: ThreadPoolExecutor) -> None:
        self.link, self.peer, self.threads = link, peer, threads
        self.most = 1  # S of the newest round
        self.in_flight = deque[Exchange]()

    def start(self, round: Round) -> None:
        """Begin the exchange of a round behind what the device was asked, and to move x' by the one that is
        due before the next."""
        link, peer, submit = self.link, self.peer, self.threads.submit
        earlier = [one.sent for one in peer.flights if one.taken and one.sent]
        flight, mark = Flight(round.round, list(peer.undelivered), time.monotonic()), peer.side.mark()
        peer.flights.append(flight)
        self.most = max(peer.rungs[round.rung].staleness, 1)
        peer.encoded.clear()
        committed = submit(exchange, link, peer, round, flight, earlier, mark)
        exchanged = Exchange(round, flight, committed, submit(receive, link, peer, flight, committed))
        self.in_flight.append(exchanged)
        if len(self.in_flight) >= self.most:
            self.in_flight[0].landed = submit(land, peer, self.in_flight[0], mark)

    def wait(self) -> None:
        """Wait for what the next round needs. Raises what ended an exchange."""
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        newest.committed.result()
        if oldest.landed is not None:
            oldest.landed.result()

    def computed(self, gradient: Gradient | None) -> None:
        """Note the step that was made beside the newest exchange, and book what it delivers."""
        newest, peer = self.in_flight[-1], self.peer
        newest.gradient = gradient
        if gradient is not None:
            needed = max(self.in_flight[0].flight.finished, newest.flight.decided)
            peer.wait_s = max(0.0, needed - gradient.finished)
        if newest.flight.taken:
            peer.undelivered = [one for one in peer.undelivered if one not in newest.flight.delivered]

    def join_down_to(self, left: int) -> Iterator[StepDone]:
        """Join the oldest exchanges, in order, until so many are left in flight."""
        while len(self.in_flight) > left:
            oldest = self.in_flight[0]
            if oldest.landed is None:
                land(self.peer, oldest, self.peer.side.mark())
            self.in_flight.popleft()
            yield join(self.link, self.peer, oldest)


def catch_up(link: Link, peer: Peer, now: int) -> CaughtUp:
    """Apply the packets this peer has not seen, up to round `now`."""
    start = peer.worker.global_model.round
    for packet in link.packets(start, now):
        with foreign_packet(), peer.side.turn():
            peer.worker.catch_up(packet)
    return CaughtUp(now, now - start)


def exchange(
    link: Link,
    peer: Peer,
    round: Round,
    flight: Flight,
    earlier: Sequence[DecodedPacket],
    mark: torch.cuda.Event | None,
) -> None:
    """Encode, send, wait for the commit (lines 1 to 4). x_i and x' stay as they are: this runs beside the
    compute, in a thread and on a stream of its own."""
    model = peer.worker.global_model
    try:
        with peer.side.behind(mark):
            alone = round.peers == 1
            flight.sent = peer.worker.start(link.fits, alone, flight.round, earlier, round.rung)
        fingerprint, behind = model.fingerprint, flight.round - model.round
    finally:
        peer.encoded.set()
    work = sum((lease.measured for lease in flight.delivered), Measured())
    bodies = {extension.name: extension.report(flight.delivered) for extension in peer.trainer.extensions}
    try:
        committed = link.exchange(
            flight.sent.packet,
            Delivery(
                round=flight.round,
                fingerprint=fingerprint,
                delivers=[lease.round for lease in flight.delivered],
                loss_sum=work.loss_sum,
                tokens=work.terms,
                figures=work.figures,
                compute_s=peer.compute_s,
                wait_s=peer.wait_s,
                grad_norm=peer.grad_norm,
                behind=behind,
                usual=peer.worker.usual,
                extra={name: body for name, body in bodies.items() if body},
            ),
        )
    except Interrupted as interrupted:
        flight.taken = interrupted.arrived
        raise
    flight.taken, flight.refused = link.name in committed.accepted, committed.refused.get(link.name, "")
    flight.decided = time.monotonic()


def receive(link: Link, peer: Peer, flight: Flight, committed: Future[None]) -> None:
    """Receive the aggregate (line 5)."""
    committed.result()
    packet = link.fetch(f"packet/{flight.round}")
    with foreign_packet():
        flight.aggregate = peer.worker.global_model.decode(packet, flight.round)


@contextmanager
def abandoned_on_fault(link: Link) -> Iterator[None]:
    """Wait for nothing more of a hub that has sent what is none of its run."""
    try:
        yield
    except (ForeignSamples, ForeignPacket):
        link.abandon()
        raise


@contextmanager
def foreign_packet() -> Iterator[None]:
    """Turn a packet that does not decode into ForeignPacket: it came from the hub."""
    try:
        yield
    except PacketError as error:
        raise ForeignPacket(f"an aggregate cannot be used: {error}") from error


def land(peer: Peer, due: Exchange, mark: torch.cuda.Event | None) -> None:
    """Move x' by an aggregate (line 7) and prepare the join, once nothing reads x' or x_i - x' any more."""
    due.arrived.result()
    flight = due.flight
    assert flight.aggregate is not None
    if not peer.worker.local_model.from_global_model:
        peer.encoded.wait()
        with peer.reading, peer.side.behind(mark):
            move(peer, flight)
    peer.worker.bring(flight.aggregate, flight.sent if flight.taken else None)
    flight.finished = time.monotonic()


def move(peer: Peer, flight: Flight) -> None:
    """Move x' alone (line 7); from here on x_i has to follow, or their difference would be no residual."""
    assert flight.aggregate is not None
    peer.worker.global_model.move(flight.aggregate)
    flight.moved = True


def join(link: Link, peer: Peer, done: Exchange) -> StepDone:
    """Move x_i by the oldest exchange (line 6), and x' where that waited. A refused packet stays unsent."""
    worker, flight, gradient, started = peer.worker, done.flight, done.gradient, time.monotonic()
    assert flight.sent is not None
    assert flight.aggregate is not None
    with peer.side.turn():
        if not flight.moved:
            move(peer, flight)
        worker.follow(flight.aggregate, flight.sent if flight.taken else None)
    peer.flights.popleft()
    join_s = time.monotonic() - started
    if (not flight.taken or done.round.spans > 1) and not peer.flights and not link.leaving.is_set():
        # left out of this round, or of those since: a member again from the next one that opens
        link.ready(worker.global_model.round, worker.global_model.fingerprint)
    return StepDone(
        round=flight.round,
        step=done.round.step,
        tokens=gradient.lease.tokens if gradient else 0,
        loss=gradient.lease.measured.mean if gradient else None,
        grad_norm=gradient.norm if gradient else None,
        local_steps=peer.rungs[done.round.rung].local_steps,
        lr=peer.rate,
        fingerprint=worker.global_model.fingerprint,
        accepted=bool(flight.taken),
        refused=flight.refused,
        sent_bytes=len(flight.sent.packet),
        received_bytes=len(flight.aggregate.packet),
        exchange_started=flight.started,
        exchange_finished=flight.finished,
        compute_started=gradient.started if gradient else None,
        compute_finished=gradient.finished if gradient else None,
        join_s=join_s,
    )


def shrink_to_fit(peer: Peer, work: Callable[[], T]) -> Generator[Lowered, None, T]:
    """Do `work`, again with half the micro-batch each time that memory runs out; `yield from` gives its
    result.

    Raises:
        MemoryFull: not even one sequence fits.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_full(error):
                raise
            if peer.micro_batch == 1:
                said = f"memory is full with one sequence at a time ({first_line(error)})"
                raise MemoryFull(said, fixes(peer.recipe)) from error
            said = first_line(error)
        # Outside of the handler: what the failed attempt held has gone with its traceback.
        release()
        peer.micro_batch = (peer.micro_batch + 1) // 2
        yield Lowered(peer.micro_batch, said)


def leave_room(peer: Peer) -> Iterator[Lowered]:
    """Halve the micro-batch where an exchange found no room beside it."""
    if peer.worker.short_of_memory:
        peer.worker.short_of_memory = False
        if peer.micro_batch > 1:
            peer.micro_batch = (peer.micro_batch + 1) // 2
            yield Lowered(peer.micro_batch, "the exchange had no room beside the compute")


def settle(peer: Peer, unknown_stays: bool = False) -> None:
    """Complete exchanges that ended and are not joined, and take packets that were under way out of the
    residual: the loop has ended.

    Where it is not known what became of a packet it is taken out as well: it may be lost, once, but never be
    in the run twice. Its leases then count as not delivered, since others may do them again. Of a session
    that is over it stays (`unknown_stays`): the hub has dropped what it had not decided on.
    """
    peer.side.rejoin()
    for flight in peer.flights:
        with peer.side.turn():
            if flight.moved and flight.aggregate is not None:
                peer.worker.follow(flight.aggregate, flight.sent if flight.taken else None)
            elif flight.sent is not None and (flight.taken or (flight.taken is None and not unknown_stays)):
                peer.worker.subtract(flight.sent)
        if flight.taken:
            peer.undelivered = [lease for lease in peer.undelivered if lease not in flight.delivered]
    peer.flights.clear()


MOST_HANDOFF = 16 << 20  # bytes, which one core codes in some 5 s
LOOK_S = 5.0  # seconds for which the residual is searched


def hand_over(link: Link, peer: Peer) -> HandedOver | None:
    """Hand the largest part of the residual to the aggregator; the rest stays this peer's, should it come
    back.

    Returns None where nothing went: there is nothing, no time for it, or work in x_i that others will do
    again.
    """
    settle(peer)
    worker, room, until = peer.worker, min(link.room, MOST_HANDOFF), time.monotonic() + LOOK_S
    part = None
    if room and not peer.undelivered and not peer.unfinished:
        part = worker.handoff(room, go_on=lambda: time.monotonic() < until and 2 * link.room > room)
    if part is None or not link.room:  # the goodbye was said meanwhile
        return None
    before, taken = worker.residual_norm(), None
    try:
        taken = link.hand_over(worker.global_model.round, part.packet)
    finally:
        if taken is not False:  # whatever became of it: never in the run twice
            worker.subtract(part)
    smaller = 1 - worker.residual_norm() / before if taken is not False else 0.0
    return HandedOver(worker.global_model.round, len(part.packet), smaller, taken)


def evaluate_part(link: Link, peer: Peer, round: Round, held_out: StoredSamples) -> EvaluatedPart:
    """Evaluate x' (not x_i) on every `eval_parts`-th held-out sample."""
    part = held_out[round.eval_part :: round.eval_parts]
    peer.encoded.wait()  # it reads x_i, which may be set aside meanwhile
    found = peer.trainer.evaluate(peer.worker.global_model.vector, part, peer.micro_batch)
    link.evaluated(round.round, round.eval_part, found)
    return EvaluatedPart(round.round, found)


# ---- the work of a lease -----------------------------------------------------------------------------------


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
    steps = min(peer.rungs[round.rung].local_steps, max(1, round.steps - round.step))
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
    samples = unpack_samples(packed, peer.limits)
    if len(samples) != count:
        raise ForeignSamples(f"{len(samples):,} samples came, {count:,} were announced")
    return samples


def parts_of(lease: Sequence[Sample], steps: int) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Divide a lease into nearly equal steps; yield those that have a sample."""
    numbers = [-(-(place + 1) * steps // len(lease)) - 1 for place in range(len(lease))]
    for number, places in groupby(range(len(lease)), numbers.__getitem__):
        yield number, [lease[place] for place in places]


def share_of(peer: Peer, round: Round, samples: int) -> float:
    """Return the share of a step's samples that a gradient of this peer has; 1 where its optimizer works for
    itself, as published methods have it."""
    alone = round.peers == 1 or not peer.one_machine
    return 1.0 if alone else min(1.0, samples / peer.recipe.training.global_batch_size)


def compute(
    link: Link, peer: Peer, round: int, number: int, lease: Sequence[Sample], share: float = 1.0
) -> Gradient | None:
    """Compute the gradient of the mean loss over the terms of a step, micro-batch by micro-batch."""
    started, norm = time.monotonic(), None
    terms, width = peer.objective.terms(lease), peer.trainer.at_once
    # a lease is cut in two where the noise in it is to be measured now
    half = len(lease) // 2 if share < 1 and compared_in(peer.steps) else 0
    halves = [list(batches(part, peer.micro_batch)) for part in (lease[:half], lease[half:]) if part]
    while norm is None:
        found = Measured()
        peer.trainer.zero(share)
        for parts in halves:
            for start in range(0, len(parts), width):
                if link.leaving.is_set():
                    return None
                try:
                    found += peer.trainer.backward(parts[start : start + width], terms, round)
                except Interrupted:
                    return None
            if parts is not halves[-1]:
                peer.trainer.partly(found.terms / max(terms, 1))
        norm = peer.trainer.clip(peer.recipe.training.max_grad_norm)
    tokens = sum(sample.count for sample in lease)
    if found.notes:
        notes = {name: in_order(lease, [*chain(*halves)], of) for name, of in found.notes.items()}
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
    share = peer.outer.peers_share(max(busy, 1))
    peer.trainer.step(share * peer.rate, share * training.adam_beta1)
    peer.steps += 1
