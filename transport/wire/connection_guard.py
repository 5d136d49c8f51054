"""The hub's connections by their descriptors: what of each lies in our memory, and how one is hung up on.

libzmq bounds queues by whole messages. A message of endlessly many frames is never whole, and 1000 messages
of a quarter of a megabyte, sent to one who does not read, are many; nor has libzmq a call that ends one
connection of a ROUTER. But it tells when a descriptor is accepted and closed (monitor), and on which one a
message came (SRCFD); and the kernel tells how many bytes came on it, and how many the other end has taken
(TCP_INFO; Linux alone). What came and was not read, and what was sent and not taken, is what is held.

    silent       accepted, and has not said a message yet: SILENT_S to say one
    a stranger   has said something, and belongs to nobody: STRANGER_S
    somebody's   of a session, or of one who waits for the host's approval

Who dials too often from one origin is hung up on within GUARD_S, whatever it says.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import zmq

from .frames import HANDSHAKE_DOWN, HANDSHAKE_UP, MAX_BUFFERED, origin_of
from .rate_limit import MAX_NAMES, TokenBuckets

SILENT_S = 15.0  # 5 for the handshake (HANDSHAKE_IVL), the rest for a bad line
STRANGER_S = 30.0  # a peer that lost its session says Hello at once; one that was refused hangs up itself
STRANGER = 256 * 1024  # bytes; a greeting has 64 KiB at most
ALL_HELD = 1 << 30  # bytes of all connections; honest ones hold rate x round trip together, some 100 MB
LOOK_S = 0.02  # that libzmq's monitor may wait to be heard: asking it costs as much as reading a message
LITTLE = 1 << 20  # bytes: less is held for sure, so the kernel need not be asked at every `Get`
# 256 peers in one house come back with two connections each at first, and one before each to see who answers
DIALS, DIALS_S = 2048.0, 64.0  # at once, and a second, of one origin
FINE = 512.0  # dials that one costs who was hung up on for what he did

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENT = struct.Struct("=HI")  # what, and its value
LEFT = (errno.EPIPE, errno.ECONNRESET)  # the other end hung up by itself
INFO = struct.Struct("=120xQQ")  # of struct tcp_info: bytes that the other end took, bytes that came
LINUX = sys.platform == "linux"


@dataclass
class GuardedConnection:
    """A connection that has said something."""

    conn: bytes
    since: float  # when it last was somebody's, or began
    read: int = HANDSHAKE_UP  # bytes that were read of it
    sent: int = HANDSHAKE_DOWN
    held: int = 0  # as the kernel said when it was last asked for a `Get`
    held_at: int = HANDSHAKE_DOWN  # `sent` then


@dataclass(frozen=True)
class TcpCounters:
    """What the kernel says of a descriptor."""

    taken: int = 0  # bytes that the other end has acknowledged
    come: int = 0

    def held(self, line: GuardedConnection) -> int:
        return max(0, self.come - line.read) + max(0, line.sent - self.taken) if LINUX else 0


class ConnectionGuard:
    """All of a ROUTER, which is not bound yet. `files`: descriptors that this process may have."""

    port = 0  # the hub's, once it is bound: another descriptor of this process is left alone

    def __init__(self, context: zmq.Context[Any], router: zmq.Socket[bytes], files: int) -> None:
        self._router, self._files = router, files
        self._silent: dict[int, float] = {}  # descriptor -> since when, the oldest first
        self._lines: dict[int, GuardedConnection] = {}  # by descriptor
        self._numbers: dict[bytes, int] = {}  # connection -> descriptor
        self._shut: set[int] = set()  # hung up on, and not closed yet
        self._ended: dict[bytes, None] = {}  # connections closed of late: what they said may still come
        self._left = False  # the next that is closed hung up by itself
        self._refused = 0
        self._dials = TokenBuckets(DIALS_S, DIALS)
        self._look_at = 0.0
        where = f"inproc://connections-{id(self)}"
        router.monitor(where, EVENTS)
        self.sock: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.sock.linger = 0
        self.sock.setsockopt(zmq.RCVHWM, 0)  # where it is full libzmq waits, and all peers with it
        self.sock.connect(where)

    def close(self) -> None:
        self._router.disable_monitor()
        self.sock.close(0)

    # ---- what happens --------------------------------------------------------------------------------------

    def look_again(self, now: float) -> None:
        """As `look`, where that was not done of late."""
        if now >= self._look_at:
            self.look(now)

    def look(self, now: float) -> None:
        """Hear what libzmq tells of descriptors."""
        self._look_at = now + LOOK_S
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
                self._left = value in LEFT

    def _accepted(self, number: int, now: float) -> None:
        if number in self._lines:  # libzmq was late to tell of it
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
        left, self._left = self._left, False
        line = self._lines.pop(number, None)
        if line is not None:
            self._numbers.pop(line.conn, None)
            self._ended[line.conn] = None
            if len(self._ended) > MAX_NAMES:
                del self._ended[next(iter(self._ended))]
        else:
            self._silent.pop(number, None)
            self._refused += not left or number in self._shut
        self._shut.discard(number)

    def came(self, number: int, conn: bytes, size: int, now: float) -> None:
        """A message was read."""
        line = self._lines.get(number)
        if line is None or line.conn != conn:
            self.look(now)  # the number may have been another connection's, or be by now
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

    # ---- what is done about it -----------------------------------------------------------------------------

    def held(self, conn: bytes) -> int:
        number = self._numbers.get(conn)
        if number is None:
            return 0
        line = self._lines[number]
        if max(line.held, line.sent - line.held_at) >= LITTLE:
            line.held, line.held_at = (counts_of(number) or TcpCounters()).held(line), line.sent
        return line.held + line.sent - line.held_at  # and what was taken since: that is no more

    def hang_up(self, conn: bytes, now: float) -> None:
        number = self._numbers.get(conn)
        if number is None or number in self._shut:  # what it said before may still come
            return
        self.look(now)
        if self._numbers.get(conn) == number:  # else that is another connection's by now
            self._dials.fine(origin_of(conn), now, FINE)
            self._hang_up(number)

    def guard(self, now: float, owner: Callable[[bytes], str | None]) -> int:
        """See HubWire.guard."""
        self.look(now)
        self._guard_silent(now)
        patience = STRANGER_S if len(self._silent) + len(self._lines) < 7 / 8 * self._files else 0.0
        held: dict[str, dict[int, int]] = {}  # owner -> descriptor -> bytes
        for number, line in list(self._lines.items()):
            counts, whose = counts_of(number), owner(line.conn)
            if counts is None:
                self._closed(number)
            elif whose is not None:
                line.since = now
                held.setdefault(whose, {})[number] = counts.held(line)
            elif now - line.since >= patience or counts.held(line) > STRANGER:
                self._hang_up(number)
        for mine in held.values():
            self._trim(mine, MAX_BUFFERED)
        self._trim({n: size for mine in held.values() for n, size in mine.items()}, ALL_HELD)
        refused, self._refused = self._refused, 0
        return refused

    def _guard_silent(self, now: float) -> None:
        for number, since in list(self._silent.items()):
            counts = counts_of(number)
            if counts is None:
                self._closed(number)
            elif now - since >= SILENT_S or counts.come > STRANGER:
                self._hang_up(number)

    def _trim(self, held: dict[int, int], most: int) -> None:
        """Hang up on those that hold most, until the others hold no more than this."""
        total = sum(held.values())
        for number in sorted(held, key=lambda n: held[n], reverse=True):
            if total <= most:
                return
            total -= held[number]
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        """libzmq sees the end of the stream, and closes it. Who has said nothing is counted then."""
        if number not in self._shut:
            self._shut.add(number)
            self._refused += number in self._lines
            ask(number, self._end)

    def _end(self, sock: socket.socket) -> None:
        if sock.getsockname()[1] == self.port:
            sock.shutdown(socket.SHUT_RDWR)


T = TypeVar("T")
INTERNET = (socket.AF_INET, socket.AF_INET6)


def ask(number: int, question: Callable[[socket.socket], T]) -> T | None:
    """Of a descriptor that is libzmq's, and never closed here. None: it is closed already, or it is
    something else's by now, as the resolver's netlink socket, whose addresses are of another kind."""
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
    """None: there is no such connection."""
    return ask(number, told) if LINUX else TcpCounters()


def told(sock: socket.socket) -> TcpCounters:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    return TcpCounters(*INFO.unpack(info)) if len(info) == INFO.size else TcpCounters()


def peer_of(number: int) -> str | None:
    """The origin of the other end; None: it is gone."""
    return ask(number, lambda sock: origin(sock.getpeername()[0]))


@lru_cache(maxsize=4096)
def origin(address: str) -> str:
    """Of an IP address: an IPv4 address is one house's, or one machine's; of IPv6 that has 64 bits. Without
    dots, as it is a part of a connection's name."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    ip = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Address(int(ip) >> 64 << 64))
    return str(ip).replace(".", "-")
