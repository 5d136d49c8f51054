"""A WebSocket over TLS, both ends in memory: bytes in order, bounds, and what others say to a relay."""

import asyncio
import ssl
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_only import CERTIFICATE, MemoryStream, memory_pair, server_context
from websockets.frames import Frame, Opcode

from cocktail_cli.extensions.reach import websocket_stream
from cocktail_cli.extensions.reach.streams import CHUNK
from cocktail_cli.extensions.reach.websocket_stream import (
    TlsStream,
    WebSocketStream,
    accept_websocket,
    client_context,
    open_websocket,
)

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def opened(context: ssl.SSLContext | None = None) -> tuple[WebSocketStream, WebSocketStream]:
    near, far = memory_pair()
    async with asyncio.timeout(10), asyncio.TaskGroup() as both:
        client = both.create_task(open_websocket(near, "127.0.0.1", 443, context or client_context(False)))
        server = both.create_task(accept_websocket(far, server_context()))
    return client.result(), server.result()


async def read(stream: WebSocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := await stream.receive()):
        data += part
    return data


pieces = st.lists(st.binary(min_size=1, max_size=5000) | st.just(bytes(range(256)) * 700), max_size=6)


@settings(max_examples=25, deadline=None)
@given(pieces, pieces)
def test_bytes_arrive_in_order_both_ways_however_they_were_cut(up: list[bytes], down: list[bytes]) -> None:
    async def exchange() -> None:
        client, server = await opened()
        for stream, data in ((client, up), (server, down)):
            for piece in data:
                await stream.send(piece)
        async with asyncio.timeout(10):
            assert await read(server, sum(map(len, up))) == b"".join(up)
            assert await read(client, sum(map(len, down))) == b"".join(down)

    asyncio.run(exchange())


def test_an_end_is_told_after_the_last_bytes_and_closes_both_directions() -> None:
    async def exchange() -> None:
        client, server = await opened()
        await client.send(b"goodbye")
        await client.end()
        assert [await server.receive(), await server.receive(), await client.receive()] == [
            b"goodbye",
            b"",
            b"",
        ]
        with pytest.raises(ConnectionError):
            await server.send(b"too late")

    asyncio.run(exchange())


def test_a_silent_client_pings_until_it_is_closed_and_a_ping_is_answered_and_no_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Proxies close what is silent for a minute, and a transfer's connection may be."""
    monkeypatch.setattr(websocket_stream, "PING_S", 0.01)

    async def exchange() -> None:
        client, server = await opened()
        pinged = asyncio.Event()
        monkeypatch.setattr(server._protocol, "recv_frame", seen(server._protocol.recv_frame, pinged))
        reading = asyncio.create_task(server.receive())
        async with asyncio.timeout(10):
            await pinged.wait()
            await client.send(b"data")
            assert await reading == b"data"
            await server.send(b"answer")
            assert await client.receive() == b"answer"
        client.close()
        assert client.pinging is not None
        await asyncio.wait([client.pinging], timeout=10)
        assert client.pinging.cancelled()
        assert server.pinging is None

    def seen(receive: Callable[[Frame], None], pinged: asyncio.Event) -> Callable[[Frame], None]:
        def recv_frame(frame: Frame) -> None:
            if frame.opcode is Opcode.PING:
                pinged.set()
            receive(frame)

        return recv_frame

    asyncio.run(exchange())


def test_a_certificate_is_checked_for_the_host_name_by_given_roots() -> None:
    roots = ssl.create_default_context(cafile=str(CERTIFICATE))
    asyncio.run(opened(roots))
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(opened(ssl.create_default_context()))

    assert raised.group_contains(ssl.SSLCertVerificationError)


async def answered(sent: bytes, *, tls: bool) -> bytes:
    """Return the answer of a relay's end to these bytes before it gives up."""
    near, far = memory_pair()
    server = asyncio.create_task(accept_websocket(far, server_context()))
    client: MemoryStream | TlsStream = near
    if tls:
        client = await TlsStream(near, client_context(False), "127.0.0.1").handshake()
    await client.send(sent)
    if not tls:
        await near.end()
    async with asyncio.timeout(10):
        with pytest.raises(OSError):  # noqa: PT011 - of TLS, or of the WebSocket
            await (await server).receive()
    far.close()
    return await client.receive()


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_after_the_first_byte_of_tls_is_an_error(data: bytes) -> None:
    asyncio.run(answered(b"\x16" + data, tls=False))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n", b"HTTP/1.1 426"),
        (b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n" + b"\xff" * 50, b""),
        (b"POST / HTTP/1.1\r\n\r\n", b""),
        (b"GET /" + b"a" * 9000, b""),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200, b""),
        (UPGRADE + b"\x82\xff" + struct.pack("!Q", 1 << 30) + bytes(1000), b""),  # a GiB to come
        (UPGRADE + b"\x82\x05plain", b""),  # not masked
        (UPGRADE + b"\xf3\x85" + bytes(9), b""),  # an extension that nobody agreed to
    ],
)  # fmt: skip
def test_others_that_speak_https_are_refused_within_bounds(sent: bytes, told: bytes) -> None:
    assert asyncio.run(answered(sent, tls=True)).startswith(told)


def test_an_endless_frame_is_refused_by_its_header() -> None:
    """A frame is held until it is whole: none may be longer than what is held of a connection anyway."""

    async def exchange() -> None:
        client, server = await opened()
        await client._tls.send(b"\x82\xff" + struct.pack("!Q", CHUNK + 1) + bytes(4))
        with pytest.raises(ConnectionError, match="speaks no WebSocket"):
            await server.receive()

    asyncio.run(exchange())
