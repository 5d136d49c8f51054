"""The updates of one round, decoded on arrival; their mean, with norms bounded, as liars may not pull it far;
and the outer step along it.

Decoding is pure, so packets are decoded on any thread and cached within a budget; what has no room in it is
decoded again at the close of the round, with the same result.

    n_i = |u_i|, M = their median          u_i = C[d_i], w_i = its share of the mean
    n_i > REFUSED max(M, R sqrt(k_i)): refused by name     at least 3 packets, and M > 0
                                           R: the largest M / sqrt(k) of late, which fades (SELDOM)
    s_i = min(1, HELD M l_i / n_i)         below 1: shortened
    l_i = sqrt(k / k_i), from 1 on         k_i: its values, k: their median; bounded as the recipe bounds K
    u = a A(s_1 u_1, ... s_N u_N)          A: the mean sum_i w_i s_i u_i, or the median, which resists more
                                           a: the outer learning rate, which may be the number of packets
    v <- momentum v + u;  D = u + momentum v + e           without momentum D = u + e

D follows from the packets, their weights and the recipe, so that e is replayed to the bit: no clock, no
memory of earlier rounds, no random numbers. R only decides what is refused, so a replay leaves it out. It is
there for the end of a run: as the learning rate falls to 0 so does M, while a peer that sends once in ten
rounds still has the residual of a higher rate; and for newcomers that are more than those of before, whose
residuals have grown. What a bound or the median leaves out is in no peer's residual and not in e: kept, a lie
would only come later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from compress import PackedUpdate, PacketError, Update, decode_packed, decode_windows, join, split
from compress.backends import WORTH
from recipes.config import Compression
from recipes.hardware import usable_cores

from .compressor import adaptive_rate_of

T = TypeVar("T")
R = TypeVar("R")

# ---- updates, decoded -------------------------------------------------------------------------------------

CORES = usable_cores()
ROOM = 1 << 30  # bytes of a round's decoded packets: as a rule 1.5 a value, 12 where it is an `Update`

# (peer, packet, weight): plain tuples, or transport's WeightedPacket
WeightedPackets = Sequence[tuple[str, bytes, float]]


class RejectedUpdate(Exception):
    """The packet of one peer cannot be used."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"the update of {peer} is refused: {reason}")
        self.peer, self.reason = peer, reason


