"""What the owner makes of one round's packets: norms that are bounded, and a mean that liars cannot pull far.

    n_i = |u_i|, M = their median          u_i = C[d_i], w_i = its share of the mean
    n_i > REFUSED M: refused by name       at least 3 packets, and M > 0
    s_i = min(1, HELD M l_i / n_i)         below 1: held
    l_i = sqrt(k / k_i), from 1 on         k_i: its values, k: their median; bounded as the recipe bounds K
    D = e + a A(s_1 u_1, ... s_N u_N)      A: the mean sum_i w_i s_i u_i, or a rule that resists more
                                           a: the owner's step, which may be the number of packets

All of it follows from the packets, their weights and the recipe, so that e is replayed to the bit: no clock,
no memory of earlier rounds, no random numbers. What a bound or a rule leaves out is in nobody's residual and
not in e: kept, a lie would only come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from compress import PackedUpdate, Update, decode_windows
from recipes.config import PLAIN, Compression, Outer

from .adaptive_rate import adaptive_rate_of
from .decoded_updates import CORES, DecodedUpdates, RejectedUpdate, length, on_all_cores, rounded, usable

FEWEST = 3  # packets that have a median which one liar cannot move
HELD = 2.0  # x the median norm: what is longer is shortened to it
REFUSED = 20.0  # x the median norm: no honest residual grows to it (LOG.md)
ROUNDS = 3  # of centred clipping
AT_ONCE = 1 << 20  # values of all peers together that a rule over coordinates looks at


@dataclass(frozen=True)
class Rule:
    """A: how one update is made of many."""

    kind: Literal["mean", "trimmed_mean", "median", "centered_clip"] = "mean"
    trim: float = 0.2  # trimmed_mean: the share of a coordinate's values that goes, at either end
    radius: float = 1.0  # centered_clip: x the median distance from the centre
    held: float = HELD
    refused: float = REFUSED
    wide: float = 1.0  # how many times more values an honest packet may have than another


def rule_of(compression: Compression) -> Rule:
    """What the owner makes of a round's packets, as a recipe's `compression` section asks for it."""
    wide = adaptive_rate_of(compression).wide
    return Rule(compression.aggregation, compression.trim_ratio, compression.clip_radius, wide=wide)


MEAN = Rule()
OPEN = Rule(held=float("inf"), refused=float("inf"))  # everybody is trusted: for measurements and tests


@dataclass(frozen=True)
class WeightedUpdate:
    """One peer's packet, as the owner takes it."""

    peer: str
    packet: bytes
    share: float  # w_i; those of a round add up to 1
    norm: float  # n_i
    count: int  # of its values
    median: float = 0.0  # M l_i, where it is held
    scale: float = 1.0  # s_i
    # None: not kept open
    update: PackedUpdate | Update | None = field(default=None, compare=False, repr=False)

    def opened(self, m: int) -> PackedUpdate | Update:
        return usable(self.peer, self.packet, m) if self.update is None else self.update

    @property
    def why(self) -> str:
        """Why it is held, for people."""
        return f"its norm {self.norm:.3g} is more than {HELD:g} times the round's median {self.median:.3g}"


@dataclass(frozen=True)
class Collected:
    error: Tensor  # (m,) e as it was given
    D: Tensor  # (m,)
    held: tuple[WeightedUpdate, ...]  # whose packets were shortened
    usual: float  # how large a value is that a usual packet holds; inf: nobody can say
    packets: int  # that count for something


@dataclass(frozen=True)
class AggregateStep:
    """What a round's packets have come to: without C[D], D is e. With it the packets are not needed again."""

    D: Tensor  # (m,)
    momentum: Tensor | None  # (m,) v on the sample, where the owner has one
    usual: float
    packets: int
    held: tuple[WeightedUpdate, ...] = ()
    error: Tensor | None = None  # (m,) e before, where it was read


