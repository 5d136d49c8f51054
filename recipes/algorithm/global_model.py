"""The global model x' and what a packet says about it. All peers hold the same x', to the bit (law 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from compress import Cocktail, Sample, Shard, Update, decode, fingerprint, fingerprint_after, split


@dataclass(frozen=True)
class ShardUpdate:
    """The update of one shard: values for the coordinates that one round has sampled there."""

    shard: Shard
    sample: Sample
    update: Update  # k values at positions within the sample
    unsent: Tensor | None = None  # (m,) d - C[d] on the sample, where it is to decay

    def add_(self, x: Tensor, alpha: int = 1) -> None:
        """x += alpha * the update, in place; x: (P,)."""
        self.sample.add_(self.shard.of(x), self.update, alpha)


@dataclass(frozen=True)
class DecodedPacket:
    """A decoded packet: one sparse update per shard that moved."""

    packet: bytes
    shard_updates: tuple[ShardUpdate, ...]


class GlobalModel:
    """The global model x', its round and its fingerprint. Only committed packets change it (law 1).

    Args:
        vector: (P,) float32, x' of `round`; changed in place.
        compressor: gives shards and samples; a packet says its own K and q.
        seed: of the run; all peers sample the same coordinates from (seed, round).
    """

    def __init__(self, vector: Tensor, compressor: Cocktail, seed: int, round: int = 0) -> None:
        self.vector, self.compressor, self.seed, self.round = vector, compressor, seed, round
        self.shards = compressor.cut(vector.numel(), seed)
        self.fingerprint = fingerprint(vector)

    def samples(self) -> Iterator[tuple[Shard, Sample]]:
        """Draw the sample of `self.round` for each shard."""
        for shard in self.shards:
            yield shard, self.compressor.draw(shard.size, shard.seed, self.round)

    def apply(self, packet: bytes) -> DecodedPacket:
        """x' <- x' + C[D] (line 7) with the aggregate of `self.round`; the fingerprint follows at the cost of
        what changed.

        Raises:
            PacketError: the packet does not fit; x' is unchanged.
        """
        decoded = decode_packet(packet, self.samples(), len(self.shards))
        for update in decoded.shard_updates:
            x = update.shard.of(self.vector)
            changed = update.sample.coordinates(update.update.positions)
            before = x[changed]
            update.add_(self.vector)  # 7
            start = update.shard.start
            places = changed + start if start else changed
            self.fingerprint = fingerprint_after(self.fingerprint, places, before, x[changed])
        self.round += 1
        return decoded


def decode_packet(packet: bytes, samples: Iterable[tuple[Shard, Sample]], shards: int) -> DecodedPacket:
    """Decode the packet of a vector of so many shards, on these samples. Raises PacketError."""
    cut = zip(samples, split(packet, shards), strict=True)
    moved = tuple(ShardUpdate(shard, s, decode(part, s.m)) for (shard, s), part in cut if part)
    return DecodedPacket(packet, moved)


def fold(model: GlobalModel, packets: Iterable[bytes]) -> GlobalModel:
    """Apply packets in order: how a joiner, a snapshot and an export come by the model."""
    for packet in packets:
        model.apply(packet)
    return model
