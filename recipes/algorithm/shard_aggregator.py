"""The owners of some shards of a vector, as one: a round's packets in, the packet of these shards out.

Who owns what may change between two rounds: `own`. What e of a shard was then goes to its next owner, as a
legacy goes that has all of the mean (`inherit` with share 1); its momentum begins anew. An aggregate that was
not committed is taken back: `undo`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from compress import Cocktail, PacketError, decode, decode_packed, join, split
from recipes.config import PLAIN, Outer, Recipe, outer_of
from recipes.weight_files import float32_header, write_safetensors

from .adaptive_rate import AdaptiveRate, adaptive_rate_of, fixed_rate
from .cocktail_sgd import ShardAggregator, compressor_of, handoff_compressor
from .decoded_updates import ROOM, RejectedUpdate
from .robust_mean import MEAN, AggregateStep, Rule, WeightedUpdate, rule_of

Updates = Sequence[tuple[str, bytes, float]]  # (peer, packet, weight)
# Told, before an aggregate changes any e, what they come from; gives what waits until that is kept.
Keep = Callable[[Mapping[int, AggregateStep]], Callable[[], object]]
ERROR, MOMENTUM = "error", "momentum"  # e and v, in a file


def unlogged(found: Mapping[int, AggregateStep]) -> Callable[[], object]:
    """Nobody keeps it."""
    return lambda: None


class Aggregator:
    """As an `Owner`, of those shards that are owned here, until `own` says otherwise.

    Args:
        parameters: P, the length of the vector.
        mix: how it is cut, and each D compressed.
        seed: of the run.
        rule: what takes the place of the mean where peers may lie.
        outer: what is made of the mean.
        fill: how rich the packets may be; None: as the mix says.
    """

    def __init__(
        self,
        parameters: int,
        mix: Cocktail,
        seed: int,
        rule: Rule = MEAN,
        owned: Collection[int] | None = None,  # None: all
        outer: Outer = PLAIN,
        fill: AdaptiveRate | None = None,
    ) -> None:
        self.mix, self.rule, self.outer = mix, rule, outer
        self.rate = fill or fixed_rate(mix)
        self._fits = 0.0  # bytes a coordinate
        self.shards = mix.cut(parameters, seed)
        self.owners: Mapping[
            int, ShardAggregator
        ] = {}  # by the number of the shard, ascending; replaced, not changed
        self.own(range(len(self.shards)) if owned is None else owned)

    def own(self, numbers: Collection[int]) -> bytes:
        """From now on these shards are owned here, and no others. Returns the e of those that were, to be
        inherited; empty: nothing is in it.
        """
        exact = replace(handoff_compressor(self.mix, 1.0), quant_bits=32)
        given = [b""] * len(self.shards)
        for number, owner in self.owners.items():
            if number not in numbers and bool(owner.error.any()):
                given[number] = exact.encode(owner.error).packet
        self.owners = {n: self.owners.get(n) or self._new(n) for n in sorted(numbers)}
        return join(given) if any(given) else b""

    def _new(self, number: int) -> ShardAggregator:
        shard = self.shards[number]
        room = ROOM // len(self.shards)
        owner = ShardAggregator(shard.size, self.mix, shard.seed, self.rule, room, self.outer)
        owner.usual = float("inf")  # until it has seen a round, what is handed over is taken as it is
        return owner

    @property
    def held(self) -> tuple[WeightedUpdate, ...]:
        """Whose packets the newest aggregate has only in part, each once: where it was held first."""
        found: dict[str, WeightedUpdate] = {}
        for owner in self.owners.values():
            for taken in owner.held:
                found.setdefault(taken.peer, taken)
        return tuple(found.values())

    @property
    def nbytes(self) -> int:
        """Of all e, and of the momenta."""
        return sum(owner.error.nbytes + owner.momentum.nbytes for owner in self.owners.values())

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """As `Owner.arrived`."""
        with contextlib.suppress(RejectedUpdate):
            owners = self.owners  # another thread may take shards over meanwhile
            for number, [(_, part, _)] in self._cut([(peer, packet, 0.0)], owners).items():
                owners[number].arrived(round, peer, part)

    def aggregate(self, round: int, updates: Updates, keep: Keep = unlogged) -> bytes:
        """As `Owner.aggregate`. All lines 3 come first: where a packet is refused, no e has moved, and `keep`
        was told nothing."""
        parts = self._cut(updates)
        found = {number: owner.collect(round, parts[number]) for number, owner in self.owners.items()}
        kept = keep(found)
        self.rate = self.rate.within(self._fits)
        mix = self.rate.mixed(self.mix)
        sent = {number: self.owners[number].encode(round, one, mix) for number, one in found.items()}
        kept()
        for number, one in sent.items():
            self.owners[number].send(round, found[number], one.update())
        packets = {number: one.packet for number, one in sent.items()}
        if sent and round >= mix.uncompressed_rounds:
            size = sum(self.shards[n].size for n in sent)
            self.rate = self.rate.sent(sum(map(len, packets.values())) / size)
        return join([packets.get(shard.number, b"") for shard in self.shards])

    def fits(self, size: int) -> None:
        """From now on the packet of all shards should have no more bytes than this."""
        self._fits = size / sum(shard.size for shard in self.shards)

    def replay(self, round: int, updates: Updates, packet: bytes) -> None:
        """As `Owner.replay`; what has not moved stays as it is."""
        moved, parts = split(packet, len(self.shards)), self._cut(updates)
        for number, owner in self.owners.items():
            if moved[number]:
                owner.replay(round, parts[number], moved[number])

    def moved_bytes(self, round: int) -> int:
        """How long `written` is, about."""
        return sum(
            4 * owner.sample(round).m * (2 if self.outer.momentum else 1) for owner in self.owners.values()
        )

    def written(self, found: Mapping[int, AggregateStep]) -> list[bytes | memoryview]:
        """What an aggregate makes of e, as a file of safetensors in pieces: for `repeat`."""
        tensors = {name_of(n): moved.D for n, moved in found.items()}
        tensors |= {name_of(n, MOMENTUM): m.momentum for n, m in found.items() if m.momentum is not None}
        told = {
            "usual": " ".join(str(moved.usual) for moved in found.values()),
            "packets": " ".join(str(moved.packets) for moved in found.values()),
        }
        raw = (tensor.view(torch.uint8).numpy().data for tensor in tensors.values())
        return [float32_header(tensors, told), *raw]

    def repeat(self, round: int, written: bytes, packet: bytes) -> None:
        """As `replay`, of what was `written`. Raises ValueError: it is not of these shards."""
        sent = split(packet, len(self.shards))
        try:
            tensors = load(written)
            said = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["__metadata__"]
            usual, packets = said["usual"].split(), said["packets"].split()
            for (number, owner), length, many in zip(self.owners.items(), usual, packets, strict=True):
                v = tensors[name_of(number, MOMENTUM)] if self.outer.momentum else None
                if sent[number]:
                    moved = AggregateStep(tensors[name_of(number)], v, float(length), int(many))
                    owner.send(round, moved, decode_packed(sent[number], owner.sample(round).m))
        except (SafetensorError, KeyError) as problem:
            raise ValueError(f"what round {round} came to is not of these shards: {problem}") from problem

    def undo(self) -> None:
        """The newest aggregate was not committed: every e is what it was before."""
        for owner in self.owners.values():
            owner.undo()

    def settle(self) -> None:
        """The newest aggregate is committed: there is nothing to undo."""
        for owner in self.owners.values():
            owner.settle()

    def inherit(self, peer: str, packet: bytes, share: float) -> float:
        """As `Owner.inherit`, of a packet that may leave shards out; returns the smallest s of a shard."""
        cut = self._cut([(peer, packet, share)])
        parts = [(self.owners[n], part) for n, [(_, part, _)] in cut.items() if part]
        found = [(owner, *owner.legacy(peer, part)) for owner, part in parts]
        for owner, update, scale in found:
            owner.add(update, share, scale)
        return min((scale for _, _, scale in found), default=1.0)

    def save(self, path: Path, round: int, given: int = 0) -> None:
        """Write every e and v as they are before `round`: on the disk whole under that name, or not. `given`:
        what `given_before` is to say of it."""
        kept = {name_of(number): owner.error for number, owner in self.owners.items()}
        if self.outer.momentum:
            kept |= {name_of(n, MOMENTUM): owner.momentum for n, owner in self.owners.items()}
        usual = " ".join(str(owner.usual) for owner in self.owners.values())
        packets = " ".join(str(owner.packets) for owner in self.owners.values())
        told = {"round": str(round), "usual": usual, "packets": packets, "given": str(given)}
        write_safetensors(path, kept, told)

    def load(self, path: Path) -> int:
        """Own the shards that are in the file, each e and v as `save` wrote it; returns the round it is
        before. Errors: ValueError: it is not ours.
        """
        kinds = [ERROR, MOMENTUM] if self.outer.momentum else [ERROR]
        try:
            with safe_open(path, "pt") as file:
                names, said = set(file.keys()), file.metadata()
                there = [n for n in range(len(self.shards)) if name_of(n) in names]
                kept = {n: [file.get_tensor(name_of(n, kind)) for kind in kinds] for n in there}
            round, usual = int(said["round"]), [float(one) for one in said["usual"].split()]
            packets = [int(one) for one in said.get("packets", "1 " * len(usual)).split()]
        except (SafetensorError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} does not hold the owner's error: {problem}") from problem
        if strangers := names - {name_of(number, kind) for number in kept for kind in kinds}:
            raise ValueError(f"{path} has {', '.join(sorted(strangers))}: it is of another number of shards")
        for number, tensors in kept.items():
            want = (self.shards[number].size,)
            for one in tensors:
                if tuple(one.shape) != want or str(one.dtype) != "torch.float32":
                    raise ValueError(f"{path} has {one.dtype} {tuple(one.shape)}, not {want}")
        self.own(kept)
        for (number, tensors), length, many in zip(kept.items(), usual, packets, strict=True):
            owner = self.owners[number]
            for mine, one in zip((owner.error, owner.momentum), tensors, strict=False):
                mine.copy_(one)
            owner.usual, owner.packets = length, many
        return round

    def joined(self, round: int, own: bytes, parts: Sequence[tuple[str, Collection[int], bytes]]) -> bytes:
        """The packet of the whole vector: `own` is of the shards that are owned here, and others have sent
        (owner, its shards, packet) for theirs.

        Raises:
            RejectedUpdate: an owner's packet is not of its shards, or does not decode.
        """
        all_of_them = split(own, len(self.shards))
        for name, numbers, packet in parts:
            for number in numbers:
                all_of_them[number] = self._checked(round, name, number, packet)
        return join(all_of_them)

    def part(self, packet: bytes) -> bytes:
        """What a packet of the whole vector says of the shards that are owned here."""
        return select_shards(packet, self.owners, len(self.shards))

    def _checked(self, round: int, name: str, number: int, packet: bytes) -> bytes:
        shard = self.shards[number]
        try:
            part = split(packet, len(self.shards))[number]
            decode(part, self.mix.walk(shard.size, shard.seed, round).m)
        except PacketError as error:
            raise RejectedUpdate(name, f"as the owner of shard {number}: {error}") from error
        return part

    def _cut(
        self, updates: Updates, owned: Collection[int] | None = None
    ) -> dict[int, list[tuple[str, bytes, float]]]:
        """For each shard that is owned here, its part of every packet. Raises RejectedUpdate."""
        owned = self.owners if owned is None else owned
        of_shards: dict[int, list[tuple[str, bytes, float]]] = {number: [] for number in owned}
        for peer, packet, weight in updates if owned else ():
            try:
                parts = split(packet, len(self.shards))
            except PacketError as error:
                raise RejectedUpdate(peer, str(error)) from error
            for number, updates_of_shard in of_shards.items():
                updates_of_shard.append((peer, parts[number], weight))
        return of_shards


def newest_given(path: Path) -> int:
    """The number with which these errors were saved: of the newest that this owner had given away."""
    with safe_open(path, "pt") as file:
        return int(file.metadata().get("given", 0))


def merge_packets(packets: Iterable[bytes], shards: int) -> bytes:
    """The packets of several owners as that of all their shards. Raises PacketError."""
    parts = [b""] * shards
    for packet in packets:
        parts = [new or old for old, new in zip(parts, split(packet, shards), strict=True)]
    return join(parts)


def name_of(number: int, kind: str = ERROR) -> str:
    """Of a shard's e or v, in a file."""
    return f"{kind}.{number}" if number else kind


def equal_weights(updates: Updates) -> Updates:
    """Where peers count alike, whatever they deliver."""
    return [(peer, packet, 1.0 if weight > 0 else 0.0) for peer, packet, weight in updates]


def aggregator_of(recipe: Recipe, parameters: int, owned: Collection[int] | None = None) -> Aggregator:
    """As a recipe asks for them."""
    compression = recipe.compression
    mix, rule, outer = compressor_of(compression), rule_of(compression), outer_of(compression)
    return Aggregator(
        parameters, mix, recipe.training.seed, rule, owned, outer, adaptive_rate_of(compression)
    )


def shards_in(packet: bytes, shards: int) -> list[int]:
    """The shards of which a packet says something. Raises PacketError."""
    return [number for number, part in enumerate(split(packet, shards)) if part]


def select_shards(packet: bytes, numbers: Collection[int], shards: int) -> bytes:
    """What a packet of all shards says of these. Raises PacketError."""
    parts = split(packet, shards)
    return join([part if number in numbers else b"" for number, part in enumerate(parts)])
