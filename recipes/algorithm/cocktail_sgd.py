"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2: the worker's half and the owner's half.

No network, no model, no optimizer: vectors in, packets out. Numbers behind `#` are lines of Algorithm 1 as
recipes/ALGORITHM.md writes them down. Start: x_i = x' = x_0 and e = 0. In round t

    d_i = x_i - x'                                            1     what the swarm has not seen of this peer
    send C[d_i]                                               2
    owner: D = mean_i C[d_i] + e;  e <- D - C[D]              3, 4  Algorithm 2
    receive C[D]                                              5
    x_i <- x_i - optimizer(g_i) + C[D] - C[d_i]               6     the optimizer's part is finetune.py's
    x'  <- x' + C[D]                                          7

What C leaves out of d_i stays in x_i - x' and is offered again: the worker's error feedback costs no memory.
A peer that leaves hands the largest part of its d_i to the owner, who adds it to e. What the owner does about
peers that lie is in aggregate.py.

Where the vector is cut into shards, C is a C of each, with a sample, a packet and an error of its own, and an
owner is the owner of one. A shard that the aggregate leaves out has not moved: nobody's part of it was taken.
Local steps, the outer step and errors that decay are relax.py's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress import (
    Cocktail,
    Encoded,
    PackedUpdate,
    Sample,
    Shard,
    Update,
    decode,
    decode_packed,
    fingerprint,
    fingerprint_after,
    join,
    split,
)
from compress.backends import WORTH
from recipes.config import PLAIN, Compression, Outer

from .adaptive_rate import fixed_rate
from .decoded_updates import ROOM, DecodedUpdates, RejectedUpdate, norm_of, usable
from .local_vector import WINDOW, LocalModel, LocalVector
from .robust_mean import MEAN, AggregateStep, Collected, Rule, WeightedUpdate, collect, shortened


