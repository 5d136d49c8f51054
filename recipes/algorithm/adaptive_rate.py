"""How rich a sender's packets are: the richest K and q whose packet fits its line, in the recipe's bounds.

    ladder   (K, q) from `topk_ratio_min` to `topk_ratio_max`, each step STEP times as many values as the one
             before it; below half of `topk_ratio` in 2 bits: fewer levels for more values
    cost     of a step: K (q + 1/8) + H(K) bits a visited coordinate, H the entropy of its position
    next     the highest step whose packet, the last one's bytes in proportion to the cost, fits

The sender is a peer, and what fits is what its line up carries beside its compute; where there are others, no
more than AHEAD times what comes back: what an owner cannot pass on waits in e, where nobody sees it. Or it is
an owner, and what fits is the least that peers say they can fetch beside theirs.

The first packet is the sparsest, which any line has carried soonest; where nobody knows even then what fits,
the recipe's K and q are sent. It goes up RISE steps at a time, and only where the line has room to spare: so
it rests where what fits stays the same, and where it varies by less than that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from compress import Cocktail
from recipes.config import Compression

STEP = 2 ** (1 / 16)
RISE = 8  # steps at once
SPARE = 0.97  # of the room: a richer packet takes no more
SKEW = 0.3  # a packet of c times the cost may be c^SKEW longer than that: a long climb leaves more room
AHEAD = 2**0.125  # so a packet of the owner's step fits, and none that is much richer


@dataclass(frozen=True)
class Rung:
    keep: float  # K
    bits: int  # q

    @property
    def cost(self) -> float:
        """Bits a visited coordinate, about."""
        k = self.keep
        entropy = -k * log2(k) - (1 - k) * log2(1 - k) if k < 1 else 0.0
        return k * (self.bits + 1 / 8) + entropy


@dataclass(frozen=True)
class AdaptiveRate:
    """One sender: where on the ladder its next packet is."""

    ladder: tuple[Rung, ...]  # from the sparsest on
    usual: int = 0  # where the recipe is
    at: int = 0
    size: float = 0.0  # bytes of the newest one; 0: it says nothing

    @property
    def wide(self) -> float:
        """How many times more values the richest packet has than the sparsest."""
        return self.ladder[-1].keep / self.ladder[0].keep

    def sent(self, size: float) -> AdaptiveRate:
        return replace(self, size=size)

    def within(self, room: float, back: float = 0) -> AdaptiveRate:
        """So many bytes fit, and so many came back; 0: not known."""
        if not self.size or not room:
            return replace(self, at=self.usual if self.size else 0)
        a_bit = self.size / self.ladder[self.at].cost
        most = min(room, AHEAD * back) if back else room
        fitting = [i for i, rung in enumerate(self.ladder) if rung.cost * a_bit <= most]
        to = max(fitting, default=0)
        if to > self.at:
            now = self.ladder[self.at].cost
            costs = {i: self.ladder[i].cost for i in fitting}
            spare = [i for i, c in costs.items() if c * a_bit * max(1 / SPARE, (c / now) ** SKEW) <= room]
            to = min(self.at + RISE, max([self.at, *spare]))
        return replace(self, at=to, size=a_bit * self.ladder[to].cost)

    def mixed(self, mix: Cocktail) -> Cocktail:
        """C of the next packet."""
        rung = self.ladder[self.at]
        return replace(mix, topk_ratio=rung.keep, quant_bits=rung.bits)


def fixed_rate(mix: Cocktail) -> AdaptiveRate:
    """What a mix says, whatever fits."""
    return AdaptiveRate((Rung(mix.topk_ratio, mix.quant_bits),))


def adaptive_rate_of(compression: Compression) -> AdaptiveRate:
    """As a recipe's `compression` section bounds it. One that has nothing to hide its exchange behind, or
    sends all that it visits and names no bound, has a ladder of one step."""
    keep, bits = compression.topk_ratio, compression.quant_bits
    everything = keep == 1 and compression.topk_ratio_min is None
    if not compression.auto or not compression.staleness or everything:
        return AdaptiveRate((Rung(keep, bits),))
    low, high = compression.topk_ratio_min or keep / 8, compression.topk_ratio_max or keep
    fewer = 2 if bits in (3, 4) else bits
    sparser = [Rung(k, fewer if k < keep / 2 else bits) for k in reversed(towards(keep, low))]
    richer = [Rung(k, bits) for k in towards(keep, high)]
    return AdaptiveRate((*sparser, Rung(keep, bits), *richer), usual=len(sparser))


def towards(start: float, end: float) -> list[float]:
    """From `start`, without it, to `end`, in equal steps that are no larger than STEP."""
    count = ceil(abs(log2(end / start)) / log2(STEP) - 1e-9)
    return [start * (end / start) ** (i / count) for i in range(1, count)] + [end] * (count > 0)
