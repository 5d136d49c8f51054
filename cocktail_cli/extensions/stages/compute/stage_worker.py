"""One stage's computation of a step's gradient: messages in, messages out. No sockets, no clock.

activations  ->  the next stage, around the ring; the last stage's go to the first
gradients    ->  the stage before
mismatch     ->  the stage before: its activations do not fit what is remembered here; they come again

The order of work is 1F1B (Narayanan et al., 2019):

    first stage     FORWARD m (embeddings, layers), LOSS m (norm, head, and back again), BACK m (layers)
    other stages    FORWARD m, BACK m

A stage does what has arrived, gradients before losses before activations, each in the order of the
micro-batches. The first stage begins no more than `in_flight` before the gradient of the earliest is back, so
no stage holds the activations of more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from compress import NonFiniteError, PacketError
from recipes.data import Sample, collate
from recipes.objectives import Measured
from transport.protocol import ProtocolError, read_msgpack

from ..lines import Kind, StageMessage
from .activation_codec import (
    ActivationDecoder,
    ActivationEncoder,
    MemoryMismatch,
    Rows,
    decode_gradient,
    encode_gradient,
)
from .stage_model import StageModel

PER_STAGE = 3  # micro-batches in flight for each stage, which keep all busy on lines without latency


class Work(IntEnum):
    """Work on one micro-batch; the least value comes first where there is a choice."""

    BACK = 0
    LOSS = 1
    FORWARD = 2


class StageSchedule:
    """The order of one stage's work on `count` micro-batches."""

    def __init__(self, count: int, in_flight: int, first: bool) -> None:
        if min(count, in_flight) < 1:
            raise ValueError(f"{count} micro-batches, {in_flight} in flight")
        self.count, self.in_flight, self.first = count, in_flight, first
        self._here: dict[Work, set[int]] = {work: set() for work in Work}
        if first:
            self._here[Work.FORWARD] = set(range(count))
        self._next = dict.fromkeys(Work, 0)

    def arrived(self, work: Work, micro_batch: int) -> bool:
        """Note that what this work needs is here; returns False where it was before."""
        if not 0 <= micro_batch < self.count or (work is Work.LOSS and not self.first):
            raise ValueError(f"{work.name} of micro-batch {micro_batch} of {self.count}")
        known = micro_batch in self._here[work]
        self._here[work].add(micro_batch)
        return not known

    def take(self) -> tuple[Work, int] | None:
        """Return the work to do now, which is then done; None: something must arrive first."""
        for work in Work:
            number = self._next[work]
            waits = self.first and work is Work.FORWARD and self.held >= self.in_flight
            if number in self._here[work] and not waits:
                self._next[work] += 1
                return work, number
        return None

    def is_done(self, micro_batch: int) -> bool:
        """Tell whether the gradient of a micro-batch has been through this stage."""
        return micro_batch < self._next[Work.BACK]

    @property
    def held(self) -> int:
        """Micro-batches whose forward pass was done and whose gradient has not come back."""
        return self._next[Work.FORWARD] - self._next[Work.BACK]

    @property
    def finished(self) -> bool:
        return self._next[Work.BACK] == self.count


MOST = 1 << 20  # micro-batches of a step, tokens of a micro-batch
Count = Annotated[int, Meta(ge=1, le=MOST)]
Key = Annotated[int, Meta(ge=0)]  # 64 bits


Samples = tuple[tuple[Key, tuple[Count, ...]], ...]  # of a micro-batch: key, lengths of its documents


class Activations(msgspec.Struct, frozen=True, array_like=True):
    """The body of such a message."""

    count: Count  # micro-batches of the step
    samples: Samples
    coded: bytes

    @property
    def rows(self) -> tuple[Rows, ...]:
        return tuple(Rows(key, sum(lengths)) for key, lengths in self.samples)


def activations_of(body: bytes) -> Activations:
    """Read the body of a message of activations. Errors: PacketError."""
    try:
        found = read_msgpack(body, Activations, f"a message of {len(body):,} bytes")
    except ProtocolError as error:
        raise PacketError(str(error)) from None
    tokens = len(found.samples) * max((each.count for each in found.rows), default=0)  # with padding
    if not 1 <= tokens <= MOST:
        raise PacketError(f"activations of {tokens:,} tokens of {len(found.samples):,} samples")
    return found


