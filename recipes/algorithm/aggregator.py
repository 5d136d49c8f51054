"""CocktailSGD (Wang et al., ICML 2023), Algorithm 2: the aggregator's half. Algorithm 1 is worker.py.

    D = sum_i w_i C[d_i] + e                    3     on the round's sample; robust_mean.py may resist liars
    send C[D];  e <- D - C[D]                   4

An aggregator has some shards of the vector, or all of them; each shard has an e of its own. Between two
rounds shards may change hands (`assign`): e goes to the next aggregator as a handoff with all the weight of
the mean, momentum begins anew.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from compress import Cocktail, PackedUpdate, Sample, Shard, Update, decode_packed, join, sampled, split
from recipes.config import Recipe
from recipes.weight_files import damaged_part, float32_header, write_with_sums

from .compressor import AdaptiveRate, adaptive_rate_of, fixed_rate, handoff_compressor
from .robust_mean import (
    MEAN,
    PLAIN,
    SELDOM,
    AggregateStep,
    DecodedUpdates,
    OuterOptimizer,
    RejectedUpdate,
    Rule,
    WeightedPackets,
    WeightedUpdate,
    blaming,
    collect,
    handoff_scale,
    measured,
    outer_optimizer_of,
    rule_of,
    select_shards,
)

ERROR, MOMENTUM = "error", "momentum"  # e and v, in a file

# Called with line 3 of every shard, before any e moves; gives what is to be awaited before one does.
Log = Callable[[Mapping[int, AggregateStep]], Callable[[], object]]


def unlogged(steps: Mapping[int, AggregateStep]) -> Callable[[], object]:
    """Log nothing."""
    return lambda: None


class ShardAggregator:
    """Algorithm 2 for one shard, with its error feedback e and its outer momentum v."""

    def __init__(self, shard: Shard, compressor: Cocktail, rule: Rule, outer: OuterOptimizer) -> None:
        self.shard, self.compressor, self.rule, self.outer = shard, compressor, rule, outer
        self.error = torch.zeros(shard.size)  # e   (P,) of the shard
        self.momentum = torch.zeros(shard.size if outer.momentum else 0)  # v   (P,), or nothing
        self.shortened: tuple[WeightedUpdate, ...] = ()  # in the newest step
        self.usual = float("inf")  # typical absolute value in a packet; inf: a handoff is taken as it is
        self.recent = 0.0  # the largest of those of late; not in a file: it only decides what is refused
        self.packets = 1  # in the newest step
        self._drawn: tuple[tuple[int, Cocktail], Sample] | None = None

    def sample(self, round: int) -> Sample:
        """Draw the round's sample. From any thread; it is asked for several times a round."""
        drawn, asked = self._drawn, (round, self.compressor)
        if drawn is None or drawn[0] != asked:
            drawn = self._drawn = asked, self.compressor.draw(self.shard.size, self.shard.seed, round)
        return drawn[1]

    def take_p_of(self, round: int, packet: bytes) -> None:
        """Go to the p that the round's packet was sampled with."""
        self.compressor = self.compressor.of_length(self.shard.size, self.shard.seed, round, sampled(packet))

    def collect(
        self, round: int, updates: Sequence[WeightedUpdate], *, replay: bool = False
    ) -> AggregateStep:
        """D = sum_i w_i C[d_i] + e (line 3), with the outer step; e is unchanged. Raises RejectedUpdate,
        in a `replay` never for an update's length."""
        sample, recent = self.sample(round), float("inf") if replay else self.recent
        e = sample.take(self.error)
        if not self.outer.momentum:
            return collect(e, updates, self.rule, self.outer, recent)
        zero = torch.zeros(sample.m)  # momentum is not to have e
        step = collect(zero, updates, self.rule, self.outer, recent)
        v = sample.take(self.momentum)
        return replace(step, D=self.outer.step(step.D, v).add_(e), momentum=v)

    def apply(self, round: int, step: AggregateStep, packet: bytes) -> None:
        """e <- D - C[D] (line 4), in the place of D.

        The packet is taken as it is, also by a replay. To encode it again would need the same encoder to the
        bit (this machine, this many threads), and what was sent is what the packet says in any case.
        """
        sample, D = self.sample(round), step.D
        if step.momentum is not None:
            sample.put_(self.momentum, step.momentum)
        decode_packed(packet, sample.m).add_to(D, 0, sample.m, -1.0)
        sample.put_(self.error, D)  # 4
        self.shortened, self.usual, self.packets = step.shortened, step.usual, step.packets
        if step.length < float("inf"):
            # as a residual takes 1 / (p K) of its sender's updates to be sent
            fade = self.compressor.random_ratio * self.compressor.topk_ratio / SELDOM
            self.recent = max(step.length, self.recent * (1 - fade))

    def open_handoff(self, peer: str, packet: bytes) -> tuple[PackedUpdate | Update, float]:
        """Decode a handoff of this shard; returns its update and s. Raises RejectedUpdate."""
        handoff = measured(peer, packet, self.shard.size)
        usual, recent = (each * self.shard.size**0.5 for each in (self.usual, self.recent))
        scale = handoff_scale(peer, handoff.norm, usual, recent, self.rule)
        return handoff.decoded(self.shard.size), scale

    def merge(self, handoff: PackedUpdate | Update, share: float, scale: float) -> None:
        """e <- e + share * scale * handoff."""
        weight = self.outer.handoff_weight(share, self.packets) * scale
        handoff.add_to(self.error, 0, self.shard.size, weight)


