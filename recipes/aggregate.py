"""What the owner makes of one round's packets: norms that are bounded, and a mean that liars cannot pull far.

    n_i = |u_i|, M = their median          u_i = C[d_i], w_i = its share of the mean
    n_i > REFUSED M: refused by name       at least 3 packets, and M > 0
    s_i = min(1, HELD M / n_i)             below 1: held
    D = e + A(s_1 u_1, ... s_N u_N)        A: the mean sum_i w_i s_i u_i, or a rule that resists more

All of it follows from the packets, their weights and the recipe, so that e is replayed to the bit: no clock,
no memory of earlier rounds, no random numbers. What a bound or a rule leaves out is in nobody's residual and
not in e: kept, a lie would only come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from compress import PacketError, Update, decode, pieces

FEWEST = 3  # packets that have a median which one liar cannot move
HELD = 2.0  # x the median norm: what is longer is shortened to it
REFUSED = 20.0  # x the median norm: no honest residual grows to it (LOG.md)
ROUNDS = 3  # of centred clipping
AT_ONCE = 1 << 20  # values of all peers together that a rule over coordinates looks at


class RejectedUpdate(Exception):
    """The packet of one peer cannot be used."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"the update of {peer} is refused: {reason}")
        self.peer, self.reason = peer, reason


@dataclass(frozen=True)
class Rule:
    """A: how one update is made of many."""

    kind: Literal["mean", "trimmed_mean", "median", "centered_clip"] = "mean"
    trim: float = 0.2  # trimmed_mean: the share of a coordinate's values that goes, at either end
    radius: float = 1.0  # centered_clip: x the median distance from the centre
    held: float = HELD
    refused: float = REFUSED


MEAN = Rule()
OPEN = Rule(held=float("inf"), refused=float("inf"))  # everybody is trusted: for measurements and tests


@dataclass(frozen=True)
class Taken:
    """One peer's packet, as the owner takes it."""

    peer: str
    packet: bytes
    share: float  # w_i; those of a round add up to 1
    norm: float  # n_i
    median: float = 0.0  # M, where it is held
    scale: float = 1.0  # s_i

    @property
    def why(self) -> str:
        """Why it is held, for people."""
        return f"its norm {self.norm:.3g} is more than {HELD:g} times the round's median {self.median:.3g}"


@dataclass(frozen=True)
class Collected:
    D: Tensor  # (m,)
    held: tuple[Taken, ...]  # whose packets were shortened


def collect(error: Tensor, updates: Sequence[tuple[str, bytes, float]], rule: Rule) -> Collected:
    """Algorithm 2, line 3: D on the round's sample.

    Args:
        error: (m,) e on the sample; it is not changed.
        updates: (peer, packet, weight); weights are normalised to 1, all zero counts as all equal.

    Raises:
        RejectedUpdate: a packet does not decode, is not finite, or is far too long. One at a time: call again
            without that peer.
    """
    m, total, taken = len(error), sum(weight for _, _, weight in updates), list[Taken]()
    D = error.clone()
    # by peer, never by arrival: float sums depend on order
    for peer, packet, weight in sorted(updates):
        share = weight / total if total > 0 else 1 / len(updates)
        update = decoded(peer, packet, m)
        taken.append(Taken(peer, packet, share, norm_of(peer, update)))
        D.index_add_(0, update.positions.long(), update.values, alpha=share)  # as if nobody lied
    taken = bounded(taken, rule)
    held = tuple(t for t in taken if t.scale < 1)
    if held or rule.kind != "mean":
        D = error + RULES[rule.kind](taken, m, rule)
    return Collected(D, held)


def decoded(peer: str, packet: bytes, m: int) -> Update:
    """Raises RejectedUpdate."""
    try:
        update = decode(packet, m)
    except PacketError as error:
        raise RejectedUpdate(peer, str(error)) from error
    if not bool(torch.isfinite(update.values).all()):
        raise RejectedUpdate(peer, "it holds values that are not finite")
    return update


# ---- norms -------------------------------------------------------------------------------------------------


def norm_of(peer: str, update: Update) -> float:
    """The Euclidean norm. Raises RejectedUpdate where float32, in which sums are made, cannot hold it."""
    norm = rounded(length(update.values.numpy()))
    if not np.isfinite(norm):
        raise RejectedUpdate(peer, "its values are finite and their norm is not: it overflows")
    return norm


def median_of(norms: Sequence[float]) -> float:
    """The lower of the middle two, so one that was sent. While fewer than half of the peers lie it is between
    two honest ones: 1 of 3, 2 of 5, 4 of 10.
    """
    return sorted(norms)[(len(norms) - 1) // 2]


def bounded(taken: list[Taken], rule: Rule) -> list[Taken]:
    """Norms against their median. Where that is 0 most have sent nothing: nobody is refused, and what the
    others sent is held to nothing.
    """
    if len(taken) < FEWEST:
        return taken
    median, longest = median_of([t.norm for t in taken]), max(taken, key=lambda t: t.norm)
    if median > 0 and longest.norm > rule.refused * median:
        what = f"its norm {longest.norm:.3g} is more than {rule.refused:g} times {median:.3g}"
        raise RejectedUpdate(longest.peer, f"{what}, the median of the round's {len(taken)} packets")
    limit = rule.held * median
    return [replace(t, median=median, scale=rounded(limit / t.norm)) if t.norm > limit else t for t in taken]


def length(values: np.ndarray) -> float:
    """In float64, where the squares of float32 cannot overflow."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def rounded(value: float) -> float:
    """As float32: float64 sums that differ in their last bits, as between machines, are then equal."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


# ---- rules -------------------------------------------------------------------------------------------------


def mean(taken: list[Taken], m: int, rule: Rule) -> Tensor:
    """sum_i w_i s_i u_i."""
    out = torch.zeros(m)
    for t in taken:
        update = decoded(t.peer, t.packet, m)
        out.index_add_(0, update.positions.long(), update.values, alpha=t.share * t.scale)
    return out


def centered_clip(taken: list[Taken], m: int, rule: Rule) -> Tensor:
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
        for t, clip in zip(taken, clips, strict=True):
            update = decoded(t.peer, t.packet, m)
            v.index_add_(0, update.positions.long(), update.values, alpha=t.share * t.scale * clip)
    return v


def distance(t: Taken, v: Tensor) -> float:
    """|s_i u_i - v|, without the dense vector of it."""
    update = decoded(t.peer, t.packet, len(v))
    there = v[update.positions.long()].numpy()
    square = (
        length(v.numpy()) ** 2 - length(there) ** 2 + length(t.scale * update.values.numpy() - there) ** 2
    )
    return rounded(max(square, 0.0) ** 0.5)


def trimmed_mean(taken: list[Taken], m: int, rule: Rule) -> Tensor:
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


def median(taken: list[Taken], m: int, rule: Rule) -> Tensor:
    """The trimmed mean that leaves one value, or two."""
    return trimmed_mean(taken, m, replace(rule, trim=0.5))


class Windows:
    """A packet's values, window after window of its coordinates: what is decoded at a time is bounded."""

    def __init__(self, t: Taken, m: int, wide: int) -> None:
        self.scale, self.wide = t.scale, wide
        self.pieces: Iterator[Update] = pieces(memoryview(t.packet), m, wide)
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
