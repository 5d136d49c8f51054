"""A firewall that lets only TLS out, and streams in memory."""

import asyncio
import socket
import ssl
from contextlib import closing, suppress
from pathlib import Path

from cocktail_cli.extensions.reach.streams import (
    CHUNK,
    LoopThread,
    SocketStream,
    dial_loopback,
    prepare,
    splice,
)
from cocktail_cli.extensions.reach.websocket_stream import TlsStream
from transport.protocol import Unreachable

CERTIFICATE, KEY = (Path(__file__).parent / f"relay-{part}.pem" for part in ("cert", "key"))


def server_context() -> ssl.SSLContext:
    """The settings of a relay whose certificate is for 127.0.0.1, and signed by itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


class Firewall:
    """Forwards connections that begin as TLS does to `port` of this machine; closes all others, or leaves
    them without an answer."""

    def __init__(self, port: int, silent: bool = False) -> None:
        self.passed = self.stopped = 0
        self._to, self._silent = port, silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._thread = LoopThread("firewall", self._main)

    def close(self) -> None:
        self._thread.stop()

    async def _main(self) -> None:
        tasks = set()
        with self._listener:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                tasks.add(asyncio.create_task(self._forward(prepare(sock))))

    async def _forward(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, Unreachable):
            first = await asyncio.get_running_loop().sock_recv(sock, 1)
            if first != b"\x16":
                self.stopped += 1
                if self._silent:
                    await asyncio.sleep(600)
                return
            self.passed += 1
            with closing(await dial_loopback("127.0.0.1", self._to, "firewall")) as inside:
                await splice(SocketStream(sock, first), inside)


class MemoryStream:
    """One end of a connection in memory; `pair` makes both."""

    def __init__(self) -> None:
        self.came, self.other = asyncio.StreamReader(), self

    async def receive(self, most: int = CHUNK) -> bytes:
        return await self.came.read(most)

    async def send(self, data: bytes) -> None:
        self.other.came.feed_data(data)

    async def end(self) -> None:
        self.other.came.feed_eof()

    def close(self) -> None:
        self.other.came.feed_eof()


def memory_pair() -> tuple[MemoryStream, MemoryStream]:
    one, other = MemoryStream(), MemoryStream()
    one.other, other.other = other, one
    return one, other


class TlsFront(Firewall):
    """Takes TLS off connections, and forwards what was inside to `port` of this machine."""

    async def _forward(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            tls = await TlsStream(SocketStream(sock), server_context(), None).handshake()
            self.passed += 1
            with closing(await dial_loopback("127.0.0.1", self._to, "front")) as inside:
                await splice(tls, inside)
