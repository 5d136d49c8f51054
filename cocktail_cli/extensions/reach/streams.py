"""Streams of bytes between two ends, and two of them made one with a chunk of each direction in memory.

An asyncio loop in a thread of its own serves them, beside a ZeroMQ wire that it polls.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

POLL_S = 0.5  # the longest wait for a wire: what is periodic happens as often

T = TypeVar("T", covariant=True)


class LoopThread:
    """Runs a coroutine in a thread until it ends, or `stop`."""

    def __init__(self, name: str, main: Callable[[], Coroutine[object, object, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(unhandled)
        self._thread = threading.Thread(target=self._run, args=(main,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the coroutine and all tasks of its loop, and wait for them; may be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self, main: Callable[[], Coroutine[object, object, None]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(main())


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tell of an exception that nobody awaits. asyncio's `sock_accept` has one of its own where a connection
    comes in the moment in which it is cancelled: its future is done then. That is no news."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


class TaskSet:
    """The tasks of a loop that serves many connections; they end with the loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Polled(Protocol[T]):
    """A wire of transport.wire, either end."""

    def poll(self, timeout: float) -> Sequence[T]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class PolledWire(Generic[T]):
    """A wire in a thread of its own, as the loop uses it: `events` yields what arrived, `call` runs a job of
    the loop's with the wire."""

    def __init__(self, wire: Polled[T]) -> None:
        self._wire = wire
        self._jobs: deque[Callable[[], object]] = deque()
        self._pool = ThreadPoolExecutor(1, "cocktail-relay-wire")

    def call(self, job: Callable[[], object]) -> None:
        self.next_turn(job)
        self._wire.wake()

    def next_turn(self, job: Callable[[], object]) -> None:
        """Do a job before the next poll, which it does not hasten: one in each turn must not spin."""
        self._jobs.append(job)

    async def events(self) -> AsyncIterator[Sequence[T]]:
        """Yield what arrived, at least every POLL_S, and an empty list where that is nothing."""
        loop = asyncio.get_running_loop()
        while True:
            yield await loop.run_in_executor(self._pool, self._turn)

    def _turn(self) -> Sequence[T]:
        while self._jobs:
            self._jobs.popleft()()
        return self._wire.poll(POLL_S)

    async def close(self) -> None:
        self._wire.wake()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._wire.close)
        self._pool.shutdown()


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


class Stream(Protocol):
    """One end of a connection; what carries the bytes is its own affair. Methods raise OSError."""

    async def receive(self, most: int = CHUNK) -> bytes:
        """Return the next bytes, `most` of them at most; none at the end."""
        ...

    async def send(self, data: bytes) -> None: ...

    async def end(self) -> None:
        """Tell the other end that nothing more will be sent."""
        ...

    def close(self) -> None: ...


class SocketStream:
    """A TCP connection; `ahead`: its first bytes, where they were read before."""

    def __init__(self, sock: socket.socket, ahead: bytes = b"") -> None:
        self._sock, self._ahead = sock, ahead

    async def receive(self, most: int = CHUNK) -> bytes:
        if not self._ahead:
            return await asyncio.get_running_loop().sock_recv(self._sock, most)
        data, self._ahead = self._ahead[:most], self._ahead[most:]
        return data

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def end(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()


def prepare(sock: socket.socket) -> socket.socket:
    """Set the options of a forwarded connection."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


async def splice(one: Stream, other: Stream, pause: Callable[[int], float] = lambda size: 0.0) -> None:
    """Forward both ways until both have ended, or one fails; closes neither. After so many bytes in either
    direction it waits for `pause` seconds."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(forward(one, other, pause))
            both.create_task(forward(other, one, pause))
    except* OSError:  # an end is gone, or reads nothing: the pair is over, and both are told by a close
        pass


async def forward(source: Stream, sink: Stream, pause: Callable[[int], float]) -> None:
    """Forward one way. The next chunk is read when this one is sent, so TCP slows the sender down."""
    while data := await source.receive():
        async with asyncio.timeout(STALLED_S):
            await sink.send(data)
        if (seconds := pause(len(data))) > 0:
            await asyncio.sleep(seconds)
    await sink.end()


async def exactly(stream: Stream, size: int) -> bytes:
    """Return the next `size` bytes. Raises OSError, also where the connection ends before them."""
    data = b""
    while len(data) < size:
        if not (part := await stream.receive(size - len(data))):
            raise ConnectionError("it hung up")
        data += part
    return data


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Wait for the next connection, however often accepting fails; returns it and its address."""
    while True:
        try:
            return await asyncio.get_running_loop().sock_accept(listener)
        except OSError:  # it is gone again, or this system has no more descriptors
            await asyncio.sleep(0.05)


async def dial(host: str, port: int, source: str = "", timeout: float = DIAL_S) -> SocketStream:
    """Connect to an IP address, from the address `source` where it is given. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = prepare(socket.socket(family, socket.SOCK_STREAM))
    try:
        if source:
            sock.bind((source, 0))
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return SocketStream(sock)


async def dial_loopback(host: str, port: int, origin: str) -> SocketStream:
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
