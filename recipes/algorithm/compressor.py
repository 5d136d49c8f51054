"""The compressor C that a recipe's `compression` section describes, and a sender's own top-K ratio.

All senders of a round have its rung (config/presets.py), hence one p. A sender's next packet is the richest
that fits its line, down to an eighth of the rung's K.

    ladder   compressors from an eighth of the rung's K to it, each with STEP times as many values as the one
             before it; below half of that K in 1 bit: signs alone, of more values
    cost     of a compressor: p (K (q + 1/8) + H(K)) bits a coordinate, H the entropy of its position
    next     the highest one whose packet, the last one's bytes in proportion to the cost, fits

A sender is a peer, and its budget is what its line carries up beside its compute; among other peers, at most
AHEAD times the newest aggregate: what an aggregator cannot pass on waits in e, where nobody sees it. Or it is
an aggregator, and its budget is the smallest that a peer can fetch beside its compute.

The first packet is the sparsest, which any line has carried soonest; while the budget is not known the
recipe's own K and q are sent. From there it climbs at once as far as the line has room to spare, the more
the longer the climb. So it rests where the budget stays the same, and where it varies by less than that room.
On another rung it begins at that one's K, or as far below as it has to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import log2

import torch

from compress import Cocktail, Shard, decode, joined_size
from compress.backends import WORTH
from recipes.config import Compression

from .global_model import ShardUpdate

# of the compressor
OWN = ("uncompressed_rounds", "quant_step", "block_size", "quant_bucket_size", "random_ratios")
SHARED = [one.name for one in fields(Cocktail) if one.name not in OWN]  # attributes of `Compression` too


def compressor_of(compression: Compression) -> Cocktail:
    """Build C. Every key reaches the field of the same name; `uncompressed_steps` are counted in rounds."""
    rounds = -(-compression.uncompressed_steps // compression.local_steps)
    if rounds:
        rounds += compression.staleness > 0  # a stale round sends the steps before it
    shared = {name: getattr(compression, name) for name in SHARED}
    ratios = tuple(dict.fromkeys(rung.random_ratio for rung in compression.rungs))
    return Cocktail(**shared, uncompressed_rounds=rounds, random_ratios=ratios if len(ratios) > 1 else ())


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
        ShardUpdate(Shard(0, 0, len(x), 0), sample, sent.update()).add_(x)


# ---- the adaptive rate -------------------------------------------------------------------------------------

STEP = 2 ** (1 / 16)
STEPS = 48  # from an eighth of the recipe's K to it
SPARE = 0.97  # of the budget: a richer packet takes no more
SKEW = 0.3  # a packet of c times the cost may be c^SKEW longer than that: a long climb leaves more room
AHEAD = 2**0.125  # so a packet of the aggregator's step fits, and none that is much richer


def cost_of(compressor: Cocktail) -> float:
    """Estimate bits a coordinate, visited or not."""
    k = compressor.topk_ratio
    entropy = -k * log2(k) - (1 - k) * log2(1 - k) if k < 1 else 0.0
    return compressor.random_ratio * (k * (compressor.quant_bits + 1 / 8) + entropy)


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

    ladders: tuple[tuple[Cocktail, ...], ...]  # of each rung, from the sparsest to the rung's own K
    rung: int = 0
    at: int = 0  # place of the next packet's
    size: float = 0.0  # bytes of the newest packet; 0: none yet, or one that says nothing
    decays: tuple[float, ...] = (1.0,)  # of what is visited and not sent, of each rung

    @property
    def ladder(self) -> tuple[Cocktail, ...]:
        """The compressors of this rung; they differ in K and q alone."""
        return self.ladders[self.rung]

    @property
    def usual(self) -> int:
        """Place of the rung's own compressor."""
        return len(self.ladder) - 1

    def on(self, rung: int) -> AdaptiveRate:
        """Go to a rung; what the newest packet says of the next one's bytes holds there in proportion."""
        if rung == self.rung:
            return self
        usual = self.ladders[rung][-1]
        size, at = self.size_of(usual), len(self.ladders[rung]) - 1 if self.size else 0
        return replace(self, rung=rung, at=at, size=size)

    def size_of(self, compressor: Cocktail) -> float:
        """Estimate the bytes of a packet of this compressor from the newest one; 0: not known."""
        return self.size * cost_of(compressor) / cost_of(self.compressor)

    @property
    def compressor(self) -> Cocktail:
        """The C of the next packet."""
        return self.ladder[self.at]

    @property
    def spread(self) -> float:
        """Ratio of values in the richest packet to those in the sparsest."""
        return self.ladder[-1].topk_ratio / self.ladder[0].topk_ratio

    @property
    def richest(self) -> tuple[Cocktail, ...]:
        """Return each rung's compressor of the largest K."""
        return tuple(ladder[-1] for ladder in self.ladders)

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
        sizes = {i: self.size_of(compressor) for i, compressor in enumerate(self.ladder)}
        fitting = {i: size for i, size in sizes.items() if size <= most}
        to = max(fitting, default=0)
        if to > self.at:
            spare = [i for i, s in fitting.items() if s * max(1 / SPARE, (s / self.size) ** SKEW) <= budget]
            to = max([self.at, *spare])
        return replace(self, at=to, size=sizes[to])


