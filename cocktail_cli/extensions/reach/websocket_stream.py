"""A WebSocket over TLS (RFC 6455) as a stream of bytes: what passes where only HTTPS may.

TLS is a coat here and no lock: whatever is carried is CURVE between hub and peer, or the relay's own CURVE.
Both state machines are their libraries', without I/O: `ssl` over memory, and websockets' protocol. Their I/O
for asyncio lets a hostile end fill more memory. Measured: 3.6 MB of frames of one byte where nobody reads a
WebSocket (here 128 KiB), and 280 KB of an idle TLS connection (here 40 KB).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from functools import cache

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from .streams import CHUNK, Stream

TLS_FIRST = b"\x16"  # the first byte of TLS: a handshake record
FRAME = 16 << 10  # bytes of a frame that is sent, as of a TLS record: a whole one is awaited at the other end
LARGEST = (None, CHUNK)  # bytes of a message, and of a frame, that are accepted
DATA = (Opcode.BINARY, Opcode.CONT)
PING_S = 25.0  # proxies close what is silent for a minute
SILENT = logging.Logger("silent", logging.CRITICAL + 1)  # a stranger's greeting is no news, nor a traceback


@cache
def client_context(verified: bool) -> ssl.SSLContext:
    """Return the settings of a client, which checks the server's certificate by the system's roots or not."""
    if verified:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class TlsStream:
    """TLS over another stream; `host` is the server's name at a client's end, and None at a server's."""

    def __init__(self, inner: Stream, context: ssl.SSLContext, host: str | None) -> None:
        self._inner, self._sending = inner, asyncio.Lock()
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=host is None, server_hostname=host)

    async def handshake(self) -> TlsStream:
        """Complete the handshake. Raises OSError: ssl.SSLCertVerificationError, ssl.SSLError, and others."""
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return self
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._feed():
                    raise ConnectionError("it hung up in the TLS handshake") from None
            except ssl.SSLError:
                await self._flush()  # the alert that tells the other end why
                raise

    async def receive(self, most: int = CHUNK) -> bytes:
        while True:
            try:
                return self._tls.read(most)  # a record at most
            except ssl.SSLWantReadError:
                await self._flush()  # TLS may have something to answer
                await self._feed()
            except ssl.SSLEOFError:  # cut, or closed without a farewell: WebSocket has one of its own
                return b""

    async def send(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def end(self) -> None:
        with suppress(ssl.SSLWantReadError):  # the other end's farewell is not waited for
            self._tls.unwrap()
        await self._flush()
        await self._inner.end()

    def close(self) -> None:
        self._inner.close()

    async def _feed(self) -> bool:
        data = await self._inner.receive()
        self._came.write(data) if data else self._came.write_eof()
        return bool(data)

    async def _flush(self) -> None:
        async with self._sending:  # two directions send: each writes whole records, in order
            while data := self._goes.read(CHUNK):
                await self._inner.send(data)


class WebSocketStream:
    """The bytes in a WebSocket's binary messages; where one message ends has no meaning."""

    def __init__(self, tls: Stream, protocol: ClientProtocol | ServerProtocol) -> None:
        self._tls, self._protocol = tls, protocol
        self._ahead, self._over = bytearray(), False
        self.untrusted = ""  # why the server's certificate is not trusted here, if it is not
        self.pinging: asyncio.Task[None] | None = None  # a client's

    async def receive(self, most: int = CHUNK) -> bytes:
        while not self._ahead and not self._over:
            await self._next()
        data = bytes(self._ahead[:most])
        del self._ahead[:most]
        return data

    async def send(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), FRAME):
                self._protocol.send_binary(data[start : start + FRAME])
        except InvalidState:
            raise ConnectionError("the WebSocket is closed") from None
        await self._flush()

    async def end(self) -> None:
        """Close the WebSocket, which has no half-closed state."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
        await self._flush()

    async def keep_alive(self) -> None:
        """Ping the other end from time to time, until the connection is gone."""
        with suppress(OSError, InvalidState):
            while True:
                await asyncio.sleep(PING_S)
                self._protocol.send_ping(b"")
                await self._flush()

    def close(self) -> None:
        if self.pinging is not None:
            self.pinging.cancel()
        self._tls.close()

    async def opened(self) -> WebSocketStream:
        """Complete the opening handshake. Raises OSError."""
        await self._flush()
        protocol = self._protocol
        while protocol.state is State.CONNECTING and not (
            self._over or protocol.handshake_exc or protocol.parser_exc
        ):
            await self._next()
        if protocol.state is not State.OPEN:
            why = protocol.handshake_exc or protocol.parser_exc or "it hung up"
            raise ConnectionError(f"it opens no WebSocket: {why}")
        return self

    async def _next(self) -> None:
        """Handle the next bytes of the other end."""
        data = await self._tls.receive()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
            self._over = True
        for event in self._protocol.events_received():
            if isinstance(event, Request) and isinstance(self._protocol, ServerProtocol):
                if not self._protocol.eof_sent:  # nonsense behind the request came with it
                    self._protocol.send_response(self._protocol.accept(event))
            elif isinstance(event, Frame) and event.opcode in DATA:
                self._ahead += event.data
            elif isinstance(event, Frame) and event.opcode is Opcode.CLOSE:
                self._over = True
        await self._flush()  # pongs, the answer to a close, or what was wrong
        if self._protocol.parser_exc is not None and self._protocol.state is not State.CONNECTING:
            raise ConnectionError(f"it speaks no WebSocket: {self._protocol.parser_exc}")

    async def _flush(self) -> None:
        data = b"".join(self._protocol.data_to_send())  # an empty part asks for the end, which a close is
        if data:
            await self._tls.send(data)


async def open_websocket(inner: Stream, host: str, port: int, context: ssl.SSLContext) -> WebSocketStream:
    """Open a WebSocket over TLS as a client, which keeps it alive. Raises OSError: ssl.SSLError, and
    ConnectionError after TLS."""
    tls = await TlsStream(inner, context, host).handshake()
    protocol = ClientProtocol(WebSocketURI(True, host, port, "/", ""), max_size=LARGEST, logger=SILENT)
    protocol.send_request(protocol.connect())
    stream = await WebSocketStream(tls, protocol).opened()
    stream.pinging = asyncio.create_task(stream.keep_alive())
    return stream


async def accept_websocket(inner: Stream, context: ssl.SSLContext) -> WebSocketStream:
    """Open a WebSocket over TLS as a server. Raises OSError."""
    return await upgraded(await TlsStream(inner, context, None).handshake())


async def upgraded(tls: Stream) -> WebSocketStream:
    """Open a WebSocket as a server. Raises OSError."""
    return await WebSocketStream(tls, ServerProtocol(max_size=LARGEST, logger=SILENT)).opened()