@dataclass(frozen=True)
class WeightedUpdate:
    """One peer's update of one shard: checked, measured, and weighed."""

    peer: str
    packet: bytes
    norm: float  # n_i
    count: int  # k_i, of its values
    update: PackedUpdate | Update | None = field(compare=False, repr=False)  # None: there was no room for it
    share: float = 0.0  # w_i; those of a round add up to 1
    scale: float = 1.0  # s_i
    median: float = 0.0  # M l_i, where it is shortened
    why: str = ""  # it is shortened

    def decoded(self, m: int) -> PackedUpdate | Update:
        """Return the cached update, or decode it again; m: length of the sample."""
        if self.update is not None:
            return self.update
        with blaming(self.peer):
            return decode_packed(self.packet, m)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached update."""
        return 0 if self.update is None else self.update.nbytes


class DecodedUpdates:
    """The packets of one round, by peer. Thread-safe.

    Args:
        samples: length m of the round's sample, by number of the shard, for the shards to decode.
        shards: of the whole vector.
        room: bytes to keep decoded; each call decodes one shard's packet beside them. None: ROOM.
    """

    def __init__(self, samples: Mapping[int, int], shards: int = 1, room: int | None = None) -> None:
        self.samples, self.shards, self._room = samples, shards, ROOM if room is None else room
        self._decoded: dict[str, tuple[bytes, dict[int, WeightedUpdate]]] = {}
        self._lock = threading.Lock()

    def decode(self, peer: str, packet: bytes) -> Mapping[int, WeightedUpdate]:
        """Decode a packet, or return what was decoded on its arrival. Raises RejectedUpdate."""
        known = self._decoded.get(peer)
        if known is not None and known[0] == packet:
            return known[1]
        with blaming(peer):
            parts = split(packet, self.shards) if self.samples else []
        decoded = dict[int, WeightedUpdate]()
        try:
            for number, m in self.samples.items():
                decoded[number] = self._cached(measured(peer, parts[number], m))
        except RejectedUpdate:
            self._forget(decoded)
            raise
        with self._lock:
            _, replaced = self._decoded.pop(peer, (b"", dict[int, WeightedUpdate]()))
            self._decoded[peer] = packet, decoded
        self._forget(replaced)  # of a round that has opened again
        return decoded

    def _cached(self, update: WeightedUpdate) -> WeightedUpdate:
        """Take room for a decoded update, or drop it where there is none left."""
        with self._lock:
            if update.nbytes > self._room:
                return replace(update, update=None)
            self._room -= update.nbytes
        return update

    def _forget(self, decoded: Mapping[int, WeightedUpdate]) -> None:
        """Give the room of these updates back."""
        with self._lock:
            self._room += sum(update.nbytes for update in decoded.values())

    def weigh(self, packets: WeightedPackets) -> dict[int, list[WeightedUpdate]]:
        """Decode what has not arrived before; list every shard's updates by peer, with their shares.

        Peers are ordered by name, never by arrival: float sums depend on order. Weights are normalised to 1;
        all zero counts as all equal. Raises RejectedUpdate.
        """
        ordered, total = sorted(packets), sum(weight for _, _, weight in packets)
        shares = [weight / total if total > 0 else 1 / len(packets) for _, _, weight in ordered]
        decoded = on_all_cores(lambda one: self.decode(one[0], one[1]), ordered, sum(self.samples.values()))
        both = list(zip(decoded, shares, strict=True))
        return {n: [replace(updates[n], share=share) for updates, share in both] for n in self.samples}


@contextmanager
def blaming(peer: str) -> Iterator[None]:
    """Raise the PacketErrors of this peer's packet as RejectedUpdate."""
    try:
        yield
    except PacketError as error:
        raise RejectedUpdate(peer, str(error)) from error


def measured(peer: str, packet: bytes, m: int) -> WeightedUpdate:
    """Decode one shard's packet and take its norm. Raises RejectedUpdate where float32, in which sums are
    made, cannot hold the norm."""
    with blaming(peer):
        update = decode_packed(packet, m)
    norm = to_float32(update.norm())
    if not np.isfinite(norm):
        raise RejectedUpdate(peer, "its values are finite and their norm is not: it overflows")
    return WeightedUpdate(peer, packet, norm, update.count, update)


