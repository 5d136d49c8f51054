"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2: the worker's half and the owner's half.

No network, no model, no optimizer: vectors in, packets out. Numbers behind `#` are lines of Algorithm 1 as
recipes/README.md writes them down. Start: x_i = x' = x_0 and e = 0. In round t

    d_i = x_i - x'                                            1     what the swarm has not seen of this peer
    send C[d_i]                                               2
    owner: D = mean_i C[d_i] + e;  e <- D - C[D]              3, 4  Algorithm 2, one owner of the whole vector
    receive C[D]                                              5
    x_i <- x_i - optimizer(g_i) + C[D] - C[d_i]               6     the optimizer's part is finetune.py's
    x'  <- x' + C[D]                                          7

What C leaves out of d_i stays in x_i - x' and is offered again: the worker's error feedback costs no memory.
A peer that leaves hands the largest part of its d_i to the owner, who adds it to e. What the owner does about
peers that lie is in aggregate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress import Cocktail, Sample, Update, decode, fingerprint, fingerprint_after
from compress.kernels import WORTH
from recipes.aggregate import MEAN, Rule, Taken, collect, decoded
from recipes.schema import Compression
from recipes.whole import write_whole


def mix_of(compression: Compression) -> Cocktail:
    """C as a recipe's `compression` section asks for it; `method: none` is plain averaging in FP16."""
    if compression.method == "none":
        return Cocktail(sample=1.0, keep=1.0, bits=16)
    return Cocktail(
        sample=compression.random_ratio,
        keep=compression.topk_ratio,
        bits=compression.quant_bits,
        kind=compression.sample_kind,
        block=compression.block_size,
        bucket=compression.quant_bucket_size,
        stochastic=compression.stochastic_rounding,
    )


def rule_of(compression: Compression) -> Rule:
    """What the owner makes of a round's packets, as a recipe's `compression` section asks for it."""
    return Rule(compression.aggregation, compression.trim_ratio, compression.clip_radius)


def over_all(mix: Cocktail, keep: float) -> Cocktail:
    """C over the whole vector, which keeps this share of it: how a leaver's residual is written."""
    return replace(mix, sample=1.0, keep=keep, kind="block")  # blocks: a unit for each element takes 8 bytes


def rehearse(mix: Cocktail, size: int) -> None:
    """One packet there and back, in vain: where x' has `size` parameters and that is many, the first packet
    on a machine waits seconds for a compiler, and the first of a process for its imports.
    """
    if mix.sample * size >= WORTH:
        x = torch.linspace(-1, 1, 2 * WORTH)
        sample = replace(mix, sample=0.5).draw(len(x), 0, 0)
        packet = mix.encode(sample.difference(x, torch.zeros_like(x)))
        sample.add_(x, decode(packet, sample.m))


@dataclass(frozen=True)
class Part:
    """A packet as what it means: an update of the coordinates one round has sampled."""

    packet: bytes
    sample: Sample
    update: Update  # k values at positions within the sample


class Common:
    """The global model x', its round and its fingerprint. Only committed packets change it (law 1).

    Args:
        vector: (P,) float32, x' of `round`; changed in place.
        mix: what C is; only its sampling matters here, since a packet says its own K and bits.
        seed: of the run; all peers sample the same coordinates from (seed, round).
    """

    def __init__(self, vector: Tensor, mix: Cocktail, seed: int, round: int = 0) -> None:
        self.vector, self.mix, self.seed, self.round = vector, mix, seed, round
        self.fingerprint = fingerprint(vector)

    def sample(self, round: int) -> Sample:
        return self.mix.draw(self.vector.numel(), self.seed, round)

    def apply(self, packet: bytes) -> Part:
        """Line 7 with the packet of `self.round`; the fingerprint follows at the cost of what changed.

        Raises:
            PacketError: the packet does not fit; x' is unchanged.
        """
        sample = self.sample(self.round)
        update = decode(packet, sample.m)
        changed = sample.coordinates(update.positions)
        before = self.vector[changed]
        sample.add_(self.vector, update)  # 7
        self.fingerprint = fingerprint_after(self.fingerprint, changed, before, self.vector[changed])
        self.round += 1
        return Part(packet, sample, update)


