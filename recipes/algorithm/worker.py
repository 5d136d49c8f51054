"""CocktailSGD (Wang et al., ICML 2023), Algorithm 1: the worker's half. Algorithm 2 is aggregator.py.

No network, no model, no optimizer: vectors in, packets out. Numbers behind `#` are lines of Algorithm 1 as
recipes/ALGORITHM.md writes them down. Start: x_i = x' = x_0 and e = 0. In round t

    d_i = x_i - x'                                            1     the delta: what no peer has seen yet
    send C[d_i]                                               2
    aggregator: D = sum_i w_i C[d_i] + e;  e <- D - C[D]      3, 4  Algorithm 2
    receive C[D]                                              5
    x_i <- x_i - optimizer(g_i) + C[D] - C[d_i]               6     the optimizer's part is training/'s
    x'  <- x' + C[D]                                          7

What C leaves out of d_i stays in x_i - x' and is offered again: the worker's error feedback costs no memory.
A leaving peer hands the largest part of d_i to the aggregator, which adds it to e.

With staleness above 1 later rounds begin before C[D] is here. Their d_i leaves out what is in flight:
d_i = x_i - x' - sum of C[d_i] in flight. With staleness 0 or 1 nothing is in flight where a round begins.

Where the vector is cut into shards, C is a C of each, with a sample, a packet and an e of its own. A shard
that the aggregate leaves out has not moved: nobody's update of it was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compress import (
    Cocktail,
    Delta,
    Encoded,
    NonFiniteError,
    PackedUpdate,
    Sample,
    Shard,
    Update,
    brought,
    join,
    one_range,
    staging,
    topk,
)
from compress.backends import compiled
from recipes.config import Recipe

from .compressor import (
    AdaptiveRate,
    adaptive_rate_of,
    compressor_of,
    fixed_rate,
    handoff_compressor,
    share_within,
)
from .global_model import ON_GPU, DecodedPacket, GlobalModel, ShardUpdate, each_window


class Worker:
    """One peer's half of Algorithm 1 around its local model x_i.

    Args:
        x: (P,) float32, the local model; the optimizer changes it in place between `start` and `finish`.
            A `LocalModel` where no tensor of this process is all of it.
        global_model: x'.
        name_at: coordinate -> parameter name, for the error that a non-finite model raises.
        decay: factor on what a round has visited and not sent; a `rate` has its own.
        rate: chooses C of each packet by the round's rung; None: always x's compressor.
    """

    def __init__(
        self,
        x: Tensor | LocalModel,
        global_model: GlobalModel,
        name_at: Callable[[int], str] | None = None,
        decay: float = 1.0,
        rate: AdaptiveRate | None = None,
    ) -> None:
        self.local_model: LocalModel = LocalVector(x) if isinstance(x, Tensor) else x
        self.global_model, self.name_at = global_model, name_at
        self.rate = rate or fixed_rate(global_model.compressor, decay)
        self.on_taken: Callable[[ShardUpdate], object] | None = None  # told of all that leaves d_i
        self.aggregate_size = 0  # bytes of the newest aggregate
        self.usual = 0  # estimate of the recipe's own packets, whatever this round's are; 0: not known
        self.short_of_memory = False  # a delta has been encoded on the host: its device had no room

    @property
    def x(self) -> Tensor:
        """x_i (P,), where it is a tensor of this process."""
        assert isinstance(self.local_model, LocalVector)
        return self.local_model.x

    def start(
        self,
        budget: int = 0,
        alone: bool = False,
        round: int | None = None,
        in_flight: Sequence[DecodedPacket] = (),
        rung: int | None = None,
    ) -> DecodedPacket:
        """Encode C[d_i] (lines 1 and 2); changes neither x_i nor x'. A rung changes no residual either: what
        its sample does not visit waits for one that does.

        Args:
            budget: bytes that fit; 0: not known.
            alone: no other peer takes part, so the aggregate's size is no bound.
            round: it is encoded for; None: the one that x' is at.
            in_flight: updates of earlier rounds that x_i has not been joined with, and that the aggregator
                has or may get: they are left out of d_i.
            rung: of the round; None: the one before's.

        Raises:
            NonFiniteError: d_i holds an infinity or a NaN; it names the parameter.
        """
        model, packets, updates = self.global_model, list[bytes](), list[ShardUpdate]()
        self.rate = self.rate.on(self.rate.rung if rung is None else rung)
        self.rate = self.rate.within(budget, 0 if alone else self.aggregate_size)
        decay = self.rate.decays[self.rate.rung]
        round = model.round if round is None else round
        compressor = self.rate.compressor.at(round)
        samples = [*model.samples(round, compressor)]
        each: list[Callable[[], Tensor]] = [partial(self._delta, *at, in_flight) for at in samples]
        if decay < 1:  # x_i is not read once more: it may move as soon as the packet is there
            each = [cache(make) for make in each]
        encoded = self._encoded(compressor, samples, each)
        for (shard, sample), delta, sent in zip(samples, each, encoded, strict=True):
            packets.append(sent.packet)
            update = sent.update()
            unsent = None if decay == 1 else subtract(delta(), update).mul_(1 - decay)
            updates.append(ShardUpdate(shard, sample, update, unsent))
        whole = round < model.compressor.uncompressed_rounds
        self.rate = self.rate.sent(0 if whole else sum(map(len, packets)))
        self.usual = int(self.rate.size_of(model.compressor))
        return DecodedPacket(join(packets), tuple(updates), round)

    def finish(self, aggregate: bytes, sent: DecodedPacket | None) -> None:
        """Move x' and x_i by C[D] and take C[d_i] out of x_i (lines 5 to 7, without the optimizer).

        Args:
            sent: what `start` gave, if the aggregator took it; None if it came too late. What was not taken,
                be it of one shard, is not subtracted: it stays in x_i - x' (law 3).
        """
        self.follow(self.global_model.apply(aggregate), sent)  # 5, 7

    def bring(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None:
        """Prepare `follow`, beside the compute."""
        moved = {update.shard.number for update in aggregate.shard_updates}
        own = () if sent is None else sent.shard_updates
        for update in (*aggregate.shard_updates, *(one for one in own if one.shard.number in moved)):
            self.local_model.bring(update)

    def follow(self, aggregate: DecodedPacket, sent: DecodedPacket | None) -> None:
        """Line 6, where x' has moved by `aggregate` already."""
        self.aggregate_size = len(aggregate.packet)
        for update in aggregate.shard_updates:
            self.local_model.add_(update)  # 6   + C[D]
        if sent is not None:
            self.subtract(sent, {update.shard.number for update in aggregate.shard_updates})  # 6   - C[d_i]

    def catch_up(self, aggregate: bytes) -> None:
        """Apply a round this peer took no part in: x_i moves along with x', so that d_i stays what it was."""
        self.finish(aggregate, sent=None)

    def subtract(self, sent: DecodedPacket, shards: Collection[int] | None = None) -> None:
        """Take an update out of d_i, of these shards or (None) of all: the aggregator has it now."""
        for update in sent.shard_updates:
            if shards is None or update.shard.number in shards:
                self.local_model.add_(update, alpha=-1)
                if update.unsent is not None:
                    for part in decayed(update, update.unsent):
                        self.local_model.add_(part, alpha=-1)
                if self.on_taken is not None:
                    self.on_taken(update)

    def handoff(
        self, budget: int, topk_ratio: float = 1.0, go_on: Callable[[], bool] = lambda: True
    ) -> DecodedPacket | None:
        """Encode the largest coordinates of d_i, over all of each shard, for the aggregator's e.

        Args:
            budget: bytes; as many coordinates as they hold. None comes back where they hold none, or d_i is
            0. topk_ratio: the largest share of all coordinates that is wanted. go_on: asked after each
            window of d_i whether there is time for the next; what is behind it stays.

        Raises:
            NonFiniteError: as `start`.
        """
        model, base, n = self.global_model, self.global_model.compressor, self.global_model.vector.numel()
        keep = min(topk_ratio, share_within(max(budget, 1) * 8 / n, base))
        everything = handoff_compressor(base, 1.0)
        samples = [(s, everything.draw(s.size, s.seed, model.round)) for s in model.shards]
        kept = [self._largest(shard, keep, go_on) for shard in model.shards]
        if not any(len(part.values) for part in kept):
            return None
        while keep * n >= 1:
            compressor = handoff_compressor(base, keep)
            kept = [self._fewer(part, shard, keep) for part, shard in zip(kept, model.shards, strict=True)]
            both = zip(model.shards, kept, strict=True)
            sent = [compressor.encode_selected(shard.size, part) for shard, part in both]
            packet = join([one.packet for one in sent])
            if len(packet) <= budget:
                parts = zip(samples, sent, strict=True)
                updates = tuple(ShardUpdate(*at, one.update()) for at, one in parts)
                return DecodedPacket(packet, updates, model.round)
            keep *= 0.9 * max(budget, 1) / len(packet)  # the fewer there are, the more a position costs
        return None

    def _largest(self, shard: Shard, keep: float, go_on: Callable[[], bool]) -> topk.Survivors:
        """Select the largest share of d_i, over all of a shard. Raises NonFiniteError."""
        delta = WindowedDelta(self.local_model, shard, self.global_model.vector, go_on)
        try:
            return topk.largest(delta, topk.share_of(shard.size, keep))
        except NonFiniteError as error:
            name = self.name_at and self.name_at(shard.start + error.position)
            raise NonFiniteError(error.value, error.position, name) from None

    def _fewer(self, kept: topk.Survivors, shard: Shard, keep: float) -> topk.Survivors:
        k = topk.share_of(shard.size, keep)
        return topk.fewer(kept, k) if len(kept.values) > k else kept

    def residual_norm(self) -> float:
        """Compute the Euclidean norm of d_i = x_i - x'."""
        return self.local_model.distance(self.global_model.vector)

    def _delta(self, shard: Shard, sample: Sample, in_flight: Sequence[DecodedPacket]) -> Tensor:
        """Compute d_i of a shard (line 1), (m,), in the host's memory where its device has no room."""
        x, d = self.global_model.vector, None
        with suppress(torch.OutOfMemoryError):
            if not self.short_of_memory:
                d = self.local_model.difference(shard, sample, x)
        if d is None:
            self.short_of_memory = True
            d = delta_on_host(self.local_model, shard, sample, x)
        for update in (one for packet in in_flight for one in packet.shard_updates):
            if update.shard.number == shard.number:
                take_out(d, sample, update)
        return d

    def _encoded(
        self,
        compressor: Cocktail,
        samples: Sequence[tuple[Shard, Sample]],
        each: Sequence[Callable[[], Tensor]],
    ) -> list[Encoded]:
        """Encode d_i of every shard (line 2), on the host where its device has no room."""
        names = [self.name_at and partial(self._name_at, *at) for at in samples]
        with suppress(torch.OutOfMemoryError):
            return compressor.encode_each([*map(Delta, each, names)])
        self.short_of_memory = True
        on_host = [lambda make=make: make().cpu() for make in each]
        return compressor.encode_each([*map(Delta, on_host, names)])

    def _name_at(self, shard: Shard, sample: Sample, position: int) -> str:
        """Name the parameter at a position of a sample."""
        assert self.name_at is not None
        return self.name_at(shard.start + int(sample.coordinates(torch.tensor([position]))[0]))