class BadMessage(PacketError):
    """A neighbour's message that no stage would send. `kind` tells which neighbour's."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(f"sends {kind} that cannot be used: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Line:
    """The ends of this stage's two lines, and how gradients go back."""

    encoder: ActivationEncoder  # to the next stage
    decoder: ActivationDecoder  # from the stage before
    gradient_bits: int = 8


@dataclass
class MicroBatch:
    """A micro-batch of this stage, from its first message to its gradient."""

    samples: Samples
    rows: tuple[Rows, ...]
    batch: dict[str, Tensor]  # of `collate`; the first stage's alone has tokens
    arrived: Tensor | None = None  # activations of the stage before, (B, T, D)
    left: Tensor | None = None  # result of the forward pass, (B, T, D)
    gradient: bytes = b""  # of the result


class StageWorker:
    """Computes one stage's part of the gradient of a step.

    Args:
        precision: enters the precision of forward passes.
        device: of the model.
    """

    def __init__(
        self,
        stage: StageModel,
        line: Line,
        device: torch.device | str = "cpu",
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.stage, self.line = stage, line
        self.device, self.precision = torch.device(device), precision
        self.measured = Measured()  # first stage: the losses of the step
        self.learns = (
            True  # False: losses alone; gradients are then empty messages, and the model is not moved
        )
        self.step = -1  # the last one begun
        self._terms = 1
        self._batches: dict[int, MicroBatch] = {}
        self._schedule: StageSchedule | None = None

    def begin(self, step: int, micro_batches: Sequence[Sequence[Sample]], terms: int, in_flight: int) -> None:
        """First stage: begin a step, the gradient of (summed losses / terms) of these micro-batches. Other
        stages begin it with its first message. One that was begun before and is not finished is forgotten."""
        self._renew(step)
        self._schedule = StageSchedule(len(micro_batches), in_flight, first=True)
        self._terms, self.measured = terms, Measured()
        for number, part in enumerate(micro_batches):
            rows = tuple(Rows(key_of(sample), len(sample.tokens)) for sample in part)
            samples = tuple((each.key, sample.lengths) for each, sample in zip(rows, part, strict=True))
            self._batches[number] = MicroBatch(samples, rows, collate(part))

    def _renew(self, step: int) -> None:
        self.step, self._schedule, self._batches = step, None, {}

    @property
    def finished(self) -> bool:
        """True once this stage's part of the step's gradient is in its parameters."""
        return self._schedule is not None and self._schedule.finished

    def receive(self, message: StageMessage) -> list[StageMessage]:
        """Take a neighbour's message, and return the answer it asks for, if any. One that comes twice, or
        after its step, changes nothing. Raises BadMessage.
        """
        try:
            return self._receive(message)
        except PacketError as error:
            raise BadMessage(str(error), message.kind) from None

    def _receive(self, message: StageMessage) -> list[StageMessage]:
        number = message.micro_batch
        if message.step < self.step:
            return []
        if message.step > self.step and not self.stage.first and message.kind == "activations":
            self._renew(message.step)
        if message.step != self.step:
            raise PacketError(f"{message.kind} of step {message.step}, which has not begun")
        if message.kind == "activations":
            return self._receive_activations(number, message.body)
        if self._schedule is not None and self._schedule.is_done(number):
            return []  # it comes twice
        known = self._batches.get(number)
        if self._schedule is None or known is None or known.left is None:
            raise PacketError(f"{message.kind} of micro-batch {number}, which was not sent")
        if message.kind == "mismatch":
            self.line.encoder.forget(known.rows)
            return [self._activations(number, known)]
        if self._schedule.arrived(Work.BACK, number):
            known.gradient = message.body
        return []

    def _receive_activations(self, number: int, body: bytes) -> list[StageMessage]:
        found = activations_of(body)
        count, rows = found.count, found.rows
        if self._schedule is None and not self.stage.first:
            self._schedule = StageSchedule(count, count, first=False)
        if self._schedule is None or self._schedule.count != count or number >= count:
            raise PacketError(f"activations of micro-batch {number} of {count}, which has not begun")
        if self._schedule.is_done(number):
            return []  # it comes twice
        if not self.stage.first:
            self._batches.setdefault(number, MicroBatch(found.samples, rows, batch_of(found.samples)))
        known = self._batches[number]
        if known.samples != found.samples:
            raise PacketError(f"activations of other samples than those of micro-batch {number}")
        try:
            values = self.line.decoder.decode(found.coded, rows, self.device)
        except MemoryMismatch:
            return [StageMessage(self.step, "mismatch", number, b"")]
        if self._schedule.arrived(Work.LOSS if self.stage.first else Work.FORWARD, number):
            known.arrived = padded(values, rows).requires_grad_()
        return []

    def work(self) -> list[StageMessage] | None:
        """Do the next piece of work and return the messages that follow; None: nothing can be done yet.

        Errors: NonFiniteError: an activation or a gradient is not finite; BadMessage.
        """
        taken = None if self._schedule is None else self._schedule.take()
        if taken is None:
            return None
        kind, number = taken
        known = self._batches[number]
        if kind is Work.FORWARD:
            with self.precision(), torch.set_grad_enabled(self.learns):
                known.left = self._forward(known)
            return [self._activations(number, known)]
        if kind is Work.LOSS:
            return [self._loss(number, known)]
        del self._batches[number]
        return self._back(number, known)

    def _forward(self, known: MicroBatch) -> Tensor:
        batch = {name: part.to(self.device) for name, part in known.batch.items()}
        if self.stage.first:
            return self.stage.enter(batch)
        assert known.arrived is not None
        return self.stage.through(known.arrived, batch)

    def _activations(self, number: int, known: MicroBatch) -> StageMessage:
        assert known.left is not None
        assert self._schedule is not None
        coded = self.line.encoder.encode(known.rows, rows_of(known.left, known.rows))
        body = msgspec.msgpack.encode(Activations(self._schedule.count, known.samples, coded))
        return StageMessage(self.step, "activations", number, body)

    def _loss(self, number: int, known: MicroBatch) -> StageMessage:
        """First stage: the loss, its gradient through head and norm, and the message to the last stage."""
        assert known.arrived is not None
        batch = {name: part.to(self.device) for name, part in known.batch.items()}
        with self.precision(), torch.set_grad_enabled(self.learns):
            loss, terms = self.stage.loss(known.arrived, batch)
        if self.learns:
            (loss / self._terms).backward()  # type: ignore[no-untyped-call]
        self.measured += Measured(float(loss.detach()), terms)
        try:
            return self._gradients(number, known)
        except NonFiniteError as error:  # whoever sends the largest numbers ends no head as diverged
            raise BadMessage(f"their gradient has {error}", "activations") from None

    def _back(self, number: int, known: MicroBatch) -> list[StageMessage]:
        assert known.left is not None
        if known.left.requires_grad:  # not the embeddings beside adapters, nor an evaluation
            shape = (sum(each.count for each in known.rows), known.left.shape[-1])
            try:
                decoded = decode_gradient(known.gradient, shape, self.device)
            except PacketError as error:
                raise BadMessage(str(error), "gradients") from None
            gradient = padded(decoded, known.rows)
            torch.autograd.backward(known.left, gradient.to(known.left.dtype))
        return [] if self.stage.first else [self._gradients(number, known)]

    def _gradients(self, number: int, known: MicroBatch) -> StageMessage:
        """Make the message to the stage before: the gradient of what it sent."""
        assert known.arrived is not None
        if not self.learns:
            return StageMessage(self.step, "gradients", number, b"")
        assert known.arrived.grad is not None
        gradient = rows_of(known.arrived.grad, known.rows)
        known.arrived = None
        return StageMessage(
            self.step, "gradients", number, encode_gradient(gradient, self.line.gradient_bits)
        )


def key_of(sample: Sample) -> int:
    """Hash tokens and documents to the 64 bits by which the ends of a line know a sample in every epoch."""
    lengths = np.array(sample.lengths, "<u4").tobytes()
    digest = hashlib.blake2b(lengths + sample.tokens.astype("<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rows_of(hidden: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Take the rows of samples out of (B, T, D), without padding: (rows, D)."""
    return torch.cat([hidden[number, : each.count] for number, each in enumerate(rows)]).detach()


def padded(values: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Reverse `rows_of`, with zeros as padding: (B, T, D)."""
    parts = torch.split(values, [each.count for each in rows])
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def batch_of(samples: Samples) -> dict[str, Tensor]:
    """Make the mask or the positions of samples whose tokens are elsewhere, as `collate` does."""
    found = []
    for _, lengths in samples:
        total = sum(lengths)
        several = lengths if len(lengths) > 1 else ()
        found.append(Sample(np.zeros(total, np.int32), np.zeros(total, bool), several))
    return {name: part for name, part in collate(found).items() if name not in ("input_ids", "labels")}
