import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from cocktail_cli.extensions.reach.relay_server import RelayedRun
from cocktail_cli.extensions.reach.streams import SocketStream, prepare, splice
from transport.wire import TokenBucket

MIB = 1 << 20


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class Spliced:
    """Two TCP connections with a splice between them: a peer's end and a hub's end."""

    def __init__(self, pause: Callable[[int], float] = lambda size: 0.0) -> None:
        (self.peer, near), (self.hub, far) = tcp_pair(), tcp_pair()
        self._inner = prepare(near), prepare(far)
        self.thread = threading.Thread(target=asyncio.run, args=(self._run(pause),))
        self.thread.start()

    async def _run(self, pause: Callable[[int], float]) -> None:
        one, other = self._inner
        with one, other:
            await splice(SocketStream(one), SocketStream(other), pause)

    def close(self) -> None:
        self.peer.close()
        self.hub.close()
        self.thread.join(120)


@pytest.fixture
def spliced() -> Iterator[Spliced]:
    pair = Spliced()
    yield pair
    pair.close()


def test_the_last_bytes_arrive_before_the_end(spliced: Spliced) -> None:
    spliced.peer.sendall(b"goodbye")
    spliced.peer.shutdown(socket.SHUT_WR)
    assert spliced.hub.makefile("rb").read() == b"goodbye"
    spliced.hub.sendall(b"so long")
    spliced.hub.shutdown(socket.SHUT_WR)

    assert spliced.peer.makefile("rb").read() == b"so long"
    spliced.thread.join(120)
    assert not spliced.thread.is_alive()


def test_an_end_that_does_not_read_stops_its_sender_within_bounded_memory(spliced: Spliced) -> None:
    spliced.hub.settimeout(0.5)
    sent = 0
    with suppress(TimeoutError):
        while sent < 256 * MIB:
            sent += spliced.hub.send(bytes(MIB))

    # what the kernel holds at four ends on the loopback; the splice itself has one chunk
    assert sent < 32 * MIB


def test_an_end_that_vanishes_closes_the_other(spliced: Spliced) -> None:
    spliced.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    spliced.peer.close()
    spliced.hub.settimeout(5.0)

    assert spliced.hub.recv(1) == b""


def test_a_run_gets_no_more_than_its_rate() -> None:
    pair = Spliced(RelayedRun(b"", 0.0, TokenBucket(4.0 * MIB)).pause)
    data = bytes(2 * MIB)
    started = time.monotonic()
    threading.Thread(target=pair.peer.sendall, args=(data,), daemon=True).start()
    left = len(data)
    while left:
        left -= len(pair.hub.recv(min(left, MIB)))
    took = time.monotonic() - started
    pair.close()

    assert took >= 0.4, "2 MiB at 4 MiB/s, less a burst of 50 ms and the last chunk"
