"""The interface of a wire that carries frames.

There are two implementations: ZeroMQ (zeromq_sockets.py) and queues in one process (memory_sockets.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transport.protocol import ProtocolError, Route, Unreachable

Frames = Sequence[bytes | memoryview]


class SharedPayload(bytes):
    """A payload sent to many peers: the wire's own form of it is made once."""

    made: Any = None


@dataclass(frozen=True)
class Crossed:
    """Bytes of a connection as the hub's system has counted them at the last `guard`. Times are monotonic."""

    received_at: float  # bytes have last come, parts of messages included
    acknowledged_at: float  # the system of the other end has last acknowledged bytes
    partly: int  # bytes that came of a message that is not whole
    unacknowledged: int  # bytes sent
    caught_up_at: float  # the system of the other end had last acknowledged all that was sent
    acknowledged: int  # bytes, since then
    is_peers: bool  # the other end is the peer's machine; what leads here is on the loopback


class Guarded(NamedTuple):
    """The result of a look at all connections."""

    closed: int  # connections, since the last look
    held: int  # bytes for newcomers, at most


class HubWire(Protocol):
    """The hub's end. The wire names each connection `<key>.<number>` or `<key>.<origin>.<number>`."""

    port: int

    def poll(self, timeout: float) -> Sequence[tuple[bytes, Frames]]:
        """Return (connection, frames) of the messages received; wait `timeout` seconds, or for `wake`."""

    def send(self, conn: bytes, frames: Frames) -> bool:
        """Send a message; returns False if the connection is closed, or its queue full."""

    def held(self, conn: bytes) -> int:
        """Count bytes held for a connection: not read, or sent and not acknowledged. 0: not known."""

    def crossed(self, conn: bytes) -> Crossed | None:
        """Return what has crossed a connection; None: the system does not tell."""

    def hang_up(self, conn: bytes) -> None:
        """Close a connection that misbehaves; its origin is charged when it dials again."""

    def guard(
        self,
        now: float,
        session_of: Callable[[bytes], str | None],
        is_newcomer: Callable[[str], bool] = lambda session: False,
    ) -> Guarded:
        """Close connections that belong to no session and use resources, or that hold too much; those of
        newcomers hold less, all together.

        To be called every GUARD_S.
        """

    def reaches(self, address: str, key: str) -> bool:
        """Dial the server of this key as this hub, which takes seconds; may be called from any thread."""

    def wake(self) -> None:
        """End a `poll`; may be called from any thread."""

    def close(self) -> None: ...


GUARD_S = 0.1  # in which 12 MB come at 1 Gbit/s
MAX_BUFFERED = 32 << 20  # bytes of a session: four times its credit; dead connections keep theirs for 8 s


def origin_of(conn: bytes) -> str:
    """Return the origin of a connection, or "". Limits per origin protect peers of others from a crowd."""
    parts = conn.split(b".", 2)
    return parts[1].decode() if len(parts) == 3 else ""


def key_of(conn: bytes) -> str:
    """Return the CURVE key that the other end has proven. It is part of the connection's name, so another key
    can never reach the same connection."""
    return conn.partition(b".")[0].decode()


@dataclass(frozen=True)
class Connected:
    """A dialled flow is connected and the hub's key proven."""

    flow: int


@dataclass(frozen=True)
class Disconnected:
    """A flow ended. `error` says why, where it could not be dialled, or the other end broke the rules."""

    flow: int
    error: Unreachable | ProtocolError | None


@dataclass(frozen=True)
class Received:
    """A message has arrived on a flow; of more frames than two, which none has, it has the first three."""

    flow: int
    frames: list[bytes]


class PeerWire(Protocol):
    """A peer's end: flow 0 is control, the others bulk. Each is one connection, redialled if it ends."""

    way: str  # by which the hub was reached last: an address, or through what; "": not yet

    def aim(self, routes: Sequence[Route], server_key: str) -> None:
        """Dial another server from now on; what is connected stays."""

    def dial(self, flow: int) -> None:
        """Begin to connect; Connected or Disconnected follows within seconds."""

    def hang_up(self, flow: int) -> None:
        """Close a flow at once; no Disconnected follows."""

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]: ...

    def send(self, flow: int, frames: Frames) -> bool:
        """Send a message; returns False if the queue is full or the flow is not connected."""

    def crossed(self, flow: int) -> tuple[int, int]:
        """Count the bytes that have crossed a flow's connection, parts of messages included: those that the
        system of the other end has acknowledged, and those that have come. 0, 0: not known."""

    def wake(self) -> None: ...

    def close(self) -> None: ...
