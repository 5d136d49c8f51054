"""The exchange of all peers at once on their device, with the product's arithmetic and without packets.

    D_i = x_i - x' on the round's sample, of all peers      (N, m)
    C[D_i]                                                  a dense (N, m), zero where nothing is sent
    D = sum_i w_i s_i C[D_i] + e;  e <- D - C[D]            (m,)

Nothing waits for the device in a round. Zeros that a packet leaves out are sent as zeros. How long packets
are is asked of the product's encoder for some rounds, when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from compress import Cocktail, Sample, topk
from compress.quantization import BEYOND, BINS, LOWEST, SHIFT, Plans, bf16, plans, seen
from recipes.algorithm import GlobalModel, OuterOptimizer
from recipes.algorithm.robust_mean import FEWEST, HELD

MEASURED = 32  # rounds from one measured packet to the next; at first fewer, as a warm-up begins with 0
LEAST = 2.0**-40  # spacing of numbers below which every change counts as seen


@dataclass(frozen=True)
class Part:
    """Positions of a vector, exchanged as a sample is."""

    at: Tensor  # (m,) int64

    def take(self, v: Tensor) -> Tensor:
        return v[self.at]

    def put_(self, v: Tensor, values: Tensor) -> None:
        v[self.at] = values

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        return x[self.at] - y[self.at]


Deltas = tuple[Sample | Part, Tensor]  # where, and (N, m)


class DeviceExchange:
    """The peers' and the aggregator's half of a round. e is (P,), on the device of x'.

    Args:
        seen, correlated: of the changes below.
        parts: they are exchanged in turn, in the place of samples.
    """

    def __init__(
        self,
        global_model: GlobalModel,
        outer: OuterOptimizer,
        decay: float,
        *,
        seen: bool = False,
        correlated: bool = False,
        parts: Sequence[Part] = (),
    ) -> None:
        self.model, self.compressor = global_model, global_model.compressor
        self.outer, self.decay = outer, decay
        (self.shard,) = global_model.shards
        self.error = torch.zeros_like(global_model.vector)
        self.momentum = torch.zeros_like(self.error if outer.momentum else self.error[:0])
        self.sizes = [0, 0]  # bytes of a packet of a peer's and of the aggregate, as last measured
        self.rounds: list[tuple[Tensor, ...]] = []  # of each since then: a delta and D, if they are measured
        self.seen, self.correlated, self.parts = seen, correlated, parts

    def start(self, xs: Sequence[Tensor], round: int) -> Deltas:
        """Take the deltas of a round, (N, m)."""
        sample: Sample | Part
        if self.parts:  # that which the step before has trained
            sample = self.parts[(round - 1) % len(self.parts)]
        else:
            sample = self.compressor.draw(self.shard.size, self.shard.seed, round)
        return sample, torch.stack([sample.difference(x, self.model.vector) for x in xs])

    def finish(self, xs: Sequence[Tensor], started: Deltas, weights: Sequence[float]) -> None:
        """Aggregate the deltas and move x', every x_i and e."""
        sample, deltas = started
        place = sample.take(self.model.vector) if self.seen else None
        draws = draws_of(deltas, self.model.round) if self.correlated else None
        sent = compressed(self.compressor, deltas, place, draws)
        e, v = sample.take(self.error), None
        D = self._mean(sent, weights, torch.zeros_like(e) if self.outer.momentum else e.clone())
        if self.outer.momentum:
            v = sample.take(self.momentum)
            D = self.outer.step(D, v).add_(e)
            sample.put_(self.momentum, v)
        (moved,) = compressed(self.compressor, D[None], place)
        measured = self.model.round.bit_count() < 2 or self.model.round % MEASURED == 0
        self.rounds.append((deltas[0].clone(), D) if measured else ())
        sample.put_(self.error, D - moved)
        for x, own, delta in zip(xs, sent, deltas, strict=True):
            joined = (sample.take(x) + moved) - own
            if self.decay < 1:
                joined -= (1 - self.decay) * (delta - own)
            sample.put_(x, joined)
        sample.put_(self.model.vector, sample.take(self.model.vector) + moved)
        self.model.round += 1

    def bytes_sent(self) -> tuple[int, int]:
        """Count the bytes of a peer's packets and of the aggregates since the last call; this waits."""
        up = down = 0
        for vectors in self.rounds:
            self.sizes = [len(self.compressor.encode(one).packet) for one in vectors] or self.sizes
            up, down = up + self.sizes[0], down + self.sizes[1]
        self.rounds = []
        return up, down

    def _mean(self, sent: Tensor, weights: Sequence[float], out: Tensor) -> Tensor:
        """out += rate * sum_i w_i s_i C[D_i], peer by peer; s_i shortens what is over twice the median."""
        rate, total = self.outer.rate_of(sum(weight > 0 for weight in weights)), sum(weights)
        shorter = torch.ones(len(sent), device=sent.device)
        if len(sent) >= FEWEST:
            norms = sent.double().norm(dim=1).float()
            median = norms.sort().values[(len(sent) - 1) // 2]
            shorter = torch.where(norms > HELD * median, HELD * median / norms, shorter)
        for update, weight, scale in zip(sent, weights, shorter, strict=True):
            out += update * (scale * float(np.float32(weight / total * rate)))
        return out


def compressed(
    compressor: Cocktail, v: Tensor, place: Tensor | None = None, draws: Tensor | None = None
) -> Tensor:
    """Compute what packets of the rows of v (N, m) decode to, (N, m).

    Args:
        place: the weights (m,) that v changes, where what BF16 sees most of it is selected.
        draws: thresholds (N, m), where everything is sent and rounded at random.
    """
    k = topk.share_of(v.shape[1], compressor.topk_ratio)
    if k >= v.shape[1]:
        return quantized(v, compressor, draws)
    magnitudes = v.abs() if place is None else seen_in_bf16(v, place)
    border = magnitudes.topk(k, sorted=False).values.amin(1, keepdim=True)
    above, equal = magnitudes > border, magnitudes == border
    # of equal ones the first, as the product has it: an aggregate has many
    kept = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    place = torch.where(kept, kept.cumsum(1) - 1, k)  # among the kept; k: nowhere
    values = v.new_zeros(len(v), k + 1).scatter_(1, place, v)[:, :k]
    decoded = torch.nn.functional.pad(quantized(values.contiguous(), compressor), (0, 1))
    return decoded.gather(1, place)


def quantized(values: Tensor, compressor: Cocktail, draws: Tensor | None = None) -> Tensor:
    """Quantize the rows of values (N, k) and compute what their codes mean."""
    bits, bucket, count = compressor.quant_bits, compressor.quant_bucket_size, values.shape[1]
    if bits == 32:
        return values
    rows = torch.nn.functional.pad(values, (0, -count % bucket)).unflatten(1, (-1, bucket))  # (N, b, bucket)
    if bits == 16:
        scale = bf16(rows.abs().amax(2) / 32767, up=True)[..., None]
        places = torch.floor(rows * inverse(scale) + 0.5).clamp(-32767, 32767)
        return (places * scale).flatten(1)[:, :count]
    how = plans(torch.stack([seen(own, bucket) for own in values]), bits, compressor.quant_step)
    return leveled(rows, values, how, bits, draws)


def leveled(rows: Tensor, values: Tensor, how: Plans, bits: int, draws: Tensor | None = None) -> Tensor:
    """Quantize the buckets (N, b, bucket) of values (N, k) to the nearest levels of their plans; with
    thresholds (N, k) to one of the two around each."""
    magnitudes, count, bucket = rows.abs(), values.shape[1], rows.shape[2]
    mean = magnitudes.mean(2)
    if count % bucket:
        mean[:, -1] *= bucket / (count % bucket)  # its mean is of the values that are there
    largest = how.by_largest[:, None]
    scale = torch.where(largest, bf16(magnitudes.amax(2), up=True), bf16(mean, up=False))
    y = magnitudes * inverse(scale)[..., None]
    at, table = how.at.float(), (how.at * 2.0 ** unit_of(how)).round().float()

    def nearest(y: Tensor) -> Tensor:
        number = ((y.view(torch.int32) >> SHIFT) - LOWEST).clamp(0, BINS - 1)
        return how.by_bin.gather(1, number.flatten(1).long()).long().view_as(y)

    if 1 < bits < 8:  # buckets with an outlier get a scale that serves them better
        worst = (y.amax(2) / at[:, -1:]).clamp(min=1)
        least, factor = torch.full_like(worst, torch.inf), torch.ones_like(worst)
        for power in (0, 1 / 3, 2 / 3, 1):
            wider = worst**power
            there = looked_up(at, nearest(y / wider[..., None])) * wider[..., None]
            error = ((y - there) / worst[..., None]).square().sum(2)
            factor = torch.where(error < least, wider, factor)
            least = torch.minimum(error, least)
        outlying = (worst > BEYOND[bits]) & ~largest
        wider = torch.where(outlying, bf16(scale * factor, up=False), scale)
        y = torch.where(outlying[..., None], y * (scale * inverse(wider))[..., None], y)
        scale = wider
    sign, chosen = torch.where(values < 0, -1.0, 1.0), nearest(y)
    if draws is not None:
        few, sign = rounded(y.flatten(1)[:, :count] * sign, at, draws)
        chosen = torch.nn.functional.pad(few, (0, -count % bucket)).view_as(y)
    found = looked_up(table, chosen) * (scale * 2.0 ** -unit_of(how))[..., None]
    return sign * found.flatten(1)[:, :count]


def unit_of(how: Plans) -> Tensor:
    """Compute each `Plan.unit`, (N, 1) float32."""
    return (15 - how.at[:, -1:].log2().ceil()).float()


def looked_up(table: Tensor, numbers: Tensor) -> Tensor:
    """Look up numbers (N, b, bucket), each vector's in a table of its own, (N, levels)."""
    return table.gather(1, numbers.flatten(1)).view_as(numbers)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)


