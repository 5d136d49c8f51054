"""One peer's training: rounds come in, work is done, events come out.

    for event in finetune(link, peer): show(event)

The exchange of round t runs in a thread of its own during the compute of round t, all micro-batches. The
two meet at the join (Algorithm 1, line 6), so x_i is never written while a gradient is computed from it. With
staleness 0 the exchange follows the step instead: synchronous data-parallel training, the reference.

Asked to leave, a peer finishes the exchange in flight, drops a gradient it has not applied (its lease is done
by others), and hands the largest part of its residual to the owner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from zlib import crc32

from torch import nn

from recipes.algorithm import DecodedPacket, Worker, worker_of
from recipes.config import Recipe
from recipes.data import Sample, unpack_samples
from recipes.models import check_packing_isolation

from .lease_gradient import Gradient, Lease, apply, computed
from .micro_batch import shrink_to_fit
from .stochastic_rounding import RoundedLocalModel
from .trainer import SingleDeviceTrainer, Trainer, placed

# ---- what the loop needs of a network ----------------------------------------------------------------------


class Round(Protocol):
    """An opened round, as the hub announces it (transport.messages.Round)."""

    round: int
    step: int
    steps: int
    members: Sequence[str]
    samples: int  # sequences in this peer's lease; 0: exchange only
    exchange: bool  # False: nothing is exchanged (the last evaluation)
    eval_part: int
    eval_parts: int  # 0: no evaluation
    spans: int  # rounds that the lease is to last; above 1 this peer is no member before it says `ready`


@dataclass(frozen=True)
class Delivery:
    """What travels beside a packet (transport.messages.Report)."""

    round: int
    fingerprint: int  # of x' before the round
    delivers: list[int]  # rounds whose leases the packet delivers
    loss_sum: float
    tokens: int
    compute_s: float
    wait_s: float


class Committed(Protocol):
    accepted: list[str]  # names of the peers whose packets are in the round
    refused: dict[str, str]  # names of those whose packets cannot be used, and why


class Interrupted(Exception):
    """A call of the link gave up: the run is over (see `link.ended`), or this peer was asked to leave."""

    def __init__(self, reason: str = "", arrived: bool | None = None) -> None:
        super().__init__(reason)
        self.arrived = arrived  # is the packet under way in the owner's hands, for sure; None: not known


class Link(Protocol):
    """A peer's connection to its run. Calls that wait raise Interrupted when nothing is left to wait for."""

    name: str
    leaving: threading.Event
    ended: str | None  # why the run is over; None while it goes on
    fits: int  # bytes of a packet that go up beside the compute; 0: not known

    def fetch(self, name: str) -> bytes: ...
    def packets(self, start: int, stop: int) -> Iterator[bytes]: ...
    def ready(self, round: int, fingerprint: int) -> None: ...
    def next_round(self) -> Round | None:
        """None: the run has `ended`, or this peer was asked to leave."""

    def exchange(self, packet: bytes, delivery: Delivery) -> Committed: ...
    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None: ...
    @property
    def room(self) -> int:
        """Bytes that can still be handed over by a peer that was asked to leave."""

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        """Give a legacy to the owner. Whether it has it; None: not known."""

    def leave(self, reason: str) -> None: ...


# ---- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaughtUp:
    """x' of `round` is here, by applying `packets` packets."""

    round: int
    packets: int


@dataclass(frozen=True)
class EvaluatedPart:
    """The held-out loss of x' over this peer's part of the evaluation set."""

    round: int
    loss_sum: float
    tokens: int


@dataclass(frozen=True)
class Lowered:
    """Memory ran out: this peer goes on with smaller parts of its leases."""

    micro_batch: int
    why: str


@dataclass(frozen=True)
class StepDone:
    """A round is joined. Times are of this machine's monotonic clock, in seconds."""

    round: int
    step: int
    tokens: int  # trained tokens of this peer's lease
    loss: float | None  # mean over them; None: the round had no lease for this peer
    grad_norm: float | None  # before clipping
    lr: float
    fingerprint: int  # of x' after the round
    accepted: bool  # False: the packet came too late, or was refused; it stays in the residual
    refused: str  # why the owner could not use it
    sent_bytes: int  # this peer's packet
    received_bytes: int  # the aggregate
    exchange_started: float
    exchange_finished: float
    compute_started: float | None
    compute_finished: float | None


