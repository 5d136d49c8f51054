"""A peer that is several machines: the head's process has the session, the loop and the first stage.

The loop's `Trainer` and its worker are here; what they are asked, all machines do on their own ranges. Each
machine encodes its own shards, and gets the aggregate's: the head joins and cuts packets.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from compress import PacketError, join, split
from recipes.algorithm import WRAP, DecodedPacket, LocalModel, SideStream
from recipes.config import Recipe
from recipes.data import Sample, batches
from recipes.errors import ModelError
from recipes.objectives import Measured
from recipes.training import ModelExtension, NoiseSums, Peer, share_taken

from .ring_ends import THERE, RingHead
from .ring_request import Answer, StageFailed, StageFull
from .stage_machine import CONFIG, open_weights
from .stage_worker import PER_STAGE, BadMessage, StageWorker

FILLS = 16  # times that a group of micro-batches fills the pipeline: it stands still for a 16th of the time


def load_replica(
    ring: RingHead, recipe: Recipe, base: Path, snapshot: Path | None = None, name: str = "", round: int = 0
) -> bool:
    """Give every machine its stage of the model in `base`, at x' of `round`: of a snapshot, or x_0.

    Values go around the ring window by window, those of a frozen base in its own dtype. A machine that has
    the same base on its disk reads from there what is not of a snapshot.

    Machines that have their part from this head, at that round or a later one, keep it; also
    those that have it from a head before, which is lost: updates that it had in flight count as taken.
    Returns whether the head kept its own: `mend` is to follow then.

    Errors: ModelError: the model cannot be cut so; StageLost, StageFailed.
    """
    held = [answer.values for answer in ring.ask("held", patience=THERE)]
    if not ring.key:
        ring.key = next((one["key"] for one in held if one["key"]), "")
        ring.steps = max(one["step"] for one in held)
    kept = [bool(ring.key) and one["key"] == ring.key and one["round"] >= round for one in held]
    if not any(kept):
        ring.key = secrets.token_hex(8)
    layers = {str(stage): (one.start, one.stop) for stage, one in enumerate(ring.layers) if not kept[stage]}
    config = (base / CONFIG).read_text(encoding="utf-8")
    source = {"base": base.name, "from_snapshot": snapshot is not None}
    answers = ring.ask("load", recipe=recipe.to_json(), config=config, layers=layers, source=source)
    with open_weights(recipe, base, snapshot) as reader:
        for stage, answer in enumerate(answers):
            for wanted in answer.values["parameters"]:
                if not reader.has(wanted):
                    raise StageFailed(f"wants {str(wanted)[:60]}, which the model does not have", stage)
                name, _, dtype = wanted
                for start, values in reader.windows(name, dtype):
                    data = [values if at == stage else b"" for at in range(ring.stages)]
                    ring.ask("fill", data, stage=stage, name=name, start=start)
    ring.ask("begin", name=name, round=round, step=ring.steps, key=ring.key)
    if any(kept) and not kept[0]:
        ring.ask("settle", taken=None)
    return kept[0]


def build_staged_peer(ring: RingHead, micro_batch: int) -> Peer:
    """Build a peer like `build_peer`, of machines that have their parts. Raises what a machine has met."""
    part, worker = ring.part, StagedWorker(ring)
    vocabulary = getattr(part.compute.stage.causal.config, "vocab_size", None)
    side = SideStream(part.trainer.device)
    return Peer(StagedTrainer(ring), worker, part.recipe, vocabulary, micro_batch, side=side)


def mend(peer: Peer) -> None:
    """Go on with a replica of which a machine was replaced, once the session in which it was lost is over.

    The others keep x_i and the optimizer; the fresh one begins at its x'. Rounds in flight are completed,
    leases not delivered go back to the hub, and the next session fetches packets from the oldest x' on.
    """
    assert isinstance(peer.worker, StagedWorker)
    worker = peer.worker
    worker.ring.mend()
    taken = [flight.round for flight in peer.flights if flight.taken]
    worker.global_model.note(worker.ring.ask("settle", taken=taken))
    peer.flights.clear()
    peer.undelivered.clear()
    peer.unfinished = False
    peer.encoded.set()


class StagedTrainer:
    """The loop's `Trainer`: x_i in ranges, on the machines of a ring."""

    extensions: Sequence[ModelExtension] = ()  # none: no machine has the whole gradient of a sample
    in_memory = PER_STAGE  # each machine has the activations of `in_flight`, in 1 / stages of the layers

    def __init__(self, ring: RingHead) -> None:
        self.ring, self.part = ring, ring.part
        self.at_once = FILLS * ring.stages
        self.in_flight = PER_STAGE * ring.stages
        self.share = 1.0  # of a step's samples, which the gradient under way has
        self.noise = NoiseSums()
        self.layout, self.kind, self.sizes = self.part.whole, self.part.trainer.kind, self.part.trainer.sizes

    @property
    def stepped(self) -> bool:
        return self.part.trainer.stepped

    def check(self) -> None:
        self.ring.ask("state")

    def attempt(self, part: Sequence[Sample], aside: float) -> float:
        """Try as many micro-batches as are in flight; the share is that of the head."""
        size, terms = self.part.flat.layout.size, sum(sample.count for sample in part) * self.in_flight
        self.zero()
        try:
            parts = [part] * self.in_flight
            return share_taken(self.part.trainer.device, aside * size, lambda: self.backward(parts, terms))
        finally:
            self.zero()

    def zero(self, share: float = 1.0) -> None:
        self.share = share
        self.ring.ask("zero", share=share)

    def backward(self, parts: Sequence[Sequence[Sample]], terms: int, lease: int | None = None) -> Measured:
        compute = self.part.compute
        compute.begin(self.ring.begin(), parts, max(terms, 1), self.in_flight)
        try:
            while not compute.finished:
                self._turn(compute)
        except StageFull as full:
            if max(map(len, parts)) > 1:
                raise
            raise StageFailed("has no memory for one sequence at a time", full.stage) from None
        return compute.measured

    def _turn(self, compute: StageWorker) -> None:
        """Take one message, or do one piece of work, or wait for a message."""
        try:
            message = self.ring.next(wait=False)
            made = None if message is not None else compute.work()
            if message is None and made is None:
                message = self.ring.next(wait=True)
            if message is not None:
                made = compute.receive(message)
        except BadMessage as bad:
            raise self.ring.refused(bad, bad.kind) from None
        for answer in made or ():
            self.ring.lines.send(answer)

    def partly(self, done: float) -> None:
        self.ring.ask("partly", done=done)

    def clip(self, limit: float) -> float | None:
        answers = self.ring.ask("square")
        norm = root_of(answers)
        self.noise = noise_of(answers)
        if limit > 0:
            factor = limit * self.noise.norms(self.share) / (norm + 1e-6)  # as torch has it
            if not factor >= 1:
                self.ring.ask("scale", factor=factor)
        return norm

    def step(self, rate: float, beta1: float | None = None) -> None:
        longer = 1.0 if self.part.trainer.linear else self.noise.factor
        self.ring.ask("step", rate=rate, beta1=beta1, longer=longer)

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> Measured:
        assert vector is self.part.worker.global_model.vector
        self.ring.ask("use_global_model")
        found, parts = Measured(), batches(samples, size)
        try:
            while some := [*islice(parts, self.at_once)]:
                found += self.backward(some, 1)
        finally:
            self.ring.ask("use_local_model")
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        raise ModelError("a replica of several machines keeps no checkpoint: it hands its residual over")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors()


