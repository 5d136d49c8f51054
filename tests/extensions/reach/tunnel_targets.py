"""Targets of the ways to a hub: the words to a relay, a proxy's answers, a WebSocket's bytes.

TLS is not among them: OpenSSL reads it. The parsers are real, their streams are bytes in memory.
"""

import asyncio
from random import Random

from websockets.client import ClientProtocol
from websockets.uri import WebSocketURI

from cocktail_cli.extensions.reach import relay_socks
from cocktail_cli.extensions.reach.proxies import Proxy, ProxyRefused, http_connect, socks_connect
from cocktail_cli.extensions.reach.streams import CHUNK
from cocktail_cli.extensions.reach.websocket_stream import upgraded
from scripts.fuzzing.mutate import Target, mutated

RUN = f"{'0' * 32}.run"
PROXY = Proxy("http", "proxy", 3128, "me", "s3cret")
ANSWERS = [
    b"HTTP/1.1 200 Connection established\r\nVia: 1.1 proxy\r\n\r\n\xff\0\0\0target",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\n",
    b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 5\r\n\r\nlogin",
]
SOCKS = [b"\5\2\1\0\5\0\0\1ABCDPPtarget", b"\5\0\5\0\0\3\4namePP", b"\5\0\5\5\0\1", b"\5\2\1\1"]


class Bytes:
    """A stream that gives these bytes in pieces, and has what was sent."""

    def __init__(self, data: bytes) -> None:
        self.data, self.sent = data, b""

    async def receive(self, most: int = CHUNK) -> bytes:
        most = min(most, 1 + len(self.data) // 2)
        data, self.data = self.data[:most], self.data[most:]
        return data

    async def send(self, data: bytes) -> None:
        self.sent += data

    async def end(self) -> None: ...

    def close(self) -> None: ...


def make_words(rng: Random) -> bytes:
    good = relay_socks.request(RUN) if rng.random() < 0.5 else b"\5\0" + relay_socks.reply(2, "full")
    return mutated(rng, good, good)


def check_words(case: bytes) -> bool:
    taken = 0
    for read in (relay_socks.read_request, relay_socks.read_reply):
        try:
            asyncio.run(read(Bytes(case)))
            taken += 1
        except (ValueError, OSError):
            continue
    return bool(taken)


def make_answer(rng: Random) -> bytes:
    good = rng.choice(ANSWERS + SOCKS)
    return mutated(rng, good, rng.choice(ANSWERS))


def check_answer(case: bytes) -> bool:
    ask, stream = socks_connect if case[:1] == b"\5" else http_connect, Bytes(case)
    try:
        asyncio.run(ask(stream, PROXY, "hub.example.org", 29400))
        assert case[:1] == b"\5" or case.lstrip().startswith(b"HTTP")
        assert case.endswith(stream.data)
    except (ValueError, OSError, ProxyRefused):
        return False
    return True


def make_frames(rng: Random) -> bytes:
    """Draw what a client sends from its upgrade on, damaged before or after it."""
    client = ClientProtocol(WebSocketURI(True, "relay", 443, "/", ""))
    client.send_request(client.connect())
    upgrade = b"".join(client.data_to_send())
    client.state = client.state.OPEN
    for _ in range(rng.randrange(1, 6)):
        rng.choice((client.send_binary, client.send_ping))(rng.randbytes(rng.choice((0, 1, 20, 125))))
    if rng.random() < 0.2:
        client.send_close(1000)
    frames = b"".join(client.data_to_send())
    if rng.random() < 0.3:
        return mutated(rng, upgrade + frames, frames)
    return upgrade + mutated(rng, frames, upgrade)


def check_frames(case: bytes) -> bool:
    return asyncio.run(read_all(case))


async def read_all(case: bytes) -> bool:
    size = 0
    try:
        stream = await upgraded(Bytes(case))
        while data := await stream.receive():
            size += len(data)
    except OSError:
        return False
    assert size <= len(case)
    return True


TARGETS = [
    Target("words", "ways", 30, make_words, check_words),
    Target("answers", "ways", 30, make_answer, check_answer),
    Target("frames", "ways", 30, make_frames, check_frames),
]