@dataclass(frozen=True)
class HandedOver:
    """This peer's legacy went to the owner, before it leaves."""

    round: int
    size: int  # bytes
    smaller: float  # by what share the norm of the residual that stays here fell
    taken: bool | None  # None: nobody knows


@dataclass(frozen=True)
class Left:
    """The end of this peer's part."""

    reason: str
    finished: bool  # True: the run is over; False: this peer was asked to leave


Event = CaughtUp | EvaluatedPart | Lowered | StepDone | HandedOver | Left


# ---- the loop ----------------------------------------------------------------------------------------------


@dataclass
class Flight:
    """A packet under way: what is known of it if the loop ends before the join."""

    sent: DecodedPacket
    delivered: list[Lease]
    taken: bool | None = None  # by the owner; None: not known


@dataclass(frozen=True)
class Exchanged:
    """One exchange, from encoding to the aggregate's arrival."""

    sent: DecodedPacket
    delivered: list[Lease]
    accepted: bool
    refused: str  # why the owner could not use the packet; "": it could, or it came too late
    aggregate: bytes
    started: float
    finished: float


@dataclass
class Peer:
    """All that one peer computes with."""

    trainer: Trainer  # x_i, its gradient, its optimizer
    worker: Worker
    recipe: Recipe
    vocabulary: int | None  # token ids from the hub are below this
    micro_batch: int  # sequences per forward pass; halved when memory runs out
    undelivered: list[Lease] = field(default_factory=list)  # done, but in no committed round yet
    rate_at: Callable[[int], float] | None = None  # step -> learning rate, once the run's length is known
    rate: float = 0.0  # of the last step
    flight: Flight | None = None  # None: nothing is under way
    encoded: threading.Event = field(default_factory=threading.Event)  # set: nobody reads x_i
    unfinished: bool = False  # some steps of a lease are in x_i, and it is not done
    compute_s: float = 0.0  # of the last step
    wait_s: float = 0.0  # how long the last step waited for its exchange


def build_peer(model: nn.Module, recipe: Recipe, micro_batch: int, name: str = "", round: int = 0) -> Peer:
    """A peer called `name` whose model is x' of `round`: the base weights, or a snapshot's."""
    if recipe.data.isolates_documents:
        check_packing_isolation(model)
    own = crc32(name.encode())
    local = SingleDeviceTrainer(model, recipe, own)
    flat, where = local.flat, recipe.compression.state_device
    if isinstance(flat, RoundedLocalModel):
        vector = flat.common = placed(flat.common, where)
    else:
        vector = placed(flat.vector, where, copy=True)
    x = flat if isinstance(flat, RoundedLocalModel) else flat.vector
    worker = worker_of(recipe, x, vector, flat.layout.name_at, own, round)
    config = getattr(model, "config", None)
    return Peer(local, worker, recipe, getattr(config, "vocab_size", None), micro_batch)


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
        with suppress(Interrupted):
            if (handed_over := hand_over(link, peer)) is not None:
                yield handed_over
    if link.ended is None:
        link.leave("left on request")
    yield Left(link.ended or "left on request", finished=link.ended is not None)


def take_part(link: Link, peer: Peer, now: int) -> Iterator[Event]:
    """Round after round, until there is none."""
    common = peer.worker.global_model
    stale = peer.recipe.compression.staleness == 1
    held_out: list[Sample] = []
    peer.flight = None  # of a session that is over: what it held stays in the residual
    peer.encoded.set()
    yield catch_up(link, peer, max(now, common.round))
    link.ready(common.round, common.fingerprint)
    with ThreadPoolExecutor(1, thread_name_prefix="exchange") as thread:
        # asked to leave between two exchanges: one more delivers the step just made, if a round is open
        while (peer.undelivered or not link.leaving.is_set()) and (round := link.next_round()) is not None:
            if round.round < common.round:  # announced before a stall, read after it
                continue
            if round.round > common.round:
                yield catch_up(link, peer, round.round)
            exchange: Future[Exchanged] | None = None
            if round.exchange and stale:
                peer.encoded.clear()
                exchange = thread.submit(exchanged, link, peer, round, time.monotonic())
            if round.eval_parts and not link.leaving.is_set():
                held_out = held_out or unpack_samples(link.fetch("eval"), peer.vocabulary)
                yield (yield from shrink_to_fit(peer, partial(evaluate_part, link, peer, round, held_out)))
            wanted = round.samples and not link.leaving.is_set()
            gradient = (yield from computed(link, peer, round)) if wanted else None
            if link.leaving.is_set():
                gradient = None  # its lease goes back with the goodbye: it would be in x_i twice
                if not stale:
                    break
            if round.exchange and not stale:  # fresh: the packet holds the step just made
                apply(peer, round, gradient)
                exchange = thread.submit(exchanged, link, peer, round, time.monotonic())
            if exchange is not None:
                done = exchange.result()
                if stale:
                    gradient = None if link.leaving.is_set() else gradient
                    apply(peer, round, gradient)
                yield join(link, peer, round, gradient, done)


