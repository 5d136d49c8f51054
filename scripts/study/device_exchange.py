"""The exchange of all peers at once on their device, with the product's arithmetic and without packets.

    D_i = x_i - x' on the round's sample, of all peers      (N, m)
    C[D_i]                                                  a dense (N, m), zero where nothing is sent
    D = sum_i w_i s_i C[D_i] + e;  e <- D - C[D]            (m,)

The product decides the levels of a packet on some of its values, on the host. That is all that comes there,
and the host waits twice a round: for all peers together, and for the aggregate. Zeros that a packet leaves
out are sent as zeros. How long packets are is asked of the product's encoder, now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compress import Cocktail, Sample, topk
from compress.backends import compiled
from compress.quantization import BINS, LOWEST, SHIFT, Plan, plan, seen
from recipes.algorithm import GlobalModel, OuterOptimizer
from recipes.algorithm.robust_mean import FEWEST, HELD

LARGEST = 0x7F7F0000  # pattern of the largest finite BF16
MEASURED = 32  # rounds from one measured packet to the next


class DeviceExchange:
    """The peers' and the aggregator's half of a round. e is (P,), on the device of x'."""

    def __init__(self, global_model: GlobalModel, outer: OuterOptimizer, decay: float) -> None:
        self.model, self.compressor = global_model, global_model.compressor
        self.outer, self.decay = outer, decay
        (self.shard,) = global_model.shards
        self.error = torch.zeros_like(global_model.vector)
        self.momentum = torch.zeros_like(self.error if outer.momentum else self.error[:0])
        self.up = self.down = 0  # bytes of a packet of a peer's and of the aggregate, as last measured

    def start(self, xs: Sequence[Tensor], round: int) -> tuple[Sample, Tensor]:
        """Take the deltas of a round, (N, m)."""
        sample = self.compressor.draw(self.shard.size, self.shard.seed, round)
        return sample, torch.stack([sample.difference(x, self.model.vector) for x in xs])

    def finish(self, xs: Sequence[Tensor], started: tuple[Sample, Tensor], weights: Sequence[float]) -> None:
        """Aggregate the deltas and move x', every x_i and e."""
        sample, deltas = started
        sent = compressed(self.compressor, deltas)
        e, v = sample.take(self.error), None
        D = self._mean(sent, weights, torch.zeros_like(e) if self.outer.momentum else e.clone())
        if self.outer.momentum:
            v = sample.take(self.momentum)
            D = self.outer.step(D, v).add_(e)
            sample.put_(self.momentum, v)
        (moved,) = compressed(self.compressor, D[None])
        if self.model.round % MEASURED == 1:
            self.up, self.down = (len(self.compressor.encode(one).packet) for one in (deltas[0], D))
        sample.put_(self.error, D - moved)
        for x, own, delta in zip(xs, sent, deltas, strict=True):
            joined = (sample.take(x) + moved) - own
            if self.decay < 1:
                joined -= (1 - self.decay) * (delta - own)
            sample.put_(x, joined)
        sample.put_(self.model.vector, sample.take(self.model.vector) + moved)
        self.model.round += 1

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


def compressed(compressor: Cocktail, v: Tensor) -> Tensor:
    """Compute what packets of the rows of v (N, m) decode to, (N, m)."""
    k = topk.share_of(v.shape[1], compressor.topk_ratio)
    if k >= v.shape[1]:
        return quantized(v, compressor)
    magnitudes = v.abs()
    border = magnitudes.topk(k, sorted=False).values.amin(1, keepdim=True)
    above, equal = magnitudes > border, magnitudes == border
    # of equal ones the first, as the product has it: an aggregate has many
    kept = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    place = torch.where(kept, kept.cumsum(1) - 1, k)  # among the kept; k: nowhere
    values = v.new_zeros(len(v), k + 1).scatter_(1, place, v)[:, :k]
    decoded = torch.nn.functional.pad(quantized(values.contiguous(), compressor), (0, 1))
    return decoded.gather(1, place)


def quantized(values: Tensor, compressor: Cocktail) -> Tensor:
    """Quantize the rows of values (N, k) and compute what their codes mean."""
    bits, bucket, count = compressor.quant_bits, compressor.quant_bucket_size, values.shape[1]
    if bits == 32:
        return values
    rows = torch.nn.functional.pad(values, (0, -count % bucket)).unflatten(1, (-1, bucket))  # (N, b, bucket)
    if bits == 16:
        scale = bf16(rows.abs().amax(2) / 32767, up=True)[..., None]
        places = torch.floor(rows * inverse(scale) + 0.5).clamp(-32767, 32767)
        return (places * scale).flatten(1)[:, :count]
    looked_at = torch.stack([seen(own, bucket) for own in values]).cpu().numpy()  # the host waits
    many = compiled(count)
    return torch.stack(
        [
            leveled(own, whole, count, plan(few, bits, many, compressor.quant_step), bits)
            for own, whole, few in zip(rows, values, looked_at, strict=True)
        ]
    )


def leveled(rows: Tensor, values: Tensor, count: int, how: Plan, bits: int) -> Tensor:
    """Quantize one vector's buckets (b, bucket) to the nearest levels of its plan, (k,)."""
    magnitudes, bucket = rows.abs(), rows.shape[1]
    scale = magnitudes.amax(1) if how.by_largest else magnitudes.mean(1)
    if not how.by_largest and count % bucket:
        scale[-1] *= bucket / (count % bucket)  # its mean is of the values that are there
    scale = bf16(scale, up=how.by_largest)
    y = magnitudes * inverse(scale)[:, None]
    at = torch.from_numpy(how.levels.at.astype(np.float32)).to(rows.device)
    number = torch.from_numpy(how.levels.by_bin.astype(np.int64)).to(rows.device)

    def nearest(y: Tensor) -> Tensor:
        return number[((y.view(torch.int32) >> SHIFT) - LOWEST).clamp(0, BINS - 1)]

    if bits > 1 and not how.by_largest:  # buckets with an outlier get a scale that serves them better
        worst = (y.amax(1) / at[-1]).clamp(min=1)
        least, factor = torch.full_like(worst, torch.inf), torch.ones_like(worst)
        for power in (0, 1 / 3, 2 / 3, 1):
            wider = worst**power
            there = at[nearest(y / wider[:, None])] * wider[:, None]
            error = ((y - there) / worst[:, None]).square().sum(1)
            factor = torch.where(error < least, wider, factor)
            least = torch.minimum(error, least)
        outlying = (y > float(how.levels.beyond)).any(1)
        wider = torch.where(outlying, bf16(scale * factor, up=False), scale)
        y = torch.where(outlying[:, None], y * (scale * inverse(wider))[:, None], y)
        scale = wider
    table = torch.from_numpy(how.table.astype(np.float32)).to(rows.device)
    found = table[nearest(y)] * (scale * 2.0**-how.unit)[:, None]
    return torch.where(values < 0, -1.0, 1.0) * found.flatten()[:count]


def bf16(x: Tensor, up: bool) -> Tensor:
    """Round numbers of at least 0 to the nearest finite BF16, or the next one up."""
    pattern = (x.contiguous().view(torch.int32) + (0xFFFF if up else 0x8000)) & ~0xFFFF
    return pattern.clamp(max=LARGEST).view(torch.float32)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)
