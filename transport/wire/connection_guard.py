"""The bytes that messages take on a connection, and the guard of the hub's connections by their file
descriptors: memory held by each, and how one is closed.

libzmq bounds queues by whole messages. A message of endless frames is never whole; 1000 messages of 256 KiB
to a peer that does not read are many bytes; and libzmq has no call that closes one connection of a ROUTER.
But its monitor reports when a descriptor is accepted and closed, SRCFD reports the descriptor of a message,
and on Linux TCP_INFO reports the bytes that arrived and the bytes the other end has acknowledged. Held are
the bytes that arrived and were not read, and those sent and not acknowledged.

    silent       accepted, no message yet: closed after SILENT_S
    stranger     has sent a message, and belongs to no session: closed after STRANGER_S
    known        belongs to a session, or waits for the host's approval

An origin that dials too often is closed within GUARD_S, whatever it sends.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import zmq

from .frames import MAX_BUFFERED, Crossed, Guarded, origin_of
from .rate_limit import MAX_NAMES, TokenBuckets

SILENT_S = 15.0  # 5 of them for the handshake (HANDSHAKE_IVL), the rest for a slow line
STRANGER_S = 30.0  # a peer that lost its session sends Hello at once; a refused peer hangs up itself
STRANGER = 256 * 1024  # bytes; a handshake message has at most 64 KiB
NEWCOMERS_HELD = 48 << 20  # bytes of all sessions that have delivered nothing
ALL_HELD = 1 << 30  # bytes of all connections; honest ones hold rate x round trip, some 100 MB together
POLL_MONITOR_S = 0.02  # between two polls of the monitor: each costs as much as reading a message
LITTLE = 1 << 20  # bytes: below this the kernel is not asked at every `Get`
# 256 peers behind one NAT reconnect with two connections each, and probe before each
DIALS, DIALS_S = 2048.0, 64.0  # of one origin: in a burst, and a second
FINE = 512.0  # dials charged to the origin of a connection closed for misbehaviour

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENT = struct.Struct("=HI")  # event, value
HUNG_UP = (errno.EPIPE, errno.ECONNRESET)  # the other end closed it
INFO = struct.Struct("=120xQQ")  # of struct tcp_info: bytes acknowledged, bytes received
LINUX = sys.platform == "linux"
LOOPBACK = ("127-", "::")  # origins

# CurveZMQ (RFC 26): a frame of n bytes becomes a MESSAGE command of "\x07MESSAGE", an 8-byte nonce and a
# box of 16 bytes of authentication, 1 of flags and the n. ZMTP 3.1 (RFC 37) puts a flag byte and a length
# before it, of 1 byte up to 255 and of 8 beyond.
CURVE_MESSAGE = 8 + 8 + 16 + 1
SHORT = 255
# The handshake of one connection, DEALER to ROUTER (RFC 26 and RFC 37): a greeting of 64 bytes each; HELLO 2
# + 200 and INITIATE 9 + 292 up; WELCOME 2 + 168 and READY 2 + 65 down. The last two carry the socket types
# and an empty identity.
HANDSHAKE_UP = 64 + 202 + 301
HANDSHAKE_DOWN = 64 + 170 + 67


def wire_size(frames: Sequence[bytes | memoryview]) -> int:
    """Return the bytes that these frames take in the TCP stream, over ZMTP 3.1 with CURVE."""
    total = 0
    for frame in frames:
        body = len(frame) + CURVE_MESSAGE
        total += body + (2 if body <= SHORT else 9)
    return total


@dataclass(frozen=True)
class TcpCounters:
    """The kernel's byte counters of a descriptor."""

    acknowledged: int = 0  # bytes acknowledged by the other end
    received: int = 0

    def held(self, line: GuardedConnection) -> int:
        return max(0, self.received - line.read) + max(0, line.sent - self.acknowledged) if LINUX else 0