def worker_of(
    recipe: Recipe,
    x: Tensor | LocalModel,
    vector: Tensor,  # (P,) float32, x' of `round`
    name_at: Callable[[int], str],
    round: int,
) -> Worker:
    """Build the worker that a recipe describes."""
    rate, mix = adaptive_rate_of(recipe.compression), compressor_of(recipe.compression)
    model = GlobalModel(vector, mix, recipe.training.seed, round, richest=rate.richest)
    return Worker(x, model, name_at, rate=rate)


def take_out(d: Tensor, sample: Sample, earlier: ShardUpdate) -> None:
    """Take an update in flight out of d_i on a sample, (m,), in place: it visited other coordinates."""

    def take(window: Update) -> None:
        positions, visited = sample.positions(earlier.sample.coordinates(window.positions))
        d.index_add_(0, positions, window.values[visited], alpha=-1)

    each_window(earlier.update, d.device, take)


def subtract(d: Tensor, update: PackedUpdate | Update) -> Tensor:
    """d <- d - C[d], (m,), in place."""

    def take(window: Update) -> None:
        d.index_add_(0, window.positions, window.values, alpha=-1)

    each_window(update, d.device, take)
    return d


def decayed(sent: ShardUpdate, unsent: Tensor) -> Iterator[ShardUpdate]:
    """Yield what decays of what an update has left unsent, (m,), as updates of a window each."""
    for start in range(0, sent.sample.m, ON_GPU):
        values = unsent[start : start + ON_GPU]
        positions = torch.arange(start, start + len(values), device=values.device)
        yield replace(sent, update=Update(sent.sample.m, positions, values), unsent=None)