# ---- published changes: one that gains .1 % in three seeds would be the product's --------------------------


def in_turn(offsets: Sequence[int], device: torch.device) -> tuple[Part, Part]:
    """Divide adapters into all A and all B, which stand in turn: one of them is trained and sent in each
    step (LA-LoRA, arXiv 2602.19926)."""
    every = [torch.arange(start, stop, device=device) for start, stop in pairwise(offsets)]
    return Part(torch.cat(every[0::2])), Part(torch.cat(every[1::2]))


def seen_in_bf16(values: Tensor, x: Tensor) -> Tensor:
    """Measure changes `values` of x in the distance of two BF16 numbers there: below 1/2 a forward pass in
    BF16 does not see them (PULSE, arXiv 2602.03839)."""
    exponents = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    return values.abs() / (exponents * 2.0**-7).clamp(min=LEAST)


def draws_of(deltas: Tensor, round: int) -> Tensor:
    """Draw thresholds (N, m), each uniform in [0, 1), that fill it evenly over the peers: what they round
    up and down nearly cancels in the sum (Suresh et al., arXiv 2203.04925)."""
    generator = torch.Generator(deltas.device).manual_seed(round)
    order = torch.rand(deltas.shape, device=deltas.device, generator=generator).argsort(0)
    return (order + torch.rand(deltas.shape[1], device=deltas.device, generator=generator)) / len(deltas)


def rounded(signed: Tensor, at: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Round `signed` (N, k) at random to one of the two levels around it, so that it is right in the mean.

    Args:
        at: the levels' magnitudes, ascending, (N, levels).
        thresholds: uniform in [0, 1), in the shape of `signed`.

    Returns: number of the level, and +1 or -1.
    """
    levels, count = torch.cat([-at.flip(1), at], 1), at.shape[1]
    above = torch.searchsorted(levels, signed.contiguous()).clamp(1, 2 * count - 1)
    low, high = levels.gather(1, above - 1), levels.gather(1, above)
    chosen = torch.where((signed - low) / (high - low) > thresholds, above, above - 1)
    positive = chosen >= count
    number = torch.where(positive, chosen - count, count - 1 - chosen)
    return number, torch.where(positive, 1.0, -1.0)