class StagedGlobalModel:
    """x' in ranges, on the machines of a ring. `vector` is the head's ranges."""

    def __init__(self, ring: RingHead) -> None:
        self.ring, self.vector = ring, ring.part.worker.global_model.vector
        self.round = self.fingerprint = 0
        self.numbers: list[Sequence[int]] = []  # of each machine's shards
        self.note(ring.ask("state"))

    def note(self, answers: Sequence[Answer], least: int = 0) -> None:
        """Note where the machines are. The round is the earliest: a fresh one may have to catch up.

        Errors: StageFailed: one is not at round `least`, or has shards that are not its own.
        """
        left = set(range(self.ring.part.recipe.compression.shard_count))
        for stage, answer in enumerate(answers):
            numbers = answer.values["shards"]
            if any(type(number) is not int or number not in left for number in numbers):
                raise StageFailed(f"has the shards {str(numbers)[:40]}, of which others have some", stage)
            left -= {*numbers}
            if answer.values["round"] < least:
                raise StageFailed(f"has x' of round {answer.values['round']}, not of {least}", stage)
        self.numbers = [answer.values["shards"] for answer in answers]
        if left:  # the one before the gap has it, or the first behind the head
            before = (stage for stage, has in enumerate(self.numbers) if has and has[0] < min(left))
            raise StageFailed(f"has not shard {min(left)}, and nobody else has", max(1, *before))
        self.round = min(answer.values["round"] for answer in answers)
        self.fingerprint = sum(answer.values["fingerprint"] for answer in answers) & WRAP

    @property
    def shards(self) -> int:
        return sum(map(len, self.numbers))

    def cut(self, packet: bytes) -> list[bytes]:
        """Cut a packet of all shards into those of the machines. Raises PacketError."""
        parts = split(packet, self.shards)
        return [join([parts[number] for number in numbers]) for numbers in self.numbers]

    def join(self, packets: Sequence[bytes]) -> bytes:
        """Reverse `cut`; an empty packet has no shard."""
        parts = [b""] * self.shards
        for stage, (numbers, packet) in enumerate(zip(self.numbers, packets, strict=True)):
            try:
                found = split(packet, len(numbers)) if packet else [b""] * len(numbers)
            except PacketError as error:
                raise StageFailed(str(error), stage) from None
            for number, part in zip(numbers, found, strict=True):
                parts[number] = part
        return join(parts)

    def decode(self, packet: bytes, round: int | None = None) -> DecodedPacket:
        round = self.round if round is None else round
        self.ring.ask("decode", self.cut(packet), round=round)
        return DecodedPacket(packet, (), round)

    def move(self, aggregate: DecodedPacket) -> None:
        self.note(self.ring.ask("move", round=aggregate.round), aggregate.round + 1)


