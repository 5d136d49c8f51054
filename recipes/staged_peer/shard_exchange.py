"""Packets that do not pass the head: each machine of a replica exchanges its own shards with the aggregator.

A machine that has a way there sends its part of an update, tells the head its SHA-256, and fetches its shards
of the aggregate. The head reports the digests with its own update. The answers say how fast the other lines
are, as the slowest bounds the size of packets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from compress import join, split

from .ring_request import Answer

IN_FLIGHT = 8  # rounds


class ShardExchange(Protocol):
    """A machine's own way to the aggregator. Packets are of all shards, most of them left out."""

    @property
    def on(self) -> bool:
        """Tell whether the next update may go this way."""

    @property
    def rates(self) -> tuple[int, int]:
        """Return bytes a second up and down of the newest transfers; 0: not known."""

    def send(self, round: int, packet: bytes, shards: Sequence[int], most: int) -> None:
        """Send a part of a round's update and fetch these shards of its aggregate, without waiting; they have
        at most `most` bytes."""

    def fetch(self, round: int) -> bytes:
        """Wait for the shards of a round's aggregate. Raises what has kept them from coming."""


def spread(packet: bytes, numbers: Sequence[int], shards: int) -> bytes:
    """Write the packet of a machine's shards as one of all shards."""
    parts = [b""] * shards
    for number, part in zip(numbers, split(packet, len(numbers)), strict=True):
        parts[number] = part
    return join(parts)


def gather(packet: bytes, numbers: Sequence[int], shards: int) -> bytes:
    """Reverse `spread`. Raises PacketError."""
    parts = split(packet, shards)
    return join([parts[number] for number in numbers])


@dataclass(frozen=True)
class SentParts:
    """A round's update of a replica: which machines have sent their parts, and what is left for the head."""

    stages: dict[int, str]  # stage -> SHA-256 of its part
    shards: tuple[int, ...]  # those that pass the head, its own among them
    share: float  # of the parameters, that these have
    up: float  # bytes of a whole update a second, on the slowest of the other lines; 0: not known
    down: float  # the same of an aggregate


class ReplicaExchange:
    """The exchanges of a replica in flight, as its head knows them.

    Args:
        sizes: parameters of each shard.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._rounds: dict[int, SentParts] = {}

    def note(self, round: int, answers: Sequence[Answer], numbers: Sequence[Sequence[int]]) -> SentParts:
        """Note the answers of all machines, which have the shards `numbers`, to `encode`."""
        stages = {
            stage: answer.values["sent"] for stage, answer in enumerate(answers) if answer.values["sent"]
        }
        shards = tuple(n for stage, has in enumerate(numbers) if stage not in stages for n in has)
        rates = {}
        for way in ("up", "down"):
            known = [(answers[stage].values[way], self._share(numbers[stage])) for stage in stages]
            rates[way] = min((rate / share for rate, share in known if rate), default=0.0)
        parts = SentParts(stages, shards, self._share(shards), **rates)
        kept = {r: one for r, one in self._rounds.items() if r > round - IN_FLIGHT}
        self._rounds = kept | {round: parts}
        return parts

    def of(self, round: int) -> SentParts | None:
        """Return what was noted of a round; None where all of it passes the head."""
        parts = self._rounds.get(round)
        return parts if parts is not None and parts.stages else None

    def _share(self, shards: Sequence[int]) -> float:
        return sum(self._sizes[number] for number in shards) / sum(self._sizes)