# ---- x_i ---------------------------------------------------------------------------------------------------

WINDOW = 1 << 24  # elements of a long vector that are worked on at a time: 64 MiB


class LocalModel(Protocol):
    """x_i, in this process (`LocalVector`) or spread over several."""

    @property
    def from_global_model(self) -> bool:
        """Tell whether x_i is stored as its difference from x': then x' may not move during the compute."""

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        """Compute x_i - other, (m,), on the shard's sample; other: (P,)."""

    def bring(self, update: ShardUpdate) -> None:
        """Do what of a later `add_` can be done beside the compute; x_i stays."""

    def add_(self, update: ShardUpdate, alpha: int = 1) -> None:
        """x_i += alpha * update."""

    def distance(self, other: Tensor) -> float:
        """Compute the Euclidean norm of x_i - other; other: (P,)."""


def fetched_difference(sample: Sample, x: Tensor, y: Tensor) -> Tensor:
    """Compute x - y, (m,), on the device of x, to which only the sample of y is brought: the same bits. It is
    brought in windows of pinned memory, and nobody waits for the device."""
    out = sample.take(x)
    for start, window in sample.windows(WINDOW // 4):  # pinned memory is taken in small pieces
        taken = window.take(y, staging(window.m, x.device))
        out[start : start + window.m].sub_(brought(taken, x.device))
    return out


@dataclass(frozen=True)
class LocalVector:
    """x_i as one tensor. x' is on its device, or in the host's memory."""

    x: Tensor  # (P,)
    from_global_model = False

    def difference(self, shard: Shard, sample: Sample, other: Tensor) -> Tensor:
        x, y = shard.of(self.x), shard.of(other)
        if x.device == y.device:
            return sample.difference(x, y)
        return fetched_difference(sample, x, y)

    def bring(self, update: ShardUpdate) -> None:
        """Pass: windows of an update are decoded on the device itself, at the join."""

    def add_(self, update: ShardUpdate, alpha: int = 1) -> None:
        update.add_(self.x, alpha)

    def distance(self, other: Tensor) -> float:
        windows = zip(torch.split(self.x, WINDOW), torch.split(other, WINDOW), strict=True)
        square = float(sum(torch.dist(x, y.to(x.device)) ** 2 for x, y in windows))
        return float(square**0.5)


# ---- d_i, window by window ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowedDelta:
    """A `topk.Source`: d_i = x_i - x' of one shard. Only what is asked for comes to the host."""

    local_model: LocalModel
    shard: Shard
    global_model: Tensor  # (P,) x'
    go_on: Callable[[], bool] = lambda: True  # asked after each window
    cut: list[topk.Survivors] = field(default_factory=list)  # found until it said no

    @property
    def size(self) -> int:
        return self.shard.size

    def magnitudes(self, line: int, step: int) -> np.ndarray:
        """Gather the patterns without signs of every `step`-th line of `line` elements: (seen,) int32."""
        units = torch.arange(0, self.size // line, step)
        lines = Sample(self.size, line, units, len(units) * line)
        parts = (self._bits(window) & topk.MAGNITUDE for _, window in lines.windows(WINDOW))
        return np.concatenate([np.empty(0, np.int32), *(part.cpu().numpy() for part in parts)])

    def reaching(self, low: int, expected: int) -> topk.Survivors:
        """Collect all elements whose magnitude has a pattern of at least `low`."""
        if self.cut:
            return self.cut[0]
        positions, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for start in range(0, self.size, WINDOW):
            stop = min(start + WINDOW, self.size)
            bits = self._bits(one_range(self.size, start, stop))
            if bits.is_cuda:
                here = ((bits & topk.MAGNITUDE) >= low).nonzero().view(-1)
                seen = topk.Survivors(here.cpu().numpy(), bits[here].view(torch.float32).cpu().numpy())
            else:
                v, loops = bits.view(torch.float32).numpy(), compiled(self.size)
                source = loops.Vector(v) if loops else topk.Plain(v)
                seen = source.reaching(low, expected * len(v) // self.size)
            positions.append(seen.positions.astype(np.int64) + start)
            values.append(seen.values)
            if stop < self.size and not self.go_on():
                break
        found = topk.Survivors(np.concatenate(positions), np.concatenate(values))
        if stop < self.size:
            self.cut.append(found)
        return found

    def _bits(self, sample: Sample) -> Tensor:
        """Compute the patterns of d_i on a sample, (m,) int32, where x_i is."""
        return self.local_model.difference(self.shard, sample, self.global_model).view(torch.int32)


def delta_on_host(local_model: LocalModel, shard: Shard, sample: Sample, global_model: Tensor) -> Tensor:
    """Compute d_i on a round's sample, (m,), in the host's memory: a device gets no more than a window."""
    out = torch.empty(sample.m)
    for start, window in sample.windows(WINDOW // 4):  # this is done where memory is short
        out[start : start + window.m] = local_model.difference(shard, window, global_model)
    return out