@dataclass
class GuardedConnection:
    """A connection that has sent a message."""

    conn: bytes
    since: float  # when it last was known, or began
    read: int = HANDSHAKE_UP  # bytes read from it
    sent: int = HANDSHAKE_DOWN
    held: int = 0  # by the kernel's last answer
    held_at: int = HANDSHAKE_DOWN  # `sent` at that time
    counts: TcpCounters = TcpCounters()  # the kernel's last answer
    received_at: float = 0.0  # when they last grew
    acknowledged_at: float = 0.0
    caught_up_at: float = 0.0  # when all that was sent was acknowledged
    caught_up: int = 0  # bytes, then

    def look(self, counts: TcpCounters, now: float) -> None:
        """Note the kernel's answer."""
        self.received_at = now if counts.received > self.counts.received else self.received_at
        if counts.acknowledged > self.counts.acknowledged:
            self.acknowledged_at = now
        if counts.acknowledged >= self.sent or not self.caught_up_at:
            self.caught_up_at, self.caught_up = now, counts.acknowledged
        self.counts = counts

    def crossed(self) -> Crossed:
        return Crossed(
            self.received_at,
            self.acknowledged_at,
            max(0, self.counts.received - self.read),
            max(0, self.sent - self.counts.acknowledged),
            self.caught_up_at,
            self.counts.acknowledged - self.caught_up,
            not origin_of(self.conn).startswith(LOOPBACK),
        )


class ConnectionGuard:
    """All connections of a ROUTER, created before it is bound. `files`: the limit of descriptors."""

    port = 0  # the hub's, once bound; descriptors of other ports are left alone

    def __init__(self, context: zmq.Context[Any], router: zmq.Socket[bytes], files: int) -> None:
        self._router, self._files = router, files
        self._silent: dict[int, float] = {}  # descriptor -> accepted when, oldest first
        self._lines: dict[int, GuardedConnection] = {}  # by descriptor
        self._numbers: dict[bytes, int] = {}  # connection -> descriptor
        self._shut: set[int] = set()  # shut down, and not closed yet
        self._ended: dict[bytes, None] = {}  # connections closed recently, session messages may still arrive
        self._hung_up = False  # the next to close was closed by the other end
        self._refused = 0
        self._dials = TokenBuckets(DIALS_S, DIALS)
        self.look_at = 0.0  # when to call `look` next, at the latest
        where = f"inproc://connections-{id(self)}"
        router.monitor(where, EVENTS)
        self.sock: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.sock.linger = 0
        self.sock.setsockopt(zmq.RCVHWM, 0)  # a full queue would block libzmq, and with it all peers
        self.sock.connect(where)

    def close(self) -> None:
        self._router.disable_monitor()
        self.sock.close(0)

    # ---- events --------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Handle the monitor's events."""
        self.look_at = now + POLL_MONITOR_S
        while True:
            try:
                what, value = EVENT.unpack(self.sock.recv_multipart(zmq.DONTWAIT)[0])
            except zmq.Again:
                return
            if what == zmq.EVENT_ACCEPTED:
                self._accepted(value, now)
            elif what == zmq.EVENT_DISCONNECTED:
                self._closed(value)
            else:
                self._hung_up = value in HUNG_UP

    def _accepted(self, number: int, now: float) -> None:
        if number in self._lines:  # the event was late
            return
        self._shut.discard(number)
        where = peer_of(number)
        if where is None:
            return
        self._silent[number] = now
        if not self._dials.take(where, now):
            self._hang_up(number)
        if len(self._silent) - len(self._shut) > self._files // 2:
            self._hang_up(next(n for n in self._silent if n not in self._shut))

    def _closed(self, number: int) -> None:
        hung_up, self._hung_up = self._hung_up, False
        line = self._lines.pop(number, None)
        if line is not None:
            self._numbers.pop(line.conn, None)
            self._ended[line.conn] = None
            if len(self._ended) > MAX_NAMES:
                del self._ended[next(iter(self._ended))]
        else:
            self._silent.pop(number, None)
            self._refused += not hung_up or number in self._shut
        self._shut.discard(number)

    def came(self, number: int, conn: bytes, size: int, now: float) -> None:
        """Note that a message was read."""
        line = self._lines.get(number)
        if line is None or line.conn != conn:
            self.look(now)  # the descriptor may belong to another connection by now
            line = self._lines.get(number)
        if conn in self._ended:
            return
        if line is None or line.conn != conn:
            self._silent.pop(number, None)
            if line is not None:
                self._numbers.pop(line.conn, None)
            line = self._lines[number] = GuardedConnection(conn, now)
            self._numbers[conn] = number
        line.read += size

    def sent(self, conn: bytes, size: int) -> None:
        line = self._lines.get(self._numbers.get(conn, -1))
        if line is not None:
            line.sent += size

    # ---- limits --------------------------------------------------------------------------------------------

    def held(self, conn: bytes) -> int:
        number = self._numbers.get(conn)
        if number is None:
            return 0
        line = self._lines[number]
        if max(line.held, line.sent - line.held_at) >= LITTLE:
            line.held, line.held_at = (counts_of(number) or TcpCounters()).held(line), line.sent
        # an upper bound: acknowledgements since then are not known
        return line.held + line.sent - line.held_at

    def crossed(self, conn: bytes) -> Crossed | None:
        number = self._numbers.get(conn)
        return self._lines[number].crossed() if LINUX and number is not None else None

    def is_open(self, conn: bytes) -> bool:
        return conn in self._numbers

    def hang_up(self, conn: bytes, now: float) -> None:
        number = self._numbers.get(conn)
        if number is None or number in self._shut:  # messages sent before may still arrive
            return
        self.look(now)
        if self._numbers.get(conn) == number:  # else the descriptor belongs to another connection by now
            self._dials.fine(origin_of(conn), now, FINE)
            self._hang_up(number)

    def guard(
        self,
        now: float,
        session_of: Callable[[bytes], str | None],
        is_newcomer: Callable[[str], bool] = lambda session: False,
    ) -> Guarded:
        """See HubWire.guard."""
        self.look(now)
        for number, since in list(self._silent.items()):
            counts = counts_of(number)
            if counts is None:
                self._closed(number)
            elif now - since >= SILENT_S or counts.received > STRANGER:
                self._hang_up(number)
        patience = STRANGER_S if len(self._silent) + len(self._lines) < 7 / 8 * self._files else 0.0
        held: dict[str, dict[int, int]] = {}  # session -> descriptor -> bytes
        for number, line in list(self._lines.items()):
            counts, session = counts_of(number), session_of(line.conn)
            if counts is None:
                self._closed(number)
                continue
            line.look(counts, now)
            if session is not None:
                line.since = now
                held.setdefault(session, {})[number] = counts.held(line)
            elif now - line.since >= patience or counts.held(line) > STRANGER:
                self._hang_up(number)
        for mine in held.values():
            self._trim(mine, MAX_BUFFERED)
        new = {n: size for session, mine in held.items() if is_newcomer(session) for n, size in mine.items()}
        self._trim(new, NEWCOMERS_HELD)
        self._trim({n: size for mine in held.values() for n, size in mine.items()}, ALL_HELD)
        refused, self._refused = self._refused, 0
        return Guarded(refused, min(sum(new.values()), NEWCOMERS_HELD))

    def _trim(self, held: dict[int, int], most: int) -> None:
        """Close the connections that hold most, until the rest hold no more than `most` bytes."""
        total = sum(held.values())
        for number in sorted(held, key=lambda n: held[n], reverse=True):
            if total <= most:
                return
            total -= held[number]
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        """Shut the socket down: libzmq sees the end of the stream and closes it; silent ones count then."""
        if number not in self._shut:
            self._shut.add(number)
            self._refused += number in self._lines
            with_socket(number, self._end)

    def _end(self, sock: socket.socket) -> None:
        if sock.getsockname()[1] == self.port:
            sock.shutdown(socket.SHUT_RDWR)


