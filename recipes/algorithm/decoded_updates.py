"""A round's packets: cut into shards, decoded, checked and measured once, on arrival.

Decoding is pure, so packets are decoded on any thread and cached within a budget; what has no room in it is
decoded again at the close of the round, with the same result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from compress import PackedUpdate, PacketError, Update, decode_packed, join, split
from compress.backends import WORTH
from recipes.hardware import usable_cores

CORES = usable_cores()
ROOM = 1 << 30  # bytes of a round's decoded packets: as a rule 1.5 a value, 12 where it is an `Update`

T = TypeVar("T")
R = TypeVar("R")

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
        return checked(self.peer, self.packet, m) if self.update is None else self.update

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
        parts = cut(peer, packet, self.shards) if self.samples else []
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


def cut(peer: str, packet: bytes, shards: int) -> list[bytes]:
    """Cut a packet into those of its shards. Raises RejectedUpdate."""
    try:
        return split(packet, shards)
    except PacketError as error:
        raise RejectedUpdate(peer, str(error)) from error


def checked(peer: str, packet: bytes, m: int) -> PackedUpdate | Update:
    """Decode one shard's packet; `compress` sees to it that values are finite. Raises RejectedUpdate."""
    try:
        return decode_packed(packet, m)
    except PacketError as error:
        raise RejectedUpdate(peer, str(error)) from error


def measured(peer: str, packet: bytes, m: int) -> WeightedUpdate:
    """Decode one shard's packet and take its norm. Raises RejectedUpdate where float32, in which sums are
    made, cannot hold the norm."""
    update = checked(peer, packet, m)
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


# ---- packets of several shards -----------------------------------------------------------------------------


def select_shards(packet: bytes, numbers: Collection[int], shards: int) -> bytes:
    """Cut a packet of all shards down to these. Raises PacketError."""
    parts = split(packet, shards)
    return join([part if number in numbers else b"" for number, part in enumerate(parts)])