class StagedWorker:
    """The replica's half of Algorithm 1. What it gives and is given has the packets of all machines; what
    they mean, each machine knows of its own."""

    def __init__(self, ring: RingHead) -> None:
        self.ring = ring
        self.global_model = StagedGlobalModel(ring)
        self.local_model: LocalModel = ring.part.worker.local_model  # the head's ranges
        self.short_of_memory = False
        self.usual = 0

    def start(
        self, budget: int, alone: bool, round: int, in_flight: Sequence[DecodedPacket], rung: int
    ) -> DecodedPacket:
        asked: dict[str, Any] = {"round": round, "budget": budget, "alone": alone, "rung": rung}
        answers = self.ring.ask("encode", **asked, flights=[one.round for one in in_flight])
        self.usual = sum(answer.values["usual"] for answer in answers)
        self.short_of_memory |= any(answer.values["short"] for answer in answers)
        return DecodedPacket(self.global_model.join([answer.data for answer in answers]), (), round)

    def bring(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None:
        """Pass: each machine decodes what it needs at the join."""

    def follow(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None:
        self.ring.ask("follow", round=aggregate.round, taken=sent is not None)

    def catch_up(self, aggregate: bytes) -> None:
        model = self.global_model
        answers = self.ring.ask("catch_up", model.cut(aggregate), round=model.round)
        model.note(answers, model.round + 1)

    def subtract(self, sent: DecodedPacket) -> None:
        self.ring.ask("subtract", round=sent.round)

    def handoff(self, budget: int, *, go_on: Callable[[], bool] = lambda: True) -> DecodedPacket | None:
        """Join what each machine codes of its own layers, all at once: nobody is asked between windows."""
        packets = [answer.data for answer in self.ring.ask("handoff", budget=budget)]
        if not any(packets):
            return None
        return DecodedPacket(self.global_model.join(packets), (), self.global_model.round)

    def residual_norm(self) -> float:
        return root_of(self.ring.ask("distance"))


def noise_of(answers: Sequence[Answer]) -> NoiseSums:
    """Add up what all machines know of the gradient's noise. Raises StageFailed where one says no numbers."""
    own, names = NoiseSums(**answers[0].values["noise"]), NoiseSums().told().keys()
    for stage, answer in enumerate(answers[1:], 1):
        told = answer.values["noise"]
        numbers = (value for value in told.values() if type(value) in (int, float) and isfinite(value))
        if told.keys() != names or len([*numbers]) < len(names):
            raise StageFailed(f"answers square with noise {str(told)[:40]!r}", stage)
        own += NoiseSums(**{**told, "least": own.least})  # which is the head's to know
    return own


def root_of(answers: Sequence[Answer]) -> float:
    """Combine the squares of all machines into a norm."""
    return float(sum(float(answer.values["square"]) for answer in answers) ** 0.5)