def compressor_of(compression: Compression) -> Cocktail:
    """C as a recipe's `compression` section asks for it."""
    whole = -(-compression.uncompressed_steps // compression.local_steps)
    if whole:
        whole += compression.staleness  # a round sends the steps before it, or its own
    return Cocktail(
        random_ratio=compression.random_ratio,
        topk_ratio=compression.topk_ratio,
        topk_chunk=compression.topk_chunk,
        quant_bits=compression.quant_bits,
        sample_kind=compression.sample_kind,
        block_size=compression.block_size,
        quant_bucket_size=compression.quant_bucket_size,
        stochastic_rounding=compression.stochastic_rounding,
        shards=compression.shards,
        uncompressed_rounds=whole,
    )


def handoff_compressor(mix: Cocktail, keep: float) -> Cocktail:
    """C over the whole vector, which keeps this share of it: how a leaver's residual is written."""
    # blocks: a unit for each element takes 8 bytes; of each chunk something is kept, however small K is
    return replace(
        mix, random_ratio=1.0, topk_ratio=keep, sample_kind="block", topk_chunk=0, uncompressed_rounds=0
    )


def rehearse(mix: Cocktail, size: int) -> None:
    """One packet there and back, in vain: where x' has `size` parameters and its shards are long, the first
    packet on a machine waits seconds for a compiler, and the first of a process for its imports.
    """
    if mix.random_ratio * size >= WORTH * mix.shards:
        x = torch.linspace(-1, 1, 2 * WORTH)
        sample = replace(mix, random_ratio=0.5).draw(len(x), 0, 0)
        packet = mix.encode(sample.difference(x, torch.zeros_like(x))).packet
        sample.add_(x, decode(packet, sample.m))  # the decoder is compiled as well


@dataclass(frozen=True)
class ShardUpdate:
    """What a packet says of one shard: an update of the coordinates that one round has sampled there."""

    shard: Shard
    sample: Sample
    update: Update  # k values at positions within the sample
    left: Tensor | None = None  # (m,) what the update has left of the sample, where that decays

    def add_(self, x: Tensor, alpha: int = 1) -> None:
        """x: (P,), in place."""
        self.sample.add_(self.shard.of(x), self.update, alpha)


@dataclass(frozen=True)
class DecodedPacket:
    """A packet as what it means, shard by shard; those that it leaves out are not there."""

    packet: bytes
    shard_updates: tuple[ShardUpdate, ...]


class GlobalModel:
    """The global model x', its round and its fingerprint. Only committed packets change it (law 1).

    Args:
        vector: (P,) float32, x' of `round`; changed in place.
        mix: what C is; only its shards and its sampling matter here, since a packet says its own K and bits.
        seed: of the run; all peers sample the same coordinates from (seed, round).
    """

    def __init__(self, vector: Tensor, mix: Cocktail, seed: int, round: int = 0) -> None:
        self.vector, self.mix, self.seed, self.round = vector, mix, seed, round
        self.shards = mix.cut(vector.numel(), seed)
        self.fingerprint = fingerprint(vector)

    def samples(self) -> Iterator[tuple[Shard, Sample]]:
        """Of `self.round`, shard by shard."""
        for shard in self.shards:
            yield shard, self.mix.draw(shard.size, shard.seed, self.round)

    def apply(self, packet: bytes) -> DecodedPacket:
        """Line 7 with the packet of `self.round`; the fingerprint follows at the cost of what changed.

        Raises:
            PacketError: the packet does not fit; x' is unchanged.
        """
        part = read(packet, self.samples(), len(self.shards))
        for piece in part.shard_updates:
            here = piece.shard.of(self.vector)
            changed = piece.sample.coordinates(piece.update.positions)
            before = here[changed]
            piece.add_(self.vector)  # 7
            places = changed + piece.shard.start if piece.shard.start else changed
            self.fingerprint = fingerprint_after(self.fingerprint, places, before, here[changed])
        self.round += 1
        return part


def read(packet: bytes, samples: Iterable[tuple[Shard, Sample]], shards: int) -> DecodedPacket:
    """Raises PacketError."""
    found = zip(samples, split(packet, shards), strict=True)
    return DecodedPacket(
        packet, tuple(ShardUpdate(shard, s, decode(one, s.m)) for (shard, s), one in found if one)
    )


class Worker:
    """One peer's half of Algorithm 1 around its local model x_i.

    Args:
        x: (P,) float32, the local model; the optimizer changes it in place between `start` and `finish`.
            A `Vector` where no tensor of this process is all of it.
        global_model: x'.
        name_at: coordinate -> parameter name, for the error that a non-finite model raises.
        dither: where rounding is stochastic, what tells this peer's noise from the others'.
        decay: what a round has visited and left is multiplied by it.
    """

    def __init__(
        self,
        x: Tensor | LocalModel,
        global_model: GlobalModel,
        name_at: Callable[[int], str] | None = None,
        dither: int = 0,
        decay: float = 1.0,
    ) -> None:
        self.local_model: LocalModel = LocalVector(x) if isinstance(x, Tensor) else x
        self.global_model, self.name_at, self.dither, self.decay = global_model, name_at, dither, decay
        self.rate, self.back = (
            fixed_rate(global_model.mix),
            0,
        )  # of the next packet; bytes of the newest aggregate

    @property
    def x(self) -> Tensor:
        """(P,), where it is a tensor of this process."""
        assert isinstance(self.local_model, LocalVector)
        return self.local_model.x

    def start(self, fits: int = 0, alone: bool = False) -> DecodedPacket:
        """Lines 1 and 2 of the round that x' is at; in `fits` bytes, where known, and where this peer is not
        `alone` in hardly more than came back. Changes neither x nor x'.

        Raises NonFiniteError: d_i holds an infinity or a NaN; it names the parameter.
        """
        common, packets, pieces = self.global_model, list[bytes](), list[ShardUpdate]()
        self.rate = self.rate.within(fits, 0 if alone else self.back)
        mix = self.rate.mixed(common.mix).at(common.round)
        for shard, sample in common.samples():
            d = self.local_model.difference(shard, sample, common.vector)  # 1   (m,)
            sent = self._encode(mix, d, shard, sample)  # 2
            packets.append(sent.packet)
            d = d if self.decay < 1 else d.new_empty(0)  # let go before as much again is made
            update = sent.update()
            pieces.append(ShardUpdate(shard, sample, update, None if self.decay == 1 else rest(d, update)))
        self.rate = self.rate.sent(
            0 if common.round < common.mix.uncompressed_rounds else sum(map(len, packets))
        )
        return DecodedPacket(join(packets), tuple(pieces))

    def finish(self, aggregate: bytes, sent: DecodedPacket | None) -> None:
        """Lines 5 to 7. `sent` is what `start` gave if the owner took it; None if it came too late.

        What was not taken, be it of one shard, is simply not subtracted: it stays in x_i - x' (law 3).
        """
        self.follow(self.global_model.apply(aggregate), sent)  # 5, 7
        self.back = len(aggregate)

    def follow(self, part: DecodedPacket, sent: DecodedPacket | None) -> None:
        """Line 6, where x' has moved by `part`."""
        for piece in part.shard_updates:
            self.local_model.add_(piece)  # 6   + C[D]
        if sent is not None:
            self.subtract(sent, {piece.shard.number for piece in part.shard_updates})  # 6   - C[d_i]

    def catch_up(self, aggregate: bytes) -> None:
        """A round this peer took no part in: x_i moves along with x', so that d_i stays what it was."""
        self.finish(aggregate, sent=None)

    def subtract(self, sent: DecodedPacket, shards: Collection[int] | None = None) -> None:
        """What `sent` says of these shards, or (None) of all, is somebody else's now: no part of d_i."""
        for piece in sent.shard_updates:
            if shards is None or piece.shard.number in shards:
                self.local_model.add_(piece, alpha=-1)
                for part in faded(piece, 1 - self.decay):
                    self.local_model.add_(part, alpha=-1)

    def handoff(self, room: int, keep: float = 1.0) -> DecodedPacket | None:
        """C over the whole of d_i, for the owner to inherit: the largest coordinates of each shard.

        Args:
            room: bytes; as many coordinates as they hold. None comes back where they hold none, or d_i is 0.
            keep: the largest share of all coordinates that is wanted.

        Raises NonFiniteError, as `start`.
        """
        common, mix, n = self.global_model, self.global_model.mix, self.global_model.vector.numel()
        keep = min(keep, max(room, 1) * 8 / (mix.quant_bits * n))  # a first guess: positions cost nothing
        everything = [
            (s, handoff_compressor(mix, 1.0).draw(s.size, s.seed, common.round)) for s in common.shards
        ]
        d = [self.local_model.difference(shard, sample, common.vector) for shard, sample in everything]
        if not any(bool(part.any()) for part in d):  # (P,) together
            return None
        while keep * n >= 1:
            to = handoff_compressor(mix, keep)
            sent = [self._encode(to, part, *where) for part, where in zip(d, everything, strict=True)]
            packet = join([one.packet for one in sent])
            if len(packet) <= room:
                both = zip(everything, sent, strict=True)
                return DecodedPacket(packet, tuple(ShardUpdate(*where, one.update()) for where, one in both))
            keep *= 0.9 * max(room, 1) / len(packet)  # the fewer there are, the more a position costs
        return None

    def residual_norm(self) -> float:
        """The length of d_i = x_i - x'."""
        return self.local_model.distance(self.global_model.vector)

    def _encode(self, mix: Cocktail, d: Tensor, shard: Shard, sample: Sample) -> Encoded:
        """C[d] of one shard; the noise of stochastic rounding is told apart by peer and round."""
        return mix.encode(d, self._name_in(shard, sample), self.dither << 64 | self.global_model.round)

    def _name_in(self, shard: Shard, sample: Sample) -> Callable[[int], str] | None:
        if (name_at := self.name_at) is None:
            return None
        return lambda position: name_at(shard.start + int(sample.coordinates(torch.tensor([position]))[0]))


def rest(d: Tensor, update: Update) -> Tensor:
    """d - C[d], (m,), in the place of d."""
    d[update.positions.to(d.device)] -= update.values.to(d.device)
    return d


def faded(piece: ShardUpdate, share: float) -> Iterator[ShardUpdate]:
    """This share of what a packet has left, as updates that hold a window of it each."""
    for start in range(0, 0 if piece.left is None else piece.sample.m, WINDOW):
        assert piece.left is not None
        values = piece.left[start : start + WINDOW] * share
        where = torch.arange(start, start + len(values), device=values.device)
        yield replace(piece, update=Update(piece.sample.m, where, values), left=None)


@dataclass(frozen=True)
class Before:
    """What an aggregate is about to change."""

    sample: Sample
    error: Tensor  # (m,) e on it
    momentum: Tensor | None  # (m,) v on it
    usual: float
    packets: int


class ShardAggregator:
    """Algorithm 2: the owner of one vector, which is a shard or the whole, with its error e.

    Args:
        parameters: P, the length of the vector.
        mix: how D is compressed.
        seed: of its samples.
        rule: what takes the place of the mean where peers may lie.
        room: bytes of a round's packets that are kept open until it is aggregated.
        outer: what is made of the mean.
    """

    def __init__(
        self,
        parameters: int,
        mix: Cocktail,
        seed: int,
        rule: Rule = MEAN,
        room: int = ROOM,
        outer: Outer = PLAIN,
    ) -> None:
        self.mix, self.seed, self.rule, self.room, self.outer = mix, seed, rule, room, outer
        self.error = torch.zeros(parameters)  # e   (P,)
        self.momentum = torch.zeros(parameters if outer.momentum else 0)  # v   (P,), or nothing
        self.held: tuple[WeightedUpdate, ...] = ()  # whose packets the newest aggregate has only in part
        self.usual = 0.0  # how large a value of a packet usually is; inf: nobody can say
        self.packets = 1  # in the newest round
        self._before: Before | None = None  # the newest aggregate
        self._drawn: tuple[int, Sample] | None = None
        self._newest = -1  # round of which packets have arrived
        self._packets: DecodedUpdates | None = None  # of that round, until it is aggregated
        self._lock = threading.Lock()

    def sample(self, round: int) -> Sample:
        drawn = self._drawn  # by any thread; a round asks for it three times
        if drawn is None or drawn[0] != round:
            drawn = self._drawn = round, self.mix.draw(self.error.numel(), self.seed, round)
        return drawn[1]

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Open a packet that `aggregate` may be given, while others are still on their way. From any thread;
        too late, or with one that cannot be used, it does nothing.
        """
        if (packets := self._packets_of(round)) is not None:
            with contextlib.suppress(RejectedUpdate):
                packets.open(peer, packet)

    def _packets_of(self, round: int) -> DecodedUpdates | None:
        """None: a later round has begun, or this one is aggregated."""
        with self._lock:
            if round > self._newest:
                self._newest, self._packets = round, DecodedUpdates(self.sample(round).m, self.room)
            return self._packets if round == self._newest else None

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        """Lines 3 and 4: the packet C[D] of `round`.

        Args:
            updates: (peer, packet, weight); weights are normalised to 1, all zero counts as all equal.

        Raises:
            RejectedUpdate: one packet does not decode, is not finite, or is far longer than the others. e is
                unchanged: call again without that peer.
        """
        moved = self.collect(round, updates)
        sent = self.encode(round, moved, self.mix)
        self.send(round, moved, sent.update())
        return sent.packet

    def collect(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> AggregateStep:
        """Line 3, as `aggregate`; e is unchanged."""
        return self._stepped(round, self._collect(round, updates, self._packets_of(round)))

    def encode(self, round: int, moved: AggregateStep, mix: Cocktail) -> Encoded:
        """C[D], with a mix that may differ in K and q: a packet says its own, and is replayed as it is."""
        return mix.at(round).encode(moved.D, seed=round)

    def send(self, round: int, moved: AggregateStep, update: PackedUpdate | Update) -> None:
        """Line 4: e is what the update has left of D, in the place of D.

        A replay takes the update from the packet that was sent. To make it again would need the same encoder
        to the bit (this machine, this many threads).
        """
        sample, D = self.sample(round), moved.D
        e = sample.take(self.error) if moved.error is None else moved.error
        v = sample.take(self.momentum) if self.outer.momentum else None
        self._before = Before(sample, e, v, self.usual, self.packets)
        if moved.momentum is not None:
            sample.put_(self.momentum, moved.momentum)
        update.add_to(D, 0, sample.m, -1.0)
        if self.outer.decay != 1:
            D.mul_(self.outer.decay)
        sample.put_(self.error, D)  # 4   e <- D - C[D]
        self.held, self.usual, self.packets, self._packets = moved.held, moved.usual, moved.packets, None

    def replay(self, round: int, updates: Sequence[tuple[str, bytes, float]], packet: bytes) -> None:
        """Lines 3 and 4 of a round that is committed as `packet`: e moves as it did then, to the bit."""
        moved = self._stepped(round, self._collect(round, updates))
        self.send(round, moved, decode_packed(packet, self.sample(round).m))

    def inherit(self, peer: str, packet: bytes, share: float) -> float:
        """e <- e + share * s * what a leaver's legacy holds: the swarm's mean has not lost this residual.

        Returns s: below 1 where it is longer than an honest residual, by what the newest round held.

        Args:
            packet: of `Worker.handoff`, over the whole vector.
            share: the weight, of 1, that the peer's packets had in the mean.

        Raises:
            RejectedUpdate: it does not decode, is not finite, or is far too long. e is unchanged.
        """
        update, scale = self.legacy(peer, packet)
        self.add(update, share, scale)
        return scale

    def legacy(self, peer: str, packet: bytes) -> tuple[PackedUpdate | Update, float]:
        """What it holds and s, as `inherit`; e is unchanged."""
        update = usable(peer, packet, self.error.numel())
        usual = self.usual * self.error.numel() ** 0.5
        return update, shortened(peer, norm_of(peer, update), usual, self.rule)

    def add(self, update: PackedUpdate | Update, share: float, scale: float) -> None:
        """e <- e + share * scale * what an update of the whole vector holds."""
        update.add_to(self.error, 0, self.error.numel(), self.outer.counts(share, self.packets) * scale)

    def _collect(
        self, round: int, updates: Sequence[tuple[str, bytes, float]], packets: DecodedUpdates | None = None
    ) -> Collected:
        """The outer step along the mean, on the round's sample; with e, where momentum is not to have it."""
        sample = self.sample(round)
        error = torch.zeros(sample.m) if self.outer.momentum else sample.take(self.error)
        return collect(error, updates, self.rule, packets, self.outer)

    def _stepped(self, round: int, found: Collected) -> AggregateStep:
        """D of what `_collect` has found; where there is momentum, by that."""
        if not self.outer.momentum:
            return AggregateStep(found.D, None, found.usual, found.packets, found.held, found.error)
        sample = self.sample(round)
        v = sample.take(self.momentum)
        D, e = self.outer.step(found.D, v), sample.take(self.error)
        return AggregateStep(D.add_(e), v, found.usual, found.packets, found.held, e)

    def undo(self) -> None:
        """The newest aggregate was not committed: e is what it was before. To be called before `inherit`."""
        if self._before is not None:
            self._before.sample.put_(self.error, self._before.error)
            if self._before.momentum is not None:
                self._before.sample.put_(self.momentum, self._before.momentum)
            self.usual, self.packets, self._before = self._before.usual, self._before.packets, None

    def settle(self) -> None:
        """The newest aggregate is committed: there is nothing to undo."""
        self._before = None


def fold(common: GlobalModel, packets: Iterable[bytes]) -> GlobalModel:
    """x' after these packets, applied in order: how a joiner, a snapshot and an export come by the model."""
    for packet in packets:
        common.apply(packet)
    return common
