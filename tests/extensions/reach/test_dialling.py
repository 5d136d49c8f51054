"""Each step of a route fails with its own layer, in bounded time, whatever answers there."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_hub_tunnel import serving

from cocktail_cli.extensions.reach.dialling import Bridge, FarRoute, open_stream
from cocktail_cli.extensions.reach.proxies import Proxy
from transport.protocol import Unreachable

SHUT = 1
PATIENCE_S = 0.4


@contextmanager
def answering(*parts: bytes) -> Iterator[int]:
    """Answer each connection with these parts, a moment after each other and again and again; with nothing
    where there are none. Yields the port."""

    over = threading.Event()

    def say(sock: socket.socket) -> None:
        while not over.wait(0.01):
            for part in parts:
                sock.sendall(part)

    with serving(say) as port:
        yield port
        over.set()


def failed(route: FarRoute) -> Unreachable:
    started = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        asyncio.run(open_stream(route, PATIENCE_S))
    assert time.monotonic() - started < PATIENCE_S + 3.0
    return raised.value


def test_a_closed_port_and_an_unknown_name_are_told() -> None:
    assert failed(FarRoute("127.0.0.1", SHUT)).layer == "tcp"
    for host in ("no-such-host.invalid", "a..b", "a" * 70 + ".org"):
        for tls in (False, True):
            error = failed(FarRoute(host, 443, tls=tls))
            assert (error.layer, host in str(error)) == ("dns", True)
    for proxy in ("127.0.0.1", "no-such-host.invalid"):
        assert failed(FarRoute("hub", 1, proxy=Proxy("http", proxy, SHUT))).layer == "proxy"


@pytest.mark.parametrize("scheme", ["http", "socks5"])
@pytest.mark.parametrize(
    "parts",
    [(), (b"H",), (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"), (b"\xff" * 50000,)],
    ids=["silent", "drips", "endless", "garbage"],
)
def test_a_proxy_that_does_not_answer_as_one_is_given_up_in_time(
    scheme: str, parts: tuple[bytes, ...]
) -> None:
    with answering(*parts) as port:
        error = failed(
            FarRoute("hub.example.org", 29400, proxy=Proxy(scheme, "127.0.0.1", port, "me", "s3cret"))
        )

    assert error.layer == "proxy"
    assert str(error).startswith(
        f"no way through the proxy {scheme}://127.0.0.1:{port} to hub.example.org:29400"
    )
    assert "s3cret" not in str(error)


def test_a_kind_of_proxy_that_is_not_supported_is_told_before_it_is_dialled() -> None:
    error = failed(FarRoute("hub", 1, proxy=Proxy("socks4", "127.0.0.1", SHUT)))

    assert (error.layer, "http, https, socks5, socks5h are supported" in str(error)) == ("proxy", True)


@pytest.mark.parametrize(
    "parts",
    [(), (b"\x16",), (b"\x16\x03\x03\xff\xff",), (b"220 mail.example.org\r\n",)],
    ids=["silent", "drips", "long record", "SMTP"],
)
def test_what_speaks_no_tls_is_given_up_in_time(parts: tuple[bytes, ...]) -> None:
    with answering(*parts) as port:
        assert failed(FarRoute("127.0.0.1", port, "x.run", tls=True)).layer == "tls"


def test_a_bridge_closes_what_it_cannot_open_and_goes_on() -> None:
    bridge = Bridge(FarRoute("127.0.0.1", SHUT))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", bridge.port), 5.0) as sock:
            assert sock.recv(1) == b""
    bridge.close()
