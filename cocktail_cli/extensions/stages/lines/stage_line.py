"""One end of a line between two neighbouring stages: each message once, whole and in order, both ways.

Each direction is a stream of bytes, in which a message is its head and its body. No socket, no clock.

    Part     bytes of the stream, from `at` on
    State    how far this end has the other's stream and has sent its own; each PING_S, and as an answer

Connections come and go while the streams go on: what was not acknowledged is sent again. Each frame has a
digest of its bytes, so a damaged one is a lost one. As frames of a connection arrive in order, a gap shows a
loss, and so does a State that names more than is here. An end that was started again has another `life`:
nothing of what was under way is delivered to it, and the caller is told, as the step is void.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.protocol import ProtocolError, messages
from transport.wire import Frames

Kind = Literal["activations", "gradients", "mismatch", "request"]
KINDS: tuple[Kind, ...] = ("activations", "gradients", "mismatch", "request")
FORWARD = ("activations", "request")  # kinds that go to the next stage; all else goes to the one before
HEAD = struct.Struct("<QBIQ")  # step, kind, micro-batch, bytes of the body
DIGEST = 8  # bytes, before each frame's head
LIFE = 8  # bytes
FRAGMENT = 64 * 1024  # bytes of a Part: 5 ms at 100 Mbit/s
WINDOW = 8 << 20  # bytes sent and not acknowledged: 1 Gbit/s at 60 ms
ACK = 512 * 1024  # bytes after which a State is due, within a message
PING_S = 1.0
QUIET_S = 4.0  # without a frame: the connection is dead
GONE_S = 10.0  # without a frame on any connection: so is the neighbour

Position = messages.Count
Life = Annotated[bytes, Meta(max_length=LIFE)]


@dataclass(frozen=True)
class StageMessage:
    """A message to the next stage (activations, requests) or to the one before."""

    step: int  # counts up; messages of earlier steps come too late
    kind: Kind  # a request is the head's, to all stages of its replica
    micro_batch: int
    body: bytes


@dataclass(frozen=True)
class LineLost:
    """A neighbour is silent, and is dialled and waited for still; or it was started again, and knows nothing
    of the step."""

    why: str


RENEWED = LineLost("begins anew")


class Part(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bytes of the sender's stream; the second frame."""

    life: Life  # the sender's
    knows: Life  # the receiver's: one that was started again takes nothing of before
    at: Position


