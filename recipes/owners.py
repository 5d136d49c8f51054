"""The owners of all shards of a vector, as one: a round's packets in, the packet of all shards out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from compress import Cocktail, PacketError, join, split
from recipes.aggregate import MEAN, Rule, Taken
from recipes.cocktail_sgd import Owner
from recipes.opened import ROOM, RejectedUpdate
from recipes.whole import write_whole

Updates = Sequence[tuple[str, bytes, float]]  # (peer, packet, weight)


class Owners:
    """As an `Owner`, of a vector that `mix` cuts into shards. A packet is used in all of them or in none.

    Args:
        parameters: P, the length of the vector.
        mix: how it is cut, and each D compressed.
        seed: of the run.
        rule: what takes the place of the mean where peers may lie.
    """

    def __init__(self, parameters: int, mix: Cocktail, seed: int, rule: Rule = MEAN) -> None:
        room = ROOM // mix.shards
        self.owners = [Owner(shard.size, mix, shard.seed, rule, room) for shard in mix.cut(parameters, seed)]

    @property
    def held(self) -> tuple[Taken, ...]:
        """Whose packets the newest aggregate has only in part, each once: where it was held first."""
        found: dict[str, Taken] = {}
        for owner in self.owners:
            for taken in owner.held:
                found.setdefault(taken.peer, taken)
        return tuple(found.values())

    @property
    def nbytes(self) -> int:
        """Of all e."""
        return sum(owner.error.nbytes for owner in self.owners)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """As `Owner.arrived`."""
        with contextlib.suppress(RejectedUpdate):
            for owner, [(_, part, _)] in zip(self.owners, self._cut([(peer, packet, 0.0)]), strict=True):
                owner.arrived(round, peer, part)

    def aggregate(self, round: int, updates: Updates) -> bytes:
        """As `Owner.aggregate`. All lines 3 come first: where a packet is refused, no e has moved."""
        parts = self._cut(updates)
        found = [owner.collect(round, part) for owner, part in zip(self.owners, parts, strict=True)]
        return join([owner.send(round, one) for owner, one in zip(self.owners, found, strict=True)])

    def replay(self, round: int, updates: Updates, packet: bytes) -> None:
        """As `Owner.replay`; what has not moved stays as it is."""
        moved = split(packet, len(self.owners))
        for owner, part, one in zip(self.owners, self._cut(updates), moved, strict=True):
            if one:
                owner.replay(round, part, one)

    def inherit(self, peer: str, packet: bytes, share: float) -> float:
        """As `Owner.inherit`; returns the smallest s of a shard."""
        parts = [part for [(_, part, _)] in self._cut([(peer, packet, share)])]
        found = [owner.legacy(peer, part) for owner, part in zip(self.owners, parts, strict=True)]
        for owner, (update, scale) in zip(self.owners, found, strict=True):
            owner.add(update, share * scale)
        return min(scale for _, scale in found)

    def save(self, path: Path, round: int) -> None:
        """Write every e as it is before `round`: on the disk whole under that name, or not at all."""
        errors = {name: owner.error for name, owner in zip(self._names(), self.owners, strict=True)}
        usual = " ".join(str(owner.usual) for owner in self.owners)
        write_whole(path, errors, {"round": str(round), "usual": usual})

    def load(self, path: Path) -> int:
        """Every e as `save` wrote it; returns the round it is before. Errors: ValueError: it is not ours."""
        try:
            with safe_open(path, "pt") as file:
                errors, said = [file.get_tensor(name) for name in self._names()], file.metadata()
            round, usual = int(said["round"]), [float(one) for one in said["usual"].split()]
        except (SafetensorError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} does not hold the owner's error: {problem}") from problem
        for owner, error in zip(self.owners, errors, strict=True):
            if error.shape != owner.error.shape or error.dtype != owner.error.dtype:
                want = tuple(owner.error.shape)
                raise ValueError(f"{path} has {error.dtype} {tuple(error.shape)}, not {want}")
        for owner, error, one in zip(self.owners, errors, usual, strict=True):
            owner.error.copy_(error)
            owner.usual = one
        return round

    def _names(self) -> list[str]:
        """Of the tensors of a file."""
        return ["error", *(f"error.{number}" for number in range(1, len(self.owners)))]

    def _cut(self, updates: Updates) -> list[list[tuple[str, bytes, float]]]:
        """For each shard, its part of every packet. Raises RejectedUpdate."""
        of_shards: list[list[tuple[str, bytes, float]]] = [[] for _ in self.owners]
        for peer, packet, weight in updates:
            try:
                parts = split(packet, len(self.owners))
            except PacketError as error:
                raise RejectedUpdate(peer, str(error)) from error
            for updates_of_shard, part in zip(of_shards, parts, strict=True):
                updates_of_shard.append((peer, part, weight))
        return of_shards