class Worker:
    """One peer's half of Algorithm 1 around its local model x_i.

    Args:
        x: (P,) float32, the local model; the optimizer changes it in place between `start` and `finish`.
        common: x'.
        name_at: coordinate -> parameter name, for the error that a non-finite model raises.
        dither: where rounding is stochastic, what tells this peer's noise from the others'.
    """

    def __init__(
        self, x: Tensor, common: Common, name_at: Callable[[int], str] | None = None, dither: int = 0
    ) -> None:
        self.x, self.common, self.name_at, self.dither = x, common, name_at, dither

    def start(self) -> Part:
        """Lines 1 and 2 of the round that x' is at. Reads x and x', changes neither.

        Raises:
            NonFiniteError: d_i holds an infinity or a NaN; names the parameter.
        """
        common = self.common
        sample = common.sample(common.round)
        d = sample.difference(self.x, common.vector)  # 1   (m,)
        seed = self.dither << 64 | common.round
        packet = common.mix.encode(d, self._name_in(sample), seed)  # 2
        return Part(packet, sample, decode(packet, sample.m))

    def finish(self, aggregate: bytes, sent: Part | None) -> None:
        """Lines 5 to 7. `sent` is what `start` gave if the owner took it; None if it came too late.

        A packet that was not taken is simply not subtracted: it stays in x_i - x' (law 3).
        """
        part = self.common.apply(aggregate)  # 5, 7
        part.sample.add_(self.x, part.update)  # 6   + C[D]
        if sent is not None:
            self.take_out(sent)  # 6   - C[d_i]

    def catch_up(self, aggregate: bytes) -> None:
        """A round this peer took no part in: x_i moves along with x', so that d_i stays what it was."""
        self.finish(aggregate, sent=None)

    def take_out(self, sent: Part) -> None:
        """What is in `sent` is somebody else's now: no longer a part of d_i."""
        sent.sample.add_(self.x, sent.update, alpha=-1)

    def legacy(self, room: int, keep: float = 1.0) -> Part | None:
        """C over the whole of d_i, for the owner to inherit: its largest coordinates.

        Args:
            room: bytes; as many coordinates as they hold. None comes back where they hold none, or d_i is 0.
            keep: the largest share of all coordinates that is wanted.

        Raises:
            NonFiniteError: as `start`.
        """
        common, mix = self.common, self.common.mix
        n = common.vector.numel()
        keep = min(keep, max(room, 1) * 8 / (mix.bits * n))  # a first guess: positions cost nothing
        sample = over_all(mix, 1.0).draw(n, common.seed, common.round)
        d = sample.difference(self.x, common.vector)  # (P,)
        if not bool(d.any()):
            return None
        while keep * n >= 1:
            seed = self.dither << 64 | common.round
            packet = over_all(mix, keep).encode(d, self._name_in(sample), seed)
            if len(packet) <= room:
                return Part(packet, sample, decode(packet, sample.m))
            keep *= 0.9 * max(room, 1) / len(packet)  # the fewer there are, the more a position costs
        return None

    def residual_norm(self) -> float:
        """The length of d_i = x_i - x'."""
        return float(torch.dist(self.x, self.common.vector))

    def _name_in(self, sample: Sample) -> Callable[[int], str] | None:
        if self.name_at is None:
            return None
        name_at = self.name_at
        return lambda position: name_at(int(sample.coordinates(torch.tensor([position]))[0]))


class Owner:
    """Algorithm 2: the owner of the whole vector, with its error e.

    Args:
        parameters: P, the length of the vector.
        mix: how D is compressed.
        seed: of the run.
        rule: what takes the place of the mean where peers may lie.
    """

    def __init__(self, parameters: int, mix: Cocktail, seed: int, rule: Rule = MEAN) -> None:
        self.mix, self.seed, self.rule = mix, seed, rule
        self.error = torch.zeros(parameters)  # e   (P,)
        self.held: tuple[Taken, ...] = ()  # whose packets the newest aggregate has only in part

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        """Lines 3 and 4: the packet C[D] of `round`.

        Args:
            updates: (peer, packet, weight); weights are normalised to 1, all zero counts as all equal.

        Raises:
            RejectedUpdate: one packet does not decode, is not finite, or is far longer than the others. e is
                unchanged: call again without that peer.
        """
        sample = self.mix.draw(self.error.numel(), self.seed, round)
        found = collect(sample.take(self.error), updates, self.rule)  # 3
        packet = self.mix.encode(found.D, seed=round)  # 4   C[D]
        self._sent(sample, found.D, packet)
        self.held = found.held
        return packet

    def replay(self, round: int, updates: Sequence[tuple[str, bytes, float]], packet: bytes) -> None:
        """Lines 3 and 4 of a round that is committed as `packet`: e moves as it did then, to the bit.

        The packet is taken as it is. To make it again would need the same encoder to the bit (this machine,
        this many threads), and what was sent is what the packet says in any case.
        """
        sample = self.mix.draw(self.error.numel(), self.seed, round)
        self._sent(sample, collect(sample.take(self.error), updates, self.rule).D, packet)

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """e <- e + share * what a leaver's legacy holds: the swarm's mean has not lost this peer's residual.

        Args:
            packet: of `Worker.legacy`, over the whole vector.
            share: the weight, of 1, that the peer's packets had in the mean.

        Raises:
            RejectedUpdate: it does not decode, or is not finite. e is unchanged.
        """
        update = decoded(peer, packet, self.error.numel())
        self.error.index_add_(0, update.positions.long(), update.values, alpha=share)

    def save(self, path: Path, round: int) -> None:
        """Write e as it is before `round`: on the disk whole under that name, or not at all."""
        write_whole(path, {"error": self.error}, {"round": str(round)})

    def load(self, path: Path) -> int:
        """e as `save` wrote it; returns the round it is before. Errors: ValueError, where it is not ours."""
        try:
            with safe_open(path, "pt") as file:
                error, round = file.get_tensor("error"), int(file.metadata()["round"])
        except (SafetensorError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} does not hold the owner's error: {problem}") from problem
        if error.shape != self.error.shape or error.dtype != self.error.dtype:
            raise ValueError(f"{path} has {error.dtype} {tuple(error.shape)}, not {tuple(self.error.shape)}")
        self.error.copy_(error)
        return round

    def _sent(self, sample: Sample, D: Tensor, packet: bytes) -> None:
        sent = decode(packet, sample.m)
        D.index_add_(0, sent.positions.long(), sent.values, alpha=-1)
        sample.put_(self.error, D)  # 4   e <- D - C[D]


def fold(common: Common, packets: Iterable[bytes]) -> Common:
    """x' after these packets, applied in order: how a joiner, a snapshot and an export come by the model."""
    for packet in packets:
        common.apply(packet)
    return common