def to_float32(value: float) -> float:
    """Round to float32: float64 sums that differ in their last bits between machines are then equal."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def on_all_cores(function: Callable[[T], R], items: Iterable[T], m: int) -> list[R]:
    """Map `function` over items, in their order; so the first error is the same on any number of cores.

    Args:
        m: length of the vectors it works on; short ones are not worth a thread.
    """
    if CORES == 1 or m < WORTH:
        return [function(item) for item in items]
    with ThreadPoolExecutor(CORES, "cocktail-aggregator") as pool:
        return list(pool.map(function, items))


def select_shards(packet: bytes, numbers: Collection[int], shards: int) -> bytes:
    """Cut a packet of all shards down to these. Raises PacketError."""
    parts = split(packet, shards)
    return join([part if number in numbers else b"" for number, part in enumerate(parts)])


# ---- the outer step ----------------------------------------------------------------------------------------

MOST = 8  # packets that are added up; of more it is so many times their mean (LOG.md)


@dataclass(frozen=True)
class OuterOptimizer:
    """The default leaves the mean as it is: D = mean + e."""

    rate: float | Literal["packets"] = 1.0  # packets: their number, up to MOST
    momentum: float = 0.0  # Nesterov's, in the form of torch.optim.SGD

    def rate_of(self, packets: int) -> float:
        """Return the learning rate of a round with so many packets."""
        return float(min(packets, MOST)) if self.rate == "packets" else self.rate

    def peers_share(self, members: int) -> float:
        """Return the share that each peer's optimizer takes of the swarm's learning rate and `adam_beta1`.

        Where the rate is the number of packets it is one over that of the members. So a swarm's step is as
        long whoever comes and goes, and one peer alone trains as if there were no swarm. What others do comes
        late, which is a momentum of its own (Mitliagkas et al., "Asynchrony begets momentum", 2016): the more
        of it there is, the less is to be added.
        """
        return 1 / self.rate_of(members) if self.rate == "packets" else 1.0

    def handoff_weight(self, share: float, packets: int) -> float:
        """Weigh a handoff by a peer whose packets had this share of the mean. A share of 1 is an aggregator's
        e, or of a peer that was alone: both are in steps of the swarm."""
        return share * self.rate_of(packets) if self.rate == "packets" and share < 1 else share

    def step(self, u: Tensor, v: Tensor) -> Tensor:
        """Return u + momentum v, where v, changed in place, has taken u in; u has the rate in it already. All
        are (m,); each product and sum is rounded alone, so that a replay has the same bits."""
        v.mul_(self.momentum).add_(u)
        return (v * self.momentum).add_(u)


PLAIN = OuterOptimizer()


def outer_optimizer_of(compression: Compression) -> OuterOptimizer:
    """Build the outer optimizer that a recipe's `compression` section describes."""
    return OuterOptimizer(compression.outer_learning_rate, compression.outer_momentum)


def one_machine(compression: Compression) -> bool:
    """Are the peers to make the steps of one machine on all samples, at its learning rate?

    They are where packets are added up, and where whole steps are averaged one by one, as by all-reduce. With
    any other rate of the aggregator's the method is a published one, whose peers' optimizers work for
    themselves.
    """
    whole = compression.random_ratio == compression.topk_ratio == compression.local_steps == 1
    mean = compression.outer_learning_rate == 1 and not compression.outer_momentum
    return compression.outer_learning_rate == "packets" or (
        whole and mean and not compression.uncompressed_steps
    )


# ---- the mean ----------------------------------------------------------------------------------------------

FEWEST = 3  # packets that have a median which one liar cannot move
HELD = 2.0  # x the median norm: what is longer is shortened to it
REFUSED = 20.0  # x the median norm: no honest residual grows to it (LOG.md)
SELDOM = 10  # rounds between the updates of a slow peer that is still honest: R fades over SELDOM / (p K)
AT_ONCE = 1 << 20  # values of all peers together that the median looks at


@dataclass(frozen=True)
class Rule:
    """A: how one update is made of many."""

    kind: Literal["mean", "median"] = "mean"
    held: float = HELD
    refused: float = REFUSED
    spread: float = 1.0  # how many times more values an honest packet may have than another


def rule_of(compression: Compression) -> Rule:
    """Build the rule that a recipe's `compression` section describes."""
    return Rule(compression.aggregation, spread=adaptive_rate_of(compression).spread)


MEAN = Rule()
OPEN = Rule(held=float("inf"), refused=float("inf"))  # all peers are trusted: for measurements and tests


@dataclass(frozen=True)
class AggregateStep:
    """The result of a round's packets: D and what it is made with. Line 4 needs no packet again."""

    D: Tensor  # (m,)
    momentum: Tensor | None  # (m,) v on the sample, where there is one
    length: float  # typical absolute value in a packet; inf: not known
    packets: int  # that count for something
    shortened: tuple[WeightedUpdate, ...] = ()

    @property
    def usual(self) -> float:
        """The typical absolute value where one liar does not decide it; inf: he does."""
        return self.length if self.packets >= FEWEST else float("inf")


