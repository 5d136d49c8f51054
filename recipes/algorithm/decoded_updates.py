"""A round's packets opened as they arrive: checked and measured, so that at its close only their sum is left.

What a packet comes to follows from its bytes alone. So it does not matter when it was opened, on which
thread, or whether it was kept open: where there is no room for that it is opened again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from compress import PackedUpdate, PacketError, Update, decode_packed
from compress.backends import WORTH

CORES = os.cpu_count() or 1
ROOM = 1 << 30  # bytes of a round's packets that are kept open: as a rule 1.5 a value, 12 where it is decoded

T = TypeVar("T")
R = TypeVar("R")


class RejectedUpdate(Exception):
    """The packet of one peer cannot be used."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"the update of {peer} is refused: {reason}")
        self.peer, self.reason = peer, reason


@dataclass(frozen=True)
class DecodedUpdate:
    """A packet that can be used."""

    packet: bytes
    norm: float
    count: int  # of its values
    update: PackedUpdate | Update | None  # None: there was no room for it


class DecodedUpdates:
    """Those of one round, by peer. `open` may be called from several threads.

    Args:
        m: length of the round's sample.
        room: bytes that may be kept open; each call holds one packet beside them. None: ROOM.
    """

    def __init__(self, m: int, room: int | None = None) -> None:
        self.m, self._room = m, ROOM if room is None else room
        self._opened: dict[str, DecodedUpdate] = {}
        self._lock = threading.Lock()

    def open(self, peer: str, packet: bytes) -> DecodedUpdate:
        """What was found when it arrived, or is found now. Raises RejectedUpdate."""
        known = self._opened.get(peer)
        if known is not None and known.packet == packet:
            return known
        update = usable(peer, packet, self.m)
        opened = DecodedUpdate(packet, norm_of(peer, update), update.count, update)
        with self._lock:
            self._room += held_by(self._opened.pop(peer, None))  # a round that opens again has new packets
            if held_by(opened) > self._room:
                opened = replace(opened, update=None)
            self._room -= held_by(opened)
            self._opened[peer] = opened
        return opened


def held_by(opened: DecodedUpdate | None) -> int:
    """Bytes of what is kept open."""
    return 0 if opened is None or opened.update is None else opened.update.nbytes


def usable(peer: str, packet: bytes, m: int) -> PackedUpdate | Update:
    """Its values are finite: that is for `compress` to see. Raises RejectedUpdate."""
    try:
        return decode_packed(packet, m)
    except PacketError as error:
        raise RejectedUpdate(peer, str(error)) from error


def norm_of(peer: str, update: PackedUpdate | Update) -> float:
    """The Euclidean norm. Raises RejectedUpdate where float32, in which sums are made, cannot hold it."""
    norm = rounded(update.norm())
    if not np.isfinite(norm):
        raise RejectedUpdate(peer, "its values are finite and their norm is not: it overflows")
    return norm


def length(values: np.ndarray) -> float:
    """In float64, where the squares of float32 cannot overflow."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def rounded(value: float) -> float:
    """As float32: float64 sums that differ in their last bits, as between machines, are then equal."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def on_all_cores(function: Callable[[T], R], items: Iterable[T], m: int) -> list[R]:
    """`function` of each item, in their order; so the first error is the same on any number of cores. `m`:
    length of the vectors it works on; short ones are not worth a thread.
    """
    if CORES == 1 or m < WORTH:
        return [function(item) for item in items]
    with ThreadPoolExecutor(CORES, "cocktail-owner") as pool:
        return list(pool.map(function, items))
