"""Measures the line between two machines that may become neighbours. No socket, no clock.

The machine that dials sends and asks for more and more bytes, one direction after the other; the time of a
message, less that of an empty one, is the time of its bytes. So one clock measures all, and the other machine
has no state but a budget. Each also names the bandwidth that it lends, where that is less than the line has.

    Ping     this many bytes are wanted back; the second frame are those that it brings
    Pong     the answer to that of a number; its second frame are the bytes that were wanted
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from math import inf
from typing import Annotated, TypeVar

import msgspec

from transport.protocol import ProtocolError, messages, read_msgpack
from transport.wire import Bandwidth, Frames, wire_size

SIZES = (0, 0, *(1 << power for power in range(15, 20)))  # bytes of one message: in all, 992 KiB each way
BUDGET = 2 << 20  # bytes both ways that a machine moves for one that may measure the line to it
LONG_S = 0.25  # that a message takes: the next is not longer
Rate = Annotated[float, msgspec.Meta(ge=1, le=1e15)]  # bytes a second
PATIENCE_S = 1.0  # for an answer: then the line carries no more than that message in so long


class LineRates(msgspec.Struct, frozen=True, array_like=True):
    """Bytes a second to another machine, and back."""

    there: Rate
    back: Rate


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for an answer that brings so many bytes."""

    number: messages.Count
    wants: messages.Size


class Pong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer a Ping. `up`, `down`: bytes a second that this machine lends; 0: as many as its line has."""

    number: messages.Count
    up: messages.Size
    down: messages.Size


Head = TypeVar("Head", Ping, Pong)


class LineProbe:
    """The end of the machine that dials. Sizes grow in turn, there and back, until one takes long."""

    def __init__(self, lends: Bandwidth) -> None:
        self.done = False
        self._lends, self._theirs = lends, Bandwidth()
        self._wanted = [(size, there) for size in SIZES for there in (True, False)]
        self._under_way: tuple[int, bool] = SIZES[0], True
        self._number, self._sent_at = 0, 0.0
        self._empty = inf  # seconds of an empty message
        self._rates = {True: inf, False: inf}  # there and back, by the longest message

    def next(self, now: float) -> Frames | None:
        """Return the next message to send; None: the line is measured."""
        if not self._wanted:
            self.done = True
            return None
        self._number, self._sent_at = self._number + 1, now
        self._under_way = size, there = self._wanted.pop(0)
        return pack(Ping(self._number, 0 if there else size), size if there else 0)

    def receive(self, frames: Frames, now: float) -> bool:
        """Take an answer; returns whether it is that to the last message."""
        pong, size = unpack(frames, Pong)
        wanted, there = self._under_way
        if pong is None or pong.number != self._number or size != (0 if there else wanted):
            return False
        self._theirs = Bandwidth(pong.up or None, pong.down or None)
        self._took(now - self._sent_at)
        return True

    def look(self, now: float) -> None:
        """End where an answer takes so long that the line is measured by that."""
        if not self.done and now - self._sent_at >= PATIENCE_S:
            self._took(now - self._sent_at)
            self.done = True

    def _took(self, seconds: float) -> None:
        size, there = self._under_way
        if size == 0:
            self._empty = min(self._empty, seconds)
            return
        self._rates[there] = size / max(seconds - self._empty, 1e-6)
        if seconds >= LONG_S:
            self._wanted = [one for one in self._wanted if one[1] != there]

    @property
    def measured(self) -> LineRates | None:
        """Return the rates of the line, as far as both machines lend it; None: it was not measured. A
        direction that was not tried, as the other took too long, counts as that."""
        there, back = self._rates[True], self._rates[False]
        if there == inf:
            return None
        mine, theirs = self._lends, self._theirs
        return LineRates(
            min(there, mine.up or inf, theirs.down or inf),
            min(there if back == inf else back, mine.down or inf, theirs.up or inf),
        )


class ProbeAnswers:
    """The end of the machine that is dialled: answers those that the hub names, within BUDGET each."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # bytes, by key

    def admit(self, keys: Iterable[str]) -> None:
        """Answer these keys from now on, and no others."""
        self._left = {key: self._left.get(key, BUDGET) for key in keys}

    def __contains__(self, key: str) -> bool:
        return self._left.get(key, -1) >= 0

    def answer(self, key: str, frames: Frames, lends: Bandwidth) -> Frames | None:
        """Return the answer to a message; None: it is no Ping, or more than the budget, and then this key is
        answered no more."""
        ping, _ = unpack(frames, Ping)
        if ping is None or key not in self:
            return None
        self._left[key] -= wire_size(frames) + ping.wants
        if key not in self:
            return None
        return pack(Pong(ping.number, int(lends.up or 0), int(lends.down or 0)), ping.wants)


def pack(head: Ping | Pong, size: int) -> Frames:
    """Write a message that brings so many bytes, which no line can make fewer."""
    return [msgspec.msgpack.encode(head), secrets.token_bytes(size)]


def unpack(frames: Frames, kind: type[Head]) -> tuple[Head | None, int]:
    """Read a message, and count the bytes that it brings; None: it is another one."""
    if len(frames) != 2 or len(frames[0]) > messages.MAX_CONTROL:
        return None, 0
    try:
        return read_msgpack(frames[0], kind, "a message of a probe"), len(frames[1])
    except ProtocolError:
        return None, 0