def collect(
    error: Tensor,
    updates: Sequence[WeightedUpdate],
    rule: Rule,
    outer: OuterOptimizer = PLAIN,
    recent: float = 0.0,
) -> AggregateStep:
    """Compute D = rate A(updates) + e on the round's sample (Algorithm 2, line 3), without momentum.

    Args:
        error: (m,) e on the sample; it is not changed.
        updates: of one shard, by peer (`DecodedUpdates.weigh`).
        recent: R; inf: nothing is refused for its length.

    Raises:
        RejectedUpdate: an update is far too long. One at a time: call again without that peer.
    """
    bound, length = bounded(updates, rule, recent), float("inf")
    if bound:
        # a packet holds the largest of those it was chosen from: over all P coordinates d_i is no longer than
        # the median of n_i / sqrt(k_i) times sqrt(P), about
        length = to_float32(median_of([u.norm / max(u.count, 1) ** 0.5 for u in bound]))
    shortened = tuple(replace(u, update=None) for u in bound if u.scale < 1)
    packets = sum(u.share > 0 for u in bound)
    rate = outer.rate_of(packets)
    if rule.kind == "median":
        D = median(bound, len(error)).mul_(rate).add_(error)
    elif shortened:
        D = add(torch.zeros(len(error)), bound).mul_(rate).add_(error)
    else:
        D = add(error.clone(), [replace(u, share=u.share * rate) for u in bound])
    return AggregateStep(D, None, length, packets, shortened)


def add(out: Tensor, updates: Sequence[WeightedUpdate]) -> Tensor:
    """out += sum_i w_i s_i u_i, each coordinate in the order of the peers. Every core has coordinates of its
    own, so the bits do not depend on the number of cores."""
    for batch in batches(updates):
        decoded = on_all_cores(lambda u: u.decoded(len(out)), batch, len(out))
        parts = [(d, u.share * u.scale) for u, d in zip(batch, decoded, strict=True)]
        on_all_cores(lambda start, p=parts: add_to(out, start, p), range(0, len(out), AT_ONCE), len(out))  # type: ignore[misc]
    return out


def add_to(out: Tensor, start: int, parts: list[tuple[PackedUpdate | Update, float]]) -> None:
    """Add these updates, times their factors, to AT_ONCE coordinates from `start` on."""
    for update, factor in parts:
        update.add_to(out, start, min(start + AT_ONCE, len(out)), factor)


def batches(updates: Sequence[WeightedUpdate]) -> Iterator[list[WeightedUpdate]]:
    """Divide updates, in their order: no batch has more to decode again than there are cores."""
    batch, again = list[WeightedUpdate](), 0
    for update in updates:
        if update.update is None and again == CORES:
            yield batch
            batch, again = [], 0
        batch.append(update)
        again += update.update is None
    yield batch


# ---- norms -------------------------------------------------------------------------------------------------