def fixed_rate(compressor: Cocktail, decay: float = 1.0) -> AdaptiveRate:
    """Build a ladder of one step: this compressor, whatever fits."""
    return AdaptiveRate(((compressor,),), decays=(decay,))


def adaptive_rate_of(compression: Compression) -> AdaptiveRate:
    """Build the ladders of a recipe's `compression` section, on the rung with which a run begins."""
    base, rungs = compressor_of(compression), compression.rungs
    ladders = tuple(_ladder(base, rung) for rung in rungs)
    return AdaptiveRate(ladders, compression.first_rung, decays=tuple(rung.error_decay for rung in rungs))


def _ladder(base: Cocktail, rung: Compression) -> tuple[Cocktail, ...]:
    """Build the ladder of one rung. It has one step where nothing hides the exchange, where K is written, or
    where all that is visited is sent in more bits than 4."""
    topk_ratio, bits = rung.topk_ratio, rung.quant_bits
    usual = replace(base, random_ratio=rung.random_ratio, topk_ratio=topk_ratio, quant_bits=bits)
    if "topk_ratio" not in rung.auto or not rung.staleness or (topk_ratio == 1 and bits > 4):
        return (usual,)
    fewer = 1 if bits in (2, 3, 4) and "quant_bits" in rung.auto else bits
    sparser = [
        replace(usual, topk_ratio=k, quant_bits=fewer if k < topk_ratio / 2 else bits)
        for k in (topk_ratio / STEP**i for i in range(STEPS, 0, -1))
    ]
    # near K = 1 a packet without positions is shorter
    return (*(one for one in sparser if cost_of(one) < cost_of(usual)), usual)


def most_sent(compression: Compression, size: int) -> tuple[int, int]:
    """Count the coordinates that a round samples of `size`, and those that are sent at the largest K, on the
    rung that takes the most memory."""
    if compression.uncompressed_steps > 0:  # the first rounds send everything
        return size, size
    return max((m := int(size * rung.random_ratio), int(m * rung.topk_ratio)) for rung in compression.rungs)


class PacketLimits:
    """The most bytes of each packet of a run: what its receiver knows beforehand, whatever a sender says.

    Args:
        parameters: P, the length of the whole vector.
    """

    def __init__(self, compression: Compression, parameters: int) -> None:
        rate, usual = adaptive_rate_of(compression), compressor_of(compression)
        # of each rung and q that one of the largest K
        richest = {(at, mix.quant_bits): mix for at, one in enumerate(rate.ladders) for mix in one}.values()
        self._uncompressed = usual.uncompressed_rounds
        self._sizes = [shard.size for shard in usual.cut(parameters, 0)]
        self._first = self._longest(richest, 0)
        self._later = self._longest(richest, self._uncompressed)
        self._handoffs = self._longest([handoff_compressor(usual, 1.0)], 0)

    def packet(self, round: int) -> int:
        """Return the most bytes of an update or an aggregate of a round."""
        return self._first if round < self._uncompressed else self._later

    def handoff(self) -> int:
        """Return the most bytes of a leaver's residual."""
        return self._handoffs

    def upload(self) -> int:
        """Return the most bytes of anything that a peer uploads for x'."""
        return max(self.packet(0), self.packet(self._uncompressed), self.handoff())

    def _longest(self, compressors: Iterable[Cocktail], round: int) -> int:
        """Return the most bytes of a packet of all shards."""
        mixes = [*compressors]
        by_size = {size: max(mix.longest(size, round) for mix in mixes) for size in {*self._sizes}}
        return joined_size([by_size[size] for size in self._sizes])


def encoding_bytes(compression: Compression, size: int, gpu: bool = False) -> int:
    """Count the bytes that encoding takes beside the compute: the delta, and what is selected from it."""
    m, k = most_sent(compression, size)
    if compression.topk_chunk and k < m:
        return 8 * m + 20 * k
    if gpu:  # the kernels select some more than k at first, and cut that off
        return 4 * m + (37 if k < m else 21) * k
    return 4 * m + 12 * k  # 12: 11 to 14, depending on the threshold