def collect(
    error: Tensor,
    updates: Sequence[tuple[str, bytes, float]],
    rule: Rule,
    packets: DecodedUpdates | None = None,
    outer: Outer = PLAIN,
) -> Collected:
    """Algorithm 2, line 3: D on the round's sample, with the outer step's rate.

    Args:
        error: (m,) e on the sample; it is not changed.
        updates: (peer, packet, weight); weights are normalised to 1, all zero counts as all equal.
        packets: those that were opened when they arrived.

    Raises:
        RejectedUpdate: a packet does not decode, is not finite, or is far too long. One at a time: call again
            without that peer.
    """
    m, total = len(error), sum(weight for _, _, weight in updates)
    packets = packets or DecodedUpdates(m)

    def take(update: tuple[str, bytes, float]) -> WeightedUpdate:
        peer, packet, weight = update
        share, opened = weight / total if total > 0 else 1 / len(updates), packets.open(peer, packet)
        return WeightedUpdate(peer, packet, share, opened.norm, opened.count, update=opened.update)

    # by peer, never by arrival: float sums depend on order
    taken = bounded(on_all_cores(take, sorted(updates), m), rule)
    held, usual = tuple(replace(t, update=None) for t in taken if t.scale < 1), usual_of(taken)
    many = sum(weight > 0 for _, _, weight in updates) or len(updates)
    rate = outer.rate_of(many)
    if held or rule.kind != "mean":
        D = RULES[rule.kind](taken, m, rule).mul_(rate).add_(error)
    else:
        D = add(error.clone(), [replace(t, share=t.share * rate) for t in taken])
    return Collected(error, D, held, usual, many)


def add(out: Tensor, taken: Sequence[WeightedUpdate]) -> Tensor:
    """out += sum_i w_i s_i u_i, each coordinate in the order of the peers; each core has coordinates of its
    own, so the bits do not depend on how many there are.
    """
    for batch in batches(taken):
        updates = on_all_cores(lambda t: t.opened(len(out)), batch, len(out))
        parts = [(u, t.share * t.scale) for t, u in zip(batch, updates, strict=True)]
        on_all_cores(lambda start, p=parts: add_to(out, start, p), range(0, len(out), AT_ONCE), len(out))  # type: ignore[misc]
    return out


def add_to(out: Tensor, start: int, parts: list[tuple[PackedUpdate | Update, float]]) -> None:
    """What these updates, times their factors, hold for AT_ONCE coordinates from `start` on."""
    for update, factor in parts:
        update.add_to(out, start, min(start + AT_ONCE, len(out)), factor)


def batches(taken: Sequence[WeightedUpdate]) -> Iterator[list[WeightedUpdate]]:
    """In their order, with no more in one that must be opened again than there are cores."""
    batch, again = list[WeightedUpdate](), 0
    for t in taken:
        if t.update is None and again == CORES:
            yield batch
            batch, again = [], 0
        batch.append(t)
        again += t.update is None
    yield batch


# ---- norms -------------------------------------------------------------------------------------------------