def median_of(norms: Sequence[float]) -> float:
    """Return the lower of the middle two, so one that was sent. While fewer than half of the peers lie it is
    between two honest ones: 1 of 3, 2 of 5, 4 of 10."""
    return sorted(norms)[(len(norms) - 1) // 2]


def bounded(updates: Sequence[WeightedUpdate], rule: Rule, recent: float = 0.0) -> list[WeightedUpdate]:
    """Bound norms by their median. Where that is 0 most peers have sent nothing: then no peer is refused, and
    what the others sent is shortened to nothing."""
    if len(updates) < FEWEST:
        return list(updates)
    median, longest = median_of([u.norm for u in updates]), max(updates, key=lambda u: u.norm)
    typical = max(median, recent * max(longest.count, 1) ** 0.5)
    if median > 0 and longest.norm > rule.refused * typical:
        what = f"its norm {longest.norm:.3g} is more than {rule.refused:g} times {typical:.3g}"
        raise RejectedUpdate(
            longest.peer, f"{what}, the median of the round's {len(updates)} packets, or of late"
        )
    count = median_of([float(u.count) for u in updates])
    usual = [to_float32(median * leeway(u.count, count, rule.spread)) for u in updates]
    return [
        shorten(u, m, rule.held) if u.norm > rule.held * m else u for u, m in zip(updates, usual, strict=True)
    ]


def shorten(update: WeightedUpdate, median: float, held: float) -> WeightedUpdate:
    """Scale an update to `held` times the median norm."""
    why = f"its norm {update.norm:.3g} is more than {HELD:g} times the round's median {median:.3g}"
    return replace(update, median=median, scale=to_float32(held * median / update.norm), why=why)


def leeway(count: int, usual: float, spread: float) -> float:
    """Return how much longer a packet may be that has fewer values than usual: what it leaves out comes
    later, and what all steps since then agree about has grown."""
    return float(min(max(usual / max(count, 1), 1.0), spread) ** 0.5)


def handoff_scale(peer: str, norm: float, usual: float, recent: float, rule: Rule) -> float:
    """Return s of a handoff that would be `usual` long now, and `recent` lately. Raises RejectedUpdate."""
    if usual > 0 and norm > rule.refused * max(usual, recent):
        what = f"its norm {norm:.3g} is more than {rule.refused:g} times {max(usual, recent):.3g}"
        raise RejectedUpdate(peer, f"{what}, what the round's median packet allows a whole residual")
    return to_float32(rule.held * usual / norm) if norm > rule.held * usual else 1.0


# ---- the median --------------------------------------------------------------------------------------------


def median(updates: Sequence[WeightedUpdate], m: int) -> Tensor:
    """Take the middle coordinate by coordinate: of the n values that were sent for it the middle one, or the
    weighted mean of the middle two, times the weight of all n."""
    out = torch.zeros(m)
    wide = max(AT_ONCE // len(updates), 1)  # coordinates at once
    columns = [Windows(u, m, wide) for u in updates]
    shares = np.array([u.share for u in updates])
    for start in range(0, m, wide):
        sent = np.full((min(wide, m - start), len(updates)), np.nan, np.float32)  # NaN: not sent
        for number, column in enumerate(columns):
            column.fill(sent[:, number], start)
        out[start : start + wide] = torch.from_numpy(middle(sent, shares))
    return out


def middle(sent: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """sent: (coordinates, peers) float32, NaN where a peer sent nothing -> (coordinates,) float32."""
    order = np.argsort(sent, axis=1, kind="stable")  # NaN last; equal values by peer
    values, weights = np.take_along_axis(sent, order, 1), shares[order]
    count = (~np.isnan(sent)).sum(axis=1, keepdims=True)
    cut = np.maximum((count - 1) // 2, 0)
    rank = np.arange(sent.shape[1])
    stays = (rank >= cut) & (rank < count - cut)
    left = (weights * stays).sum(axis=1)
    total = (weights * np.where(stays, values, 0)).sum(axis=1)
    all_of_them = (weights * (rank < count)).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(left > 0, total / left * all_of_them, 0).astype(np.float32)


class Windows:
    """Decode a packet window by window, so that what is decoded at a time is bounded."""

    def __init__(self, u: WeightedUpdate, m: int, wide: int) -> None:
        self.scale = u.scale
        whole = iter([u.update]) if isinstance(u.update, Update) else None
        self.pieces: Iterator[Update] = whole or decode_windows(memoryview(u.packet), m, wide)
        self.left: Update | None = next(self.pieces, None)

    def fill(self, column: np.ndarray, start: int) -> None:
        """Write the window from `start` on into column, (coordinates,); windows come in order, each once."""
        while self.left is not None:
            positions, values = self.left.positions.numpy(), self.left.values.numpy()
            stop = int(np.searchsorted(positions, start + len(column)))
            column[positions[:stop] - start] = values[:stop] * np.float32(self.scale)
            if stop < len(positions):
                later = self.left.positions[stop:], self.left.values[stop:]
                self.left = Update(self.left.size, *later)
                return
            self.left = next(self.pieces, None)