T = TypeVar("T")
INTERNET = (socket.AF_INET, socket.AF_INET6)


def with_socket(number: int, question: Callable[[socket.socket], T]) -> T | None:
    """Call `question` with a socket of libzmq's descriptor, which is not closed here. Returns None if it is
    closed already, or reused, as by the resolver's netlink socket, which has another address family."""
    try:
        sock = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        return question(sock) if sock.family in INTERNET else None
    except OSError:
        return None
    finally:
        sock.detach()


def counts_of(number: int) -> TcpCounters | None:
    """Return the counters of a descriptor; None if it is closed."""
    return with_socket(number, tcp_counters) if LINUX else TcpCounters()


def tcp_counters(sock: socket.socket) -> TcpCounters:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    return TcpCounters(*INFO.unpack(info)) if len(info) == INFO.size else TcpCounters()


def unread(sock: socket.socket) -> int:
    """Count the bytes that have come and are still in the kernel; 0 where it does not tell."""
    if sys.platform == "linux":
        import fcntl
        import termios

        return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


def peer_of(number: int) -> str | None:
    """Return the origin of the other end; None if it is gone."""
    return with_socket(number, lambda sock: origin(sock.getpeername()[0]))


@lru_cache(maxsize=4096)
def origin(address: str) -> str:
    """Return the unit that is rate-limited: an IPv4 address, or the first 64 bits of an IPv6 address. Without
    dots, as it is part of a connection's name."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    ip = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Address(int(ip) >> 64 << 64))
    return str(ip).replace(".", "-")
