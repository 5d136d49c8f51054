"""The compressor C that a recipe's `compression` section describes, and its adaptive top-K ratio.

A sender's next packet is the richest that fits its line, down to an eighth of K.

    ladder   compressors from an eighth of `topk_ratio` to it, each with STEP times as many values as the one
             before it; below half of `topk_ratio` in 1 bit: signs alone, of more values
    cost     of a compressor: K (q + 1/8) + H(K) bits a visited coordinate, H the entropy of its position
    next     the highest one whose packet, the last one's bytes in proportion to the cost, fits

A sender is a peer, and its budget is what its line carries up beside its compute; among other peers, at most
AHEAD times the newest aggregate: what an aggregator cannot pass on waits in e, where nobody sees it. Or it is
an aggregator, and its budget is the smallest that a peer can fetch beside its compute.

The first packet is the sparsest, which any line has carried soonest; while the budget is not known the
recipe's own K and q are sent. From there it climbs at once as far as the line has room to spare, the more
the longer the climb. So it rests where the budget stays the same, and where it varies by less than that room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import log2

import torch

from compress import Cocktail, decode, joined_size
from compress.backends import WORTH
from recipes.config import Compression

from .global_model import each_window

OWN = ("uncompressed_rounds", "quant_step", "block_size", "quant_bucket_size")  # of the compressor
SHARED = [one.name for one in fields(Cocktail) if one.name not in OWN]  # attributes of `Compression` too


def compressor_of(compression: Compression) -> Cocktail:
    """Build C. Every key reaches the field of the same name; `uncompressed_steps` are counted in rounds."""
    rounds = -(-compression.uncompressed_steps // compression.step_rungs[0])
    if rounds:
        rounds += compression.staleness > 0  # a stale round sends the steps before it
    shared = {name: getattr(compression, name) for name in SHARED}
    return Cocktail(**shared, uncompressed_rounds=rounds)


def handoff_compressor(compressor: Cocktail, topk_ratio: float) -> Cocktail:
    """Build the C of a residual handoff: it visits the whole vector and keeps this share of it."""
    # blocks: a unit for each element takes 8 bytes; of each chunk something is kept, however small K is
    everything = replace(compressor, random_ratio=1.0, sample_kind="block", uncompressed_rounds=0)
    return replace(everything, topk_ratio=topk_ratio, topk_chunk=0)


def warm_up_codec(compressor: Cocktail, parameters: int, device: str = "cpu") -> None:
    """Encode and decode one packet on the host and on a GPU, and drop it: the first packet on a machine waits
    seconds for a compiler, and the first of a process for its imports. The host needs none where the shards
    of so many parameters are short."""
    long = compressor.random_ratio * parameters >= WORTH * compressor.shard_count
    for where in (["cpu"] if long else []) + ([device] if device.startswith("cuda") else []):
        x = torch.linspace(-1, 1, 2 * WORTH, device=where)
        sample = replace(compressor, random_ratio=0.5).draw(len(x), 0, 0)
        sent = compressor.encode(sample.difference(x, torch.zeros_like(x)))
        sample.add_(x, decode(sent.packet, sample.m, where))  # both decoders are compiled as well
        each_window(sent.update(), x.device, partial(sample.add_, x))


# ---- the adaptive rate -------------------------------------------------------------------------------------

STEP = 2 ** (1 / 16)
STEPS = 48  # from an eighth of the recipe's K to it
SPARE = 0.97  # of the budget: a richer packet takes no more
SKEW = 0.3  # a packet of c times the cost may be c^SKEW longer than that: a long climb leaves more room
AHEAD = 2**0.125  # so a packet of the aggregator's step fits, and none that is much richer


def cost_of(compressor: Cocktail) -> float:
    """Estimate bits a visited coordinate."""
    k = compressor.topk_ratio
    entropy = -k * log2(k) - (1 - k) * log2(1 - k) if k < 1 else 0.0
    return k * (compressor.quant_bits + 1 / 8) + entropy


def share_within(bits: float, compressor: Cocktail) -> float:
    """Estimate the share K whose packet has so many bits a coordinate, with the q of a compressor."""
    low, high = 0.0, 1.0
    for _ in range(40 if bits < cost_of(replace(compressor, topk_ratio=1.0)) else 0):
        half = (low + high) / 2
        low, high = (half, high) if cost_of(replace(compressor, topk_ratio=half)) <= bits else (low, half)
    return high


@dataclass(frozen=True)
class AdaptiveRate:
    """One sender's place on the ladder; immutable, each measurement gives the next one."""

    ladder: tuple[Cocktail, ...]  # from the sparsest to the recipe's own; they differ in K and q alone
    at: int = 0  # place of the next packet's
    size: float = 0.0  # bytes of the newest packet; 0: none yet, or one that says nothing

    @property
    def usual(self) -> int:
        """Place of the recipe's own compressor."""
        return len(self.ladder) - 1

    @property
    def compressor(self) -> Cocktail:
        """The C of the next packet."""
        return self.ladder[self.at]

    @property
    def sparsest(self) -> int:
        """Estimate the bytes of the sparsest packet from the newest one; 0: not known."""
        return int(self.size * cost_of(self.ladder[0]) / cost_of(self.compressor))

    @property
    def spread(self) -> float:
        """Ratio of values in the richest packet to those in the sparsest."""
        return self.ladder[-1].topk_ratio / self.ladder[0].topk_ratio

    def sent(self, size: float) -> AdaptiveRate:
        """Note the newest packet's bytes; 0: they say nothing of the next one's."""
        return replace(self, size=size)

    def within(self, budget: float, aggregate: float = 0) -> AdaptiveRate:
        """Choose the next packet's place.

        Args:
            budget: bytes that fit; 0: not known.
            aggregate: bytes of the newest aggregate; 0: they are no bound.
        """
        if not self.size or not budget:
            return replace(self, at=self.usual if self.size else 0)
        most = min(budget, AHEAD * aggregate) if aggregate else budget
        per_bit = self.size / cost_of(self.compressor)
        sizes = {i: cost_of(compressor) * per_bit for i, compressor in enumerate(self.ladder)}
        fitting = {i: size for i, size in sizes.items() if size <= most}
        to = max(fitting, default=0)
        if to > self.at:
            spare = [i for i, s in fitting.items() if s * max(1 / SPARE, (s / self.size) ** SKEW) <= budget]
            to = max([self.at, *spare])
        return replace(self, at=to, size=sizes[to])