def catch_up(link: Link, peer: Peer, now: int) -> CaughtUp:
    """Apply the packets this peer has not seen, up to round `now`."""
    start = peer.worker.global_model.round
    for packet in link.packets(start, now):
        peer.worker.catch_up(packet)
    return CaughtUp(now, now - start)


def exchanged(link: Link, peer: Peer, round: Round, started: float) -> Exchanged:
    """Lines 1 to 5: encode, send, wait for the commit, receive. Changes nothing; runs beside the compute."""
    common, delivered = peer.worker.global_model, list(peer.undelivered)
    try:
        sent = peer.worker.start(link.fits, alone=len(round.members) == 1)
    finally:
        peer.encoded.set()
    flight = peer.flight = Flight(sent, delivered)
    try:
        committed = link.exchange(
            sent.packet,
            Delivery(
                round=common.round,
                fingerprint=common.fingerprint,
                delivers=[lease.round for lease in delivered],
                loss_sum=sum(lease.loss_sum for lease in delivered),
                tokens=sum(lease.tokens for lease in delivered),
                compute_s=peer.compute_s,
                wait_s=peer.wait_s,
            ),
        )
    except Interrupted as interrupted:
        flight.taken = interrupted.arrived
        raise
    accepted = flight.taken = link.name in committed.accepted
    aggregate = link.fetch(f"packet/{common.round}")
    refused = committed.refused.get(link.name, "")
    return Exchanged(sent, delivered, accepted, refused, aggregate, started, time.monotonic())


def join(link: Link, peer: Peer, round: Round, gradient: Gradient | None, done: Exchanged) -> StepDone:
    """Lines 6 and 7, the exchange's part; what was delivered is done with, what was refused is kept."""
    worker = peer.worker
    worker.finish(done.aggregate, done.sent if done.accepted else None)
    peer.flight = None
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
        loss=gradient.lease.loss_sum / max(gradient.lease.tokens, 1) if gradient else None,
        grad_norm=gradient.norm if gradient else None,
        lr=peer.rate,
        fingerprint=worker.global_model.fingerprint,
        accepted=done.accepted,
        refused=done.refused,
        sent_bytes=len(done.sent.packet),
        received_bytes=len(done.aggregate),
        exchange_started=done.started,
        exchange_finished=done.finished,
        compute_started=gradient.started if gradient else None,
        compute_finished=gradient.finished if gradient else None,
    )


def settle(peer: Peer) -> None:
    """The loop has ended: what was under way and is not joined is no part of the residual any more.

    Where nobody knows what became of a packet it is taken out as well: it may be lost, once, but never be in
    the run twice. Its leases then count as not delivered, since others may do them again.
    """
    flight, peer.flight = peer.flight, None
    if flight is not None and flight.taken is not False:
        peer.worker.subtract(flight.sent)
        if flight.taken:
            peer.undelivered = [lease for lease in peer.undelivered if lease not in flight.delivered]


def hand_over(link: Link, peer: Peer) -> HandedOver | None:
    """The largest part of the residual goes to the owner; what stays is this peer's, should it come back.

    None where nothing went: there is nothing, no time for it, or work in x_i that others will do again.
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
    """The held-out loss of x' (not of x_i) over every `eval_parts`-th sample."""
    part = held_out[round.eval_part :: round.eval_parts]
    total, tokens = peer.trainer.evaluate(peer.worker.global_model.vector, part, peer.micro_batch)
    link.evaluated(round.round, round.eval_part, total, tokens)
    return EvaluatedPart(round.round, total, tokens)
