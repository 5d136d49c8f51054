"""Two sockets made one, with one chunk in memory for each direction."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from transport.wire import TokenBucket

CHUNK = 128 << 10  # bytes read at once; so much is held of a connection whose other end does not read
DIAL_S = 5.0
STALLED_S = 60.0  # an end that reads nothing for so long is closed
# An end that vanished is noticed; and the kernel queues no more than is under way and one chunk, so a line
# that is slower than the other delays no heartbeat by megabytes. Systems lack some of them.
TCP = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_NOTSENT_LOWAT": CHUNK,
}


def prepare(sock: socket.socket) -> socket.socket:
    """Set the options of a forwarded connection."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


async def splice(one: socket.socket, other: socket.socket, bucket: TokenBucket | None = None) -> None:
    """Forward both ways until both have ended, or one fails; closes neither."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(forward(one, other, bucket))
            both.create_task(forward(other, one, bucket))
    except* OSError:  # an end is gone, or reads nothing: the pair is over, and both are told by a close
        pass


async def forward(source: socket.socket, sink: socket.socket, bucket: TokenBucket | None) -> None:
    """Forward one way. The next chunk is read when this one is sent, so TCP slows the sender down."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK):
        async with asyncio.timeout(STALLED_S):
            await loop.sock_sendall(sink, data)
        if bucket is not None:
            now = time.monotonic()
            bucket.take(len(data), now)
            if (until := bucket.open_at(now)) > now:
                await asyncio.sleep(until - now)
    sink.shutdown(socket.SHUT_WR)


async def converse(sock: socket.socket, parser: Generator[Any, bytes, Any]) -> Any:
    """Run a parser of relay_socks against a socket: it yields how many bytes to read, or bytes to send."""
    loop = asyncio.get_running_loop()
    wanted = next(parser)
    try:
        while True:
            if isinstance(wanted, bytes):
                await loop.sock_sendall(sock, wanted)
                wanted = next(parser)
                continue
            answer = b""
            while len(answer) < wanted:
                part = await loop.sock_recv(sock, wanted - len(answer))
                if not part:
                    raise ConnectionError("it hung up")
                answer += part
            wanted = parser.send(answer)
    except StopIteration as done:
        return done.value


async def dial(host: str, port: int, source: str = "") -> socket.socket:
    """Connect to an IP address, from the address `source` where it is given. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = prepare(socket.socket(family, socket.SOCK_STREAM))
    try:
        if source:
            sock.bind((source, 0))
        async with asyncio.timeout(DIAL_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def dial_loopback(host: str, port: int, origin: str) -> socket.socket:
    """Connect to a server of this machine for somebody at `origin`. Raises OSError.

    Where the system has all of 127.0.0.0/8 (Linux, Windows), each origin has an address of its own there, so
    the server's limits by origin hold, and none of them shares the limits of this machine.
    """
    digest = hashlib.sha256(origin.encode()).digest()
    source = f"127.{64 + digest[0] % 64}.{digest[1]}.{1 + digest[2] % 254}"
    if host.startswith("127."):
        with suppress(OSError):
            return await dial(host, port, source)
    return await dial(host, port)