def fixed_rate(compressor: Cocktail) -> AdaptiveRate:
    """Build a ladder of one step: this compressor, whatever fits."""
    return AdaptiveRate((compressor,))


def adaptive_rate_of(compression: Compression) -> AdaptiveRate:
    """Build the ladder of a recipe's `compression` section. It has one step where nothing hides the exchange,
    or where all that is visited is sent in more bits than 4."""
    usual = compressor_of(compression)
    topk_ratio, bits = usual.topk_ratio, usual.quant_bits
    if not compression.auto or not compression.staleness or (topk_ratio == 1 and bits > 4):
        return fixed_rate(usual)
    fewer = 1 if bits in (2, 3, 4) else bits
    sparser = [
        replace(usual, topk_ratio=k, quant_bits=fewer if k < topk_ratio / 2 else bits)
        for k in (topk_ratio / STEP**i for i in range(STEPS, 0, -1))
    ]
    # near K = 1 a packet without positions is shorter
    return AdaptiveRate((*(one for one in sparser if cost_of(one) < cost_of(usual)), usual))


def most_sent(compression: Compression, size: int) -> tuple[int, int]:
    """Count the coordinates that a round samples of `size`, and those that are sent at the largest K."""
    if compression.uncompressed_steps > 0:  # the first rounds send everything
        return size, size
    m = int(size * compression.random_ratio)
    return m, int(m * adaptive_rate_of(compression).ladder[-1].topk_ratio)


class PacketLimits:
    """The most bytes of each packet of a run: what its receiver knows beforehand, whatever a sender says.

    Args:
        parameters: P, the length of the whole vector.
    """

    def __init__(self, compression: Compression, parameters: int) -> None:
        rate, usual = adaptive_rate_of(compression), compressor_of(compression)
        richest = {mix.quant_bits: mix for mix in rate.ladder}.values()  # of each q that one of the largest K
        self._uncompressed = usual.uncompressed_rounds
        self._sizes = [shard.size for shard in usual.cut(parameters, 0)]
        self._first = self._longest(richest, 0)
        self._later = self._longest(richest, self._uncompressed)
        self._handoffs = self._longest([handoff_compressor(usual, 1.0)], 0)

    def packet(self, round: int) -> int:
        """Return the most bytes of an update or an aggregate of a round."""
        return whole(self._first if round < self._uncompressed else self._later)

    def handoff(self) -> int:
        """Return the most bytes of a leaver's residual."""
        return whole(self._handoffs)

    def upload(self) -> int:
        """Return the most bytes of anything that a peer uploads for x'."""
        return max(self.packet(0), self.packet(self._uncompressed), self.handoff())

    def _longest(self, compressors: Iterable[Cocktail], round: int) -> list[int]:
        """Return the most bytes of each shard's packet."""
        mixes = [*compressors]
        by_size = {size: max(mix.longest(size, round) for mix in mixes) for size in {*self._sizes}}
        return [by_size[size] for size in self._sizes]


def whole(longest: Sequence[int]) -> int:
    """Return the most bytes of a packet of shards that have these at most."""
    return joined_size(len(longest)) + sum(longest)


def encoding_bytes(compression: Compression, size: int, gpu: bool = False) -> int:
    """Count the bytes that encoding takes beside the compute: the delta, and what is selected from it."""
    m, k = most_sent(compression, size)
    if compression.topk_chunk and k < m:
        return 8 * m + 20 * k
    if gpu:  # the kernels select some more than k at first, and cut that off
        return 4 * m + (37 if k < m else 21) * k
    return 4 * m + 12 * k  # 12: 11 to 14, depending on the threshold
