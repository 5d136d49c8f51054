"""The types that a peer's training shares: a round, the link to the run, events, the trainer, the peer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import torch
from torch import Tensor, nn

from recipes.algorithm import DecodedPacket, LocalModel, SideStream, one_machine, outer_optimizer_of
from recipes.config import Recipe
from recipes.data import Sample, SampleLimits
from recipes.objectives import Measured, objective_of
from recipes.weight_files import Layout

# ---- the network -------------------------------------------------------------------------------------------


class Round(Protocol):
    """An opened round, as the hub announces it (transport's `messages.Round`)."""

    round: int
    step: int
    steps: int
    peers: int  # its members
    samples: int  # sequences in this peer's lease; 0: exchange only
    exchange: bool  # False: nothing is exchanged (the last evaluation, or a call to catch up)
    eval_part: int
    eval_parts: int  # 0: no evaluation
    spans: int  # rounds that the lease is to last; above 1 this peer is no member before it says `ready`
    rung: int  # of this round: place in the recipe's `compression.rungs`
    extra: Mapping[str, bytes]  # bodies of extensions


@dataclass(frozen=True)
class Delivery:
    """Describes a packet to the hub. A link adds what it knows of the line."""

    round: int
    fingerprint: int  # of x' before the round, or before one `behind` rounds earlier
    delivers: list[int]  # rounds whose leases the packet delivers
    loss_sum: float
    tokens: int  # terms of the loss: trained tokens, or samples
    compute_s: float
    wait_s: float
    grad_norm: float = 0.0  # of the last step, before clipping; 0: no gradient
    figures: tuple[float, ...] = ()  # as in `Measured`
    behind: int = 0  # rounds in flight, whose aggregates x' lacks
    usual: int = 0  # bytes of the recipe's own packets of this peer's update; 0: not known
    extra: dict[str, bytes] = field(default_factory=dict)  # bodies of extensions


class Committed(Protocol):
    """A committed round."""

    accepted: list[str]  # names of the peers whose packets are in the round
    refused: dict[str, str]  # names of those whose packets cannot be used, and why


class Interrupted(Exception):
    """A call of the link gave up: the run is over (see `link.ended`), or this peer was asked to leave."""

    def __init__(self, reason: str = "", arrived: bool | None = None) -> None:
        super().__init__(reason)
        self.arrived = arrived  # has the aggregator, for sure, the packet under way; None: not known


class Link(Protocol):
    """A peer's connection to its run. Calls that wait raise Interrupted when nothing is left to wait for."""

    name: str
    leaving: threading.Event
    ended: str | None  # why the run is over; None while it goes on
    fits: int  # bytes of a packet that go up beside the compute; 0: not known

    def fetch(self, name: str) -> bytes: ...
    def fetch_samples(self, name: str, count: int) -> bytes:
        """Fetch so many packed samples that an extension of the hub has given this name."""

    def fetched(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Fetch an object that memory is not to hold; it is a file until the block ends."""

    def packets(self, start: int, stop: int) -> Iterator[bytes]: ...
    def ready(self, round: int, fingerprint: int) -> None: ...
    def next_round(self) -> Round | None:
        """Wait for a round; None: the run has `ended`, or this peer was asked to leave."""

    def exchange(self, packet: bytes, delivery: Delivery) -> Committed: ...
    def evaluated(self, round: int, part: int, found: Measured) -> None: ...
    @property
    def room(self) -> int:
        """Bytes that a peer that was asked to leave can still hand off."""

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        """Give a residual handoff to the aggregator; returns whether it has it. None: not known."""

    def abandon(self) -> None:
        """End all calls that wait: nothing more is expected of the run."""

    def leave(self, reason: str) -> None: ...


# ---- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaughtUp:
    """This peer has x' of `round`, by applying `packets` packets."""

    round: int
    packets: int


@dataclass(frozen=True)
class EvaluatedPart:
    """The held-out loss of x' over this peer's part of the evaluation set is known."""

    round: int
    measured: Measured


@dataclass(frozen=True)
class Lowered:
    """Memory ran out: this peer goes on with smaller micro-batches."""

    micro_batch: int
    why: str


@dataclass(frozen=True)
class StepDone:
    """A round is joined. Times are of this machine's monotonic clock, in seconds."""

    round: int
    step: int
    tokens: int  # trained tokens of this peer's lease
    loss: float | None  # mean over its terms; None: the round had no lease for this peer
    grad_norm: float | None  # before clipping
    local_steps: int  # of the round
    lr: float
    fingerprint: int  # of x' after the round
    accepted: bool  # False: the packet came too late, or was refused; it stays in the residual
    refused: str  # why the aggregator could not use it
    sent_bytes: int  # this peer's packet
    received_bytes: int  # the aggregate
    exchange_started: float
    exchange_finished: float
    compute_started: float | None
    compute_finished: float | None
    join_s: float  # how long the compute stood still for the exchange's part of the join


@dataclass(frozen=True)
class HandedOver:
    """This peer's residual handoff went to the aggregator, before it leaves."""

    round: int
    size: int  # bytes
    smaller: float  # by what share the norm of the residual that stays here fell
    taken: bool | None  # None: not known


@dataclass(frozen=True)
class NotHandedOver:
    """Memory ran out before a leaving peer's residual was handed over: all of it stays here."""

    why: str


@dataclass(frozen=True)
class Left:
    """This peer's part has ended."""

    reason: str
    finished: bool  # True: the run is over; False: this peer was asked to leave


Event = CaughtUp | EvaluatedPart | Lowered | StepDone | HandedOver | NotHandedOver | Left


# ---- the peer ----------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """The local model x_i in training: its gradient and its optimizer, on one device (`SingleDeviceTrainer`)
    or spread over several."""

    extensions: Sequence[ModelExtension]  # of this peer
    at_once: int  # micro-batches that are computed at the same time
    in_memory: int  # micro-batches whose activations in all layers this machine has memory for at once

    @property
    def layout(self) -> Layout: ...
    @property
    def stepped(self) -> bool:
        """Has the optimizer a state?"""

    @property
    def kind(self) -> str:
        """Type of its devices: cuda, cpu, ..."""

    @property
    def sizes(self) -> Sequence[int]:
        """Vocabulary, layers and width of the model; 0: not known."""

    def check(self) -> None:
        """Raise where some of x_i is lost: then there is nothing to hand off, and no ordinary goodbye."""

    def attempt(self, part: Sequence[Sample], aside: float) -> float:
        """Compute a micro-batch on each device for nothing, with `aside` bytes a parameter set aside.

        Returns the largest share of a device's memory that was held; 0: not known. Raises where memory runs
        out.
        """

    def zero(self, share: float = 1.0) -> None:
        """g_i <- 0. share: of the samples of a step, which g_i will have (gradient_noise.py)."""

    def backward(self, parts: Sequence[Sequence[Sample]], terms: int, lease: int | None = None) -> Measured:
        """g_i += the gradient of (summed losses / terms) of up to `at_once` micro-batches. Extensions observe
        their samples, in their order, as those of the lease of a round; None: nothing observes them."""

    def partly(self, done: float) -> None:
        """Note g_i as it is after this share of its terms: the gradient of a half of the lease."""

    def clip(self, limit: float) -> float | None:
        """Clip g_i as the mean gradient of a step would be at a norm of `limit` (0: no limit), and return the
        norm before. None: float16 could not hold g_i; the loss scale is lower now, and g_i is to be computed
        again."""

    def step(self, rate: float, beta1: float | None = None) -> None:
        """x_i <- x_i - optimizer(g_i), as long as a step with the mean gradient. beta1: None leaves it."""

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> Measured:
        """Measure samples at `vector` (P,), in micro-batches of `size`; x_i stays."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what a peer's checkpoint has of x_i and the optimizer, by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of x, and of each parameter by `optimizer.<number>`: what `load` takes."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` gave, one tensor after the other."""


class PeerGlobalModel(Protocol):
    """x' as a peer's loop asks for it: in this process (`GlobalModel`), or spread over the machines of a
    replica."""

    vector: Tensor  # of this process: all of x', or this machine's ranges of it
    round: int
    fingerprint: int

    def decode(self, packet: bytes, round: int | None = None) -> DecodedPacket: ...
    def move(self, aggregate: DecodedPacket) -> None: ...


class PeerWorker(Protocol):
    """A peer's half of Algorithm 1, as `recipes.algorithm.Worker` documents it."""

    short_of_memory: bool

    @property
    def global_model(self) -> PeerGlobalModel: ...
    @property
    def local_model(self) -> LocalModel: ...
    @property
    def usual(self) -> int: ...
    def start(
        self, budget: int, alone: bool, round: int, in_flight: Sequence[DecodedPacket], rung: int
    ) -> DecodedPacket: ...
    def bring(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None: ...
    def follow(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None: ...
    def catch_up(self, aggregate: bytes) -> None: ...
    def subtract(self, sent: DecodedPacket) -> None: ...
    def handoff(self, budget: int, *, go_on: Callable[[], bool]) -> DecodedPacket | None: ...
    def residual_norm(self) -> float: ...


@dataclass(frozen=True)
class Lease:
    """A finished lease: its gradient is in x_i."""

    round: int
    measured: Measured
    tokens: int  # trained
    beside: Mapping[str, bytes] = field(default_factory=dict)  # what extensions have computed beside it


@dataclass
class Flight:
    """An update in flight, from its encoding to the join: what is known of it if the loop ends before."""

    round: int
    delivered: list[Lease]
    started: float  # monotonic seconds
    sent: DecodedPacket | None = None  # None: not encoded yet
    taken: bool | None = None  # by the aggregator; None: not known
    refused: str = ""  # why the aggregator could not use the packet; "": it could, or it came too late
    aggregate: DecodedPacket | None = None  # None: not here yet
    moved: bool = False  # x' has moved by the aggregate, and x_i has not
    decided: float = 0.0  # monotonic seconds: it is known whether it was taken
    finished: float = 0.0  # the aggregate is here, and x' has moved


@dataclass
class Peer:
    """All that one peer computes with."""

    trainer: Trainer  # x_i, its gradient, its optimizer
    worker: PeerWorker
    recipe: Recipe
    vocabulary: int | None  # token ids from the hub are below this; None: not known
    micro_batch: int  # sequences per forward pass; halved when memory runs out
    undelivered: list[Lease] = field(default_factory=list)  # done, but in no committed round yet
    rate_at: Callable[[int], float] | None = None  # step -> learning rate, once the run's length is known
    rate: float = 0.0  # of the last step
    steps: int = 0  # that the optimizer has made
    flights: deque[Flight] = field(default_factory=deque)  # rounds in flight, oldest first; at most S
    side: SideStream = field(default_factory=lambda: SideStream(torch.device("cpu")))  # of the exchange
    encoded: threading.Event = field(default_factory=threading.Event)  # set: nothing reads x_i
    reading: threading.Lock = field(
        default_factory=threading.Lock
    )  # held while x' is read beside an exchange
    unfinished: bool = False  # some steps of a lease are in x_i, and it is not done
    compute_s: float = 0.0  # of the last step
    grad_norm: float = 0.0  # of the last step, before clipping
    wait_s: float = 0.0  # how long the last step waited for its exchange

    def __post_init__(self) -> None:
        compression = self.recipe.compression
        self.rungs = compression.rungs  # settings that a round may have
        self.objective = objective_of(self.recipe)
        self.limits = SampleLimits.of(self.recipe, self.vocabulary)  # of samples from the hub
        self.outer = outer_optimizer_of(compression)
        self.one_machine = one_machine(compression)  # peers make its steps on all samples


# ---- extensions --------------------------------------------------------------------------------------------


class ModelExtension:
    """An optional capability of a peer's training. Every method does nothing unless it is overridden."""

    name = ""  # of its notes, and of its bodies: `extra` in Round and Report

    def observe(
        self, model: nn.Module, part: Sequence[Sample], lease: int
    ) -> AbstractContextManager[list[str]]:
        """Watch the forward and backward pass of a micro-batch, of the lease of this round. Afterwards the
        list has one note in hex for each sample, all of one length; or none."""
        return nullcontext([])

    def beside(self, link: Link, peer: Peer, round: Round) -> Generator[Event, None, bytes]:
        """Compute something before the lease of a round; what it returns is in `Lease.beside`."""
        yield from ()
        return b""

    def report(self, delivered: Sequence[Lease]) -> bytes:
        """Return the body for the Report that delivers these leases; empty: none."""
        return b""
