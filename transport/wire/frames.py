"""What a shell needs of the thing that carries frames, and what a message costs on it.

Two things really exist: ZeroMQ (sockets.py) and queues in one process (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transport.protocol import Unreachable

Frames = Sequence[bytes | memoryview]


class SharedPayload(bytes):
    """A payload that goes to many: what a wire makes of it is made once."""

    made: Any = None


class HubWire(Protocol):
    """The hub's end: many connections, each known by a name that the wire gives it, `<key>.<number>` or
    `<key>.<origin>.<number>`."""

    port: int

    def poll(self, timeout: float) -> Sequence[tuple[bytes, Frames]]:
        """(connection, frames) of what has come; waits `timeout` seconds for the first, or for `wake`."""

    def send(self, conn: bytes, frames: Frames) -> bool:
        """False: the connection is closed, or its peer has not read for so long that nothing more fits."""

    def held(self, conn: bytes) -> int:
        """Bytes of this connection in our memory: come and not read, or sent and not taken. 0: not known."""

    def hang_up(self, conn: bytes) -> None:
        """End a connection whose other end does what no peer does; it pays for it when it dials again."""

    def guard(self, now: float, owner: Callable[[bytes], str | None]) -> int:
        """Hang up on those that are nobody's and hold a place or memory, or hold more than is theirs; to be
        called every GUARD_S. `owner` says whose a connection is. How many were refused since the last time.
        """

    def wake(self) -> None:
        """End a `poll`, from any thread."""

    def close(self) -> None: ...


GUARD_S = 0.1  # in which 12 MB come at 1 Gbit/s
MAX_BUFFERED = (
    32 << 20
)  # bytes of one session: four times its credit, as dead connections keep theirs for 8 s


def origin_of(conn: bytes) -> str:
    """Where a connection comes from, as far as one can tell: what is limited is limited for each origin, so
    a crowd from one does not take the place of who comes from another. Empty: not known."""
    parts = conn.split(b".", 2)
    return parts[1].decode() if len(parts) == 3 else ""


def key_of(conn: bytes) -> str:
    """The CURVE key that the other end of a connection has proven to have: it is in the connection's name,
    so nothing that belongs to a connection can be had with another key."""
    return conn.partition(b".")[0].decode()


@dataclass(frozen=True)
class Connected:
    """A dialled flow is connected, its key proven."""

    flow: int


@dataclass(frozen=True)
class Disconnected:
    """A flow ended, or could not be dialled (`error` says why)."""

    flow: int
    error: Unreachable | None


@dataclass(frozen=True)
class Received:
    flow: int
    frames: list[bytes]


class PeerWire(Protocol):
    """A peer's end: flow 0 is control, the others bulk. Each is one connection, dialled anew after a Down."""

    def dial(self, flow: int) -> None:
        """Begin to connect; Up or Down follows within seconds."""

    def hang_up(self, flow: int) -> None:
        """Close a flow at once; no Down follows."""

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]: ...

    def send(self, flow: int, frames: Frames) -> bool:
        """False: nothing more fits, or the flow is not up."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


# CurveZMQ (RFC 26): a frame of n bytes travels as a MESSAGE command of "\x07MESSAGE", an 8-byte nonce and a
# box of 16 bytes of authentication, 1 of flags and the n. ZMTP 3.1 (RFC 37) puts a flag byte and a length
# before it, of 1 byte up to 255 and of 8 beyond.
CURVE_MESSAGE = 8 + 8 + 16 + 1
SHORT = 255


def wire_size(frames: Sequence[bytes | memoryview]) -> int:
    """Bytes of the TCP stream that these frames take, sent over ZMTP 3.1 with CURVE."""
    total = 0
    for frame in frames:
        body = len(frame) + CURVE_MESSAGE
        total += body + (2 if body <= SHORT else 9)
    return total


# The handshake of one connection, DEALER to ROUTER (RFC 26 and RFC 37): a greeting of 64 bytes each; HELLO 2
# + 200 and INITIATE 9 + 292 up; WELCOME 2 + 168 and READY 2 + 65 down. The last two carry the socket types
# and an empty identity.
HANDSHAKE_UP = 64 + 202 + 301
HANDSHAKE_DOWN = 64 + 170 + 67