def median_of(norms: Sequence[float]) -> float:
    """The lower of the middle two, so one that was sent. While fewer than half of the peers lie it is between
    two honest ones: 1 of 3, 2 of 5, 4 of 10.
    """
    return sorted(norms)[(len(norms) - 1) // 2]


def bounded(taken: list[WeightedUpdate], rule: Rule) -> list[WeightedUpdate]:
    """Norms against their median. Where that is 0 most have sent nothing: nobody is refused, and what the
    others sent is held to nothing.
    """
    if len(taken) < FEWEST:
        return taken
    median, longest = median_of([t.norm for t in taken]), max(taken, key=lambda t: t.norm)
    if median > 0 and longest.norm > rule.refused * median:
        what = f"its norm {longest.norm:.3g} is more than {rule.refused:g} times {median:.3g}"
        raise RejectedUpdate(longest.peer, f"{what}, the median of the round's {len(taken)} packets")
    count = median_of([float(t.count) for t in taken])
    usual = [rounded(median * leeway(t.count, count, rule.wide)) for t in taken]
    return [
        replace(t, median=m, scale=rounded(rule.held * m / t.norm)) if t.norm > rule.held * m else t
        for t, m in zip(taken, usual, strict=True)
    ]


def leeway(count: int, usual: float, wide: float) -> float:
    """How much longer a packet may be that has fewer values than usual: what it leaves out comes later, and
    what all steps since then agree about has grown.
    """
    return min(max(usual / max(count, 1), 1.0), wide) ** 0.5


def usual_of(taken: list[WeightedUpdate]) -> float:
    """The median of n_i / sqrt(k_i), k_i the number of values. A packet holds the largest of those it was
    chosen from, so over all P coordinates d_i is no longer than this times sqrt(P), about.
    """
    if len(taken) < FEWEST:
        return float("inf")
    return rounded(median_of([t.norm / max(t.count, 1) ** 0.5 for t in taken]))


def shortened(peer: str, norm: float, usual: float, rule: Rule) -> float:
    """s of something that would usually be `usual` long. Raises RejectedUpdate."""
    if usual > 0 and norm > rule.refused * usual:
        what = f"its norm {norm:.3g} is more than {rule.refused:g} times {usual:.3g}"
        raise RejectedUpdate(peer, f"{what}, what the round's median packet allows a whole residual")
    return rounded(rule.held * usual / norm) if norm > rule.held * usual else 1.0


# ---- rules -------------------------------------------------------------------------------------------------


def mean(taken: list[WeightedUpdate], m: int, rule: Rule) -> Tensor:
    """sum_i w_i s_i u_i."""
    return add(torch.zeros(m), taken)


def centered_clip(taken: list[WeightedUpdate], m: int, rule: Rule) -> Tensor:
    """Karimireddy et al., 2021, from v = 0, with r the median distance times `radius`:
    v <- v + sum_i w_i min(1, r / |s_i u_i - v|) (s_i u_i - v).

    The paper starts from the aggregate before. That one visited other coordinates: it is 0 on this sample.
    """
    v = torch.zeros(m)
    for _ in range(ROUNDS):
        distances = [distance(t, v) for t in taken]
        reach = rule.radius * median_of(distances)
        clips = [rounded(min(1.0, reach / d)) if d > 0 else 1.0 for d in distances]
        v = v * (1 - sum(t.share * clip for t, clip in zip(taken, clips, strict=True)))
        clipped = zip(taken, clips, strict=True)
        add(v, [replace(t, share=t.share * t.scale * clip, scale=1.0) for t, clip in clipped])
    return v


def distance(t: WeightedUpdate, v: Tensor) -> float:
    """|s_i u_i - v|, without the dense vector of it."""
    update = t.opened(len(v)).decoded()
    there = v[update.positions.long()].numpy()
    square = (
        length(v.numpy()) ** 2 - length(there) ** 2 + length(t.scale * update.values.numpy() - there) ** 2
    )
    return rounded(max(square, 0.0) ** 0.5)


def trimmed_mean(taken: list[WeightedUpdate], m: int, rule: Rule) -> Tensor:
    """Coordinate by coordinate, of the n values that were sent for it: the weighted mean without the
    ceil(trim n) largest and as many smallest, times the weight of all n.

    At least one value (two of an even n) stays; of one or two values none goes.
    """
    out = torch.zeros(m)
    wide = max(AT_ONCE // len(taken), 1)  # coordinates at once
    parts = [Windows(t, m, wide) for t in taken]
    shares = np.array([t.share for t in taken])
    for start in range(0, m, wide):
        sent = np.full((min(wide, m - start), len(taken)), np.nan, np.float32)  # NaN: not sent
        for column, part in enumerate(parts):
            part.fill(sent[:, column], start)
        out[start : start + wide] = torch.from_numpy(trimmed(sent, shares, rule.trim))
    return out


def trimmed(sent: np.ndarray, shares: np.ndarray, trim: float) -> np.ndarray:
    """sent: (coordinates, peers) float32, NaN where a peer sent nothing -> (coordinates,) float32."""
    order = np.argsort(sent, axis=1, kind="stable")  # NaN last; equal values by peer
    values, weights = np.take_along_axis(sent, order, 1), shares[order]
    count = (~np.isnan(sent)).sum(axis=1, keepdims=True)
    cut = np.maximum(np.minimum(np.ceil(trim * count), (count - 1) // 2), 0)
    rank = np.arange(sent.shape[1])
    stays = (rank >= cut) & (rank < count - cut)
    left = (weights * stays).sum(axis=1)
    total = (weights * np.where(stays, values, 0)).sum(axis=1)
    all_of_them = (weights * (rank < count)).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(left > 0, total / left * all_of_them, 0).astype(np.float32)


def median(taken: list[WeightedUpdate], m: int, rule: Rule) -> Tensor:
    """The trimmed mean that leaves one value, or two."""
    return trimmed_mean(taken, m, replace(rule, trim=0.5))


class Windows:
    """A packet's values, window after window of its coordinates: what is decoded at a time is bounded."""

    def __init__(self, t: WeightedUpdate, m: int, wide: int) -> None:
        self.scale, self.wide = t.scale, wide
        whole = iter([t.update]) if isinstance(t.update, Update) else None
        self.pieces: Iterator[Update] = whole or decode_windows(memoryview(t.packet), m, wide)
        self.left: Update | None = next(self.pieces, None)

    def fill(self, column: np.ndarray, start: int) -> None:
        """column: (coordinates,) from `start` on; windows come in their order, each once."""
        while self.left is not None:
            positions, values = self.left.positions.numpy(), self.left.values.numpy()
            here = int(np.searchsorted(positions, start + len(column)))
            column[positions[:here] - start] = values[:here] * np.float32(self.scale)
            if here < len(positions):
                rest = slice(here, None)
                self.left = Update(self.left.size, self.left.positions[rest], self.left.values[rest])
                return
            self.left = next(self.pieces, None)


RULES = {"mean": mean, "trimmed_mean": trimmed_mean, "median": median, "centered_clip": centered_clip}