class State(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The positions of both streams at one end: the first frame of a connection, and an acknowledgement."""

    life: Life  # the sender's
    knows: Life  # the receiver's, which all below is about; empty: not known yet
    here: Position  # bytes of the other's stream that have arrived
    until: Position  # no more of it is taken yet
    sent: Position  # bytes of its own stream that were sent before this
    before: bool  # its sender is the stage before
    again: bool = False  # bytes before the receiver's `sent` are lost: from `here` on, again


_FRAME = msgspec.msgpack.Decoder(Part | State)


def pack(head: Part | State, payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """Write a frame with its digest."""
    written = msgspec.msgpack.encode(head)
    first = _digest(written, payload) + written
    return [first, payload] if isinstance(head, Part) else [first]


def unpack(frames: Frames) -> tuple[Part | State, bytes | memoryview] | None:
    """Reverse `pack`; None: damaged."""
    if not 1 <= len(frames) <= 2 or len(frames[0]) > messages.MAX_CONTROL:
        return None
    written, payload = bytes(frames[0]), frames[1] if len(frames) == 2 else b""
    if _digest(written[DIGEST:], payload) != written[:DIGEST]:
        return None
    try:
        head = _FRAME.decode(written[DIGEST:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return head, payload


def _digest(head: bytes, payload: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(head, digest_size=DIGEST)
    found.update(payload)
    return found.digest()


class StageLine:
    """One end of a line.

    Args:
        life: random bytes, new at each start of the process.
        before: this end is the stage before, which sends activations.
        limit: bytes of the longest message that the neighbour may send.
    """

    def __init__(self, life: bytes, before: bool, limit: int, now: float, gone_s: float = GONE_S) -> None:
        self.life, self.before, self.limit, self.gone_s = life, before, limit, gone_s
        self.open = False  # a connection is there
        self.resent = 0  # bytes sent more than once
        self._heard = self._opened = now
        self._pinged = now - PING_S
        self._said_gone = False
        self._forget()

    def _forget(self) -> None:
        """Begin both streams."""
        self._knows = b""
        self._out: deque[bytes] = deque()  # messages not acknowledged, the first at `_base`
        self._base = self._acknowledged = self._sent = self._furthest = 0  # positions in the own stream
        self._until = FRAGMENT  # credit
        self._in = bytearray()  # a message on its way
        self._here = self._told = self._taken = (
            0  # in the neighbour's: arrived, last said so, taken by the caller
        )
        self._asks, self._asked_at = False, -inf  # for what was lost; when last, -inf: it has come
        self._owed = False  # a State

    # ---- the caller's side ---------------------------------------------------------------------------------

    def send(self, message: StageMessage) -> None:
        """Append a message to the stream."""
        head = HEAD.pack(message.step, KINDS.index(message.kind), message.micro_batch, len(message.body))
        self._out.append(head + message.body)

    def took(self, message: StageMessage) -> None:
        """Note that a received message is used up: its bytes are credit for more."""
        self._taken += HEAD.size + len(message.body)
        self._owed = True

    # ---- the connection ------------------------------------------------------------------------------------

    def opened(self, now: float) -> None:
        """Begin a connection: what was not acknowledged is sent again."""
        self.open, self._opened, self._sent = True, now, self._acknowledged
        self._owed, self._asks, self._asked_at = True, False, -inf

    def closed(self) -> None:
        """End the connection; frames of it that come still are not for `receive`."""
        self.open = False

    def is_quiet(self, now: float) -> bool:
        """Tell whether the open connection is dead."""
        return self.open and now - max(self._heard, self._opened) > QUIET_S

    def look(self, now: float) -> list[LineLost]:
        """Return what it is, once, when the neighbour has been silent for too long."""
        if self._said_gone or now - self._heard <= self.gone_s:
            return []
        self._said_gone = True
        return [LineLost(f"has been silent for {now - self._heard:.0f} s")]

    def receive(self, frames: Frames, now: float) -> list[StageMessage | LineLost]:
        """Take a frame of the open connection, and return what is whole now.

        Errors: ProtocolError: the neighbour does not keep to the line's rules.
        """
        found = unpack(frames)
        if found is None:
            return []  # the next frame shows the gap
        head, payload = found
        self._heard, self._said_gone = now, False
        if isinstance(head, Part):
            mine = (head.life, head.knows) == (self._knows, self.life)
            return self._part(head, payload, now) if mine else []
        renewed: list[StageMessage | LineLost] = []
        if head.life != self._knows:
            if self._knows:
                self._forget()
                renewed = [RENEWED]
            self._knows, self._owed = head.life, True
        self._state(head, now)
        return renewed

    def _state(self, head: State, now: float) -> None:
        if head.knows != self.life:
            return
        if head.here > self._furthest:
            raise ProtocolError(f"{head.here:,} bytes are said to be there, {self._furthest:,} were sent")
        self._acknowledged = max(self._acknowledged, head.here)
        self._until = max(self._until, head.until)
        while self._out and self._base + len(self._out[0]) <= self._acknowledged:
            self._base += len(self._out.popleft())
        if head.again:
            self._sent = self._acknowledged
        self._sent = max(self._sent, self._acknowledged)
        if head.sent > self._here and now - self._asked_at > PING_S:
            self._ask(now)

    def _part(self, head: Part, payload: bytes | memoryview, now: float) -> list[StageMessage | LineLost]:
        if head.at > self._here and self._asked_at == -inf:
            self._ask(now)
        new = payload[max(0, self._here - head.at) :] if head.at <= self._here else b""
        if not new or self._here + len(new) > self._taken + self._room:
            return []
        self._asked_at = -inf
        self._in += new
        self._here += len(new)
        self._owed = self._owed or self._here - self._told >= ACK
        return self._whole()

    def _ask(self, now: float) -> None:
        self._asks, self._owed, self._asked_at = True, True, now

    @property
    def _room(self) -> int:
        """Bytes that may wait here: a window beside the longest message."""
        return WINDOW + self.limit + HEAD.size

    def _whole(self) -> list[StageMessage | LineLost]:
        """Cut the messages that are whole off the stream."""
        found: list[StageMessage | LineLost] = []
        while len(self._in) >= HEAD.size:
            step, kind, micro_batch, size = HEAD.unpack_from(self._in)
            if kind >= len(KINDS) or size > self.limit:
                raise ProtocolError(
                    f"a message of kind {kind} of {size:,} bytes, the longest has {self.limit:,}"
                )
            if len(self._in) < HEAD.size + size:
                break
            body = bytes(self._in[HEAD.size : HEAD.size + size])
            del self._in[: HEAD.size + size]
            found.append(StageMessage(step, KINDS[kind], micro_batch, body))
            self._owed = True
        return found

    def next(self, now: float) -> Frames | None:
        """Return the next frame to send, which then counts as sent; None: nothing is to be sent now."""
        if not self.open:
            return None
        if self._owed or now - self._pinged >= PING_S:
            asks, self._asks = self._asks, False
            self._pinged, self._owed, self._told = now, False, self._here
            until = self._taken + self._room
            return pack(State(self.life, self._knows, self._here, until, self._sent, self.before, asks))
        most = min(self._until, self._acknowledged + WINDOW) - self._sent
        start = self._base
        for whole in self._out:
            if self._knows and most > 0 and self._sent < start + len(whole):
                at, inside = self._sent, self._sent - start
                payload = memoryview(whole)[inside : inside + min(FRAGMENT, most)]
                self._sent += len(payload)
                self.resent += max(0, min(self._furthest, self._sent) - at)
                self._furthest = max(self._furthest, self._sent)
                return pack(Part(self.life, self._knows, at), payload)
            start += len(whole)
        return None