class Aggregator:
    """Algorithm 2 for the shards that are assigned here: a round's packets in, the packet C[D] out.

    Args:
        parameters: P, the length of the whole vector.
        compressor: C, or the rate that chooses one for each packet.
        seed: of the run.
        rule: takes the place of the mean where peers may lie.
        outer: the step along the mean.
        assigned: numbers of the shards; None: all.
    """

    def __init__(
        self,
        parameters: int,
        compressor: Cocktail | AdaptiveRate,
        seed: int,
        rule: Rule = MEAN,
        outer: OuterOptimizer = PLAIN,
        assigned: Collection[int] | None = None,
    ) -> None:
        self.rate = fixed_rate(compressor) if isinstance(compressor, Cocktail) else compressor
        self.compressor = self.rate.ladder[-1]  # K and q of packets aside
        self.rule, self.outer = rule, outer
        self.shards = self.compressor.cut(parameters, seed)
        self.assigned: Mapping[int, ShardAggregator] = {}  # by number, ascending; replaced, never changed
        self._budget = 0.0  # bytes a coordinate
        self._newest = -1  # round of which packets have arrived
        self._updates: DecodedUpdates | None = None  # of that round, until its step
        self._lock = threading.Lock()
        self.assign(range(len(self.shards)) if assigned is None else assigned)

    def assign(self, numbers: Collection[int]) -> bytes:
        """Take over these shards, and give up all others. Returns the e of those given up, as a handoff for
        `merge_handoff`; empty where there is nothing in it."""
        given = [b""] * len(self.shards)
        for number, shard in self.assigned.items():
            left = int(shard.error.count_nonzero())  # few of them in the first rounds
            if number not in numbers and left:
                exact = replace(handoff_compressor(self.compressor, left / shard.shard.size), quant_bits=32)
                given[number] = exact.encode(shard.error).packet
        with self._lock:
            self.assigned = {n: self.assigned.get(n) or self._new(n) for n in sorted(numbers)}
            self._newest, self._updates = -1, None
        return join(given) if any(given) else b""

    def reset(self) -> None:
        """Begin anew with e = 0 and v = 0 for the shards that are assigned."""
        with self._lock:
            self.assigned = {number: self._new(number) for number in self.assigned}
            self._newest, self._updates = -1, None

    def _new(self, number: int) -> ShardAggregator:
        return ShardAggregator(self.shards[number], self.compressor, self.rule, self.outer)

    @property
    def shortened(self) -> tuple[WeightedUpdate, ...]:
        """List the updates that the newest step has only in part, one a peer."""
        found: dict[str, WeightedUpdate] = {}
        for shard in self.assigned.values():
            for update in shard.shortened:
                found.setdefault(update.peer, update)
        return tuple(found.values())

    @property
    def nbytes(self) -> int:
        """Bytes of every e and v."""
        return sum(shard.error.nbytes + shard.momentum.nbytes for shard in self.assigned.values())

    # ---- a round -------------------------------------------------------------------------------------------

    def add(self, round: int, peer: str, packet: bytes) -> None:
        """Decode a packet while others are still on their way. From any thread; a packet that is too late, or
        cannot be used, is passed over: `step` judges it."""
        if (updates := self._updates_of(round)) is not None:
            with contextlib.suppress(RejectedUpdate):
                updates.decode(peer, packet)

    def step(self, round: int, packets: WeightedPackets, log: Log = unlogged) -> bytes:
        """Lines 3 and 4: aggregate the round's packets into the packet C[D].

        Line 3 of every shard comes first: where a packet is refused no e has moved, and `log` was not called.

        Raises:
            RejectedUpdate: one packet does not decode, is not finite, or is far longer than the others: call
                again without that peer.
        """
        updates = (self._updates_of(round) or self._fresh(round, self.assigned)).weigh(packets)
        steps = {n: self.assigned[n].collect(round, of_shard) for n, of_shard in updates.items()}
        logged = log(steps)
        self.rate = self.rate.within(self._budget)
        compressor = self.rate.compressor.at(round)  # a packet says its own K and q
        sent = {n: compressor.encode(step.D).packet for n, step in steps.items()}
        logged()
        for number, packet in sent.items():
            self.assigned[number].apply(round, steps[number], packet)
        if sent and round >= self.compressor.uncompressed_rounds:
            size = sum(map(len, sent.values())) / sum(self.shards[n].size for n in sent)
            self.rate = self.rate.sent(size)
        self._updates = None
        return join([sent.get(shard.number, b"") for shard in self.shards])

    def open(self, size: int, rung: int) -> None:
        """Prepare for the next round: bound the packet of all shards to so many bytes (0: as before), and go
        to the round's rung. e stays what it is: it is a vector of all coordinates."""
        self._budget = size / sum(shard.size for shard in self.shards) if size else self._budget
        self.rate = self.rate.on(rung)
        self.compressor = self.rate.ladder[-1]
        for shard in self.assigned.values():
            shard.compressor = self.compressor

    def replay(self, round: int, packets: WeightedPackets, packet: bytes) -> None:
        """Repeat a step that was committed as `packet`: e moves as it did then, to the bit. What has not
        moved stays as it is."""
        parts = split(packet, len(self.shards))
        moved = [number for number in self.assigned if parts[number]]
        self.take_p_of(round, packet)
        updates = self._fresh(round, moved).weigh(packets).items()
        steps = {n: self.assigned[n].collect(round, of_shard, replay=True) for n, of_shard in updates}
        for number, step in steps.items():
            self.assigned[number].apply(round, step, parts[number])

    def take_p_of(self, round: int, packet: bytes) -> None:
        """Go to the p of a round that was committed as `packet`, before it is replayed."""
        for number, part in enumerate(split(packet, len(self.shards))):
            if part and number in self.assigned:
                self.assigned[number].take_p_of(round, part)

    def merge_handoff(self, peer: str, packet: bytes, share: float) -> float:
        """e <- e + share * s * handoff: the swarm's mean has not lost a leaver's residual.

        Args:
            packet: of `Worker.handoff` or `assign`; it may leave shards out.
            share: the weight, of 1, that the peer's packets had in the mean.

        Returns:
            the smallest s of a shard: below 1 where the handoff is longer than an honest residual, judged by
            what the newest round held.

        Raises:
            RejectedUpdate: it does not decode, is not finite, or is far too long. No e has moved.
        """
        with blaming(peer):
            parts = split(packet, len(self.shards)) if self.assigned else []
        moved = [shard for number, shard in self.assigned.items() if parts[number]]
        opened = [(shard, *shard.open_handoff(peer, parts[shard.shard.number])) for shard in moved]
        for shard, handoff, scale in opened:
            shard.merge(handoff, share, scale)
        return min((scale for _, _, scale in opened), default=1.0)

    def _updates_of(self, round: int) -> DecodedUpdates | None:
        """Return the cache of a round; None: a later round has begun, or this one is aggregated."""
        with self._lock:
            if round > self._newest:
                self._newest, self._updates = round, self._fresh(round, self.assigned)
            return self._updates if round == self._newest else None

    def _fresh(self, round: int, numbers: Collection[int]) -> DecodedUpdates:
        """Make an empty cache for the packets of a round."""
        return DecodedUpdates({n: self.assigned[n].sample(round).m for n in numbers}, len(self.shards))

    def select(self, packet: bytes) -> bytes:
        """Cut a packet of the whole vector down to the shards that are assigned here."""
        return select_shards(packet, self.assigned, len(self.shards))

    # ---- files ---------------------------------------------------------------------------------------------

    def step_bytes(self, round: int) -> int:
        """Estimate the length of `serialize`."""
        values = sum(shard.sample(round).m for shard in self.assigned.values())
        return 4 * values * (2 if self.outer.momentum else 1)

    def serialize(self, steps: Mapping[int, AggregateStep]) -> list[bytes | memoryview]:
        """Write what a step makes of e as a safetensors file, in pieces: for `replay_step`."""
        tensors = {name_of(n): step.D for n, step in steps.items()}
        tensors |= {name_of(n, MOMENTUM): s.momentum for n, s in steps.items() if s.momentum is not None}
        raw = (tensor.view(torch.uint8).numpy().data for tensor in tensors.values())
        return [float32_header(tensors, described(steps.values())), *raw]

    def replay_step(self, round: int, serialized: bytes, packet: bytes) -> None:
        """Repeat a step like `replay`, from `serialize`. Raises ValueError: it is not of these shards."""
        sent = split(packet, len(self.shards))
        self.take_p_of(round, packet)
        try:
            tensors = load(serialized)
            said = json.loads(serialized[8 : 8 + int.from_bytes(serialized[:8], "little")])["__metadata__"]
            usual, packets = said["usual"].split(), said["packets"].split()
            for (number, shard), typical, many in zip(self.assigned.items(), usual, packets, strict=True):
                v = tensors[name_of(number, MOMENTUM)] if self.outer.momentum else None
                if sent[number]:
                    step = AggregateStep(tensors[name_of(number)], v, float(typical), int(many))
                    shard.apply(round, step, sent[number])
        except (SafetensorError, KeyError) as problem:
            raise ValueError(f"what round {round} came to is not of these shards: {problem}") from problem

    def save(self, path: Path, round: int) -> None:
        """Write every e and v as they are before `round`: whole under that name, or not at all."""
        tensors = {name_of(number): shard.error for number, shard in self.assigned.items()}
        if self.outer.momentum:
            tensors |= {name_of(n, MOMENTUM): shard.momentum for n, shard in self.assigned.items()}
        about = {"round": str(round), **described(self.assigned.values())}
        write_with_sums(path, tensors, about)

    def load(self, path: Path) -> int:
        """Take over the shards of a file, each e and v as `save` wrote it; returns the round it is before.

        Raises:
            ValueError: the file is damaged, or not of this vector.
        """
        kinds = [ERROR, MOMENTUM] if self.outer.momentum else [ERROR]
        try:
            with safe_open(path, "pt") as file:
                names, said = set(file.keys()), file.metadata()
                there = [n for n in range(len(self.shards)) if name_of(n) in names]
                kept = {n: [file.get_tensor(name_of(n, kind)) for kind in kinds] for n in there}
            round, usual = int(said["round"]), [float(one) for one in said["usual"].split()]
            packets = [int(one) for one in said["packets"].split()]
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as problem:
            raise ValueError(f"{path} does not hold an aggregator's error feedback: {problem}") from problem
        if strangers := names - {name_of(number, kind) for number in kept for kind in kinds}:
            raise ValueError(f"{path} has {', '.join(sorted(strangers))}: it is of another number of shards")
        for number, tensors in kept.items():
            want = (self.shards[number].size,)
            for one in tensors:
                if tuple(one.shape) != want or str(one.dtype) != "torch.float32":
                    raise ValueError(f"{path} has {one.dtype} {tuple(one.shape)}, not {want}")
        named = {name_of(n, kind): one for n in kept for kind, one in zip(kinds, kept[n], strict=True)}
        if damaged := damaged_part(said, named):
            raise ValueError(f"{path} is damaged: {damaged} is not what was written")
        self.assign(kept)
        for (number, tensors), typical, many in zip(kept.items(), usual, packets, strict=True):
            shard = self.assigned[number]
            for mine, one in zip((shard.error, shard.momentum), tensors, strict=False):
                mine.copy_(one)
            shard.usual, shard.packets = typical, many
        return round


def described(states: Collection[ShardAggregator] | Collection[AggregateStep]) -> dict[str, str]:
    """Note each shard's typical value and number of packets, for a file."""
    return {
        "usual": " ".join(str(state.usual) for state in states),
        "packets": " ".join(str(state.packets) for state in states),
    }


def name_of(number: int, kind: str = ERROR) -> str:
    """Name a shard's e or v in a file."""
    return f"{kind}.{number}" if number else kind


def aggregator_of(recipe: Recipe, parameters: int, assigned: Collection[int] | None = None) -> Aggregator:
    """Build the aggregator that a recipe describes."""
    compression = recipe.compression
    rate, rule, outer = adaptive_rate_of(compression), rule_of(compression), outer_optimizer_of(compression)
    return Aggregator(parameters, rate, recipe.training.seed, rule, outer, assigned)
