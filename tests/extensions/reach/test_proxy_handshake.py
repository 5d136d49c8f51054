"""The words to proxies, against plain parsers of both protocols, whole and in pieces."""

import asyncio
import base64
import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_only import memory_pair
from tunnel_targets import Bytes

from cocktail_cli.extensions.reach.proxies import Proxy, ProxyRefused, http_connect, socks_connect
from transport.protocol import join_address

HTTP, SOCKS = Proxy("http", "proxy", 3128), Proxy("socks5", "proxy", 1080)
hosts = st.from_regex(r"[a-z0-9]{1,20}(\.[a-z][a-z0-9]{0,9}){0,3}", fullmatch=True) | st.ip_addresses().map(
    str
)
logins = st.tuples(st.text("abcXYZ 0-9äß", min_size=1, max_size=20), st.text(min_size=0, max_size=20))


def socks_server(data: bytes, login: bool) -> tuple[tuple[str, str], str, int]:
    """Parse all that a client says, by RFC 1928 and 1929; return login, host and port."""
    count, user, password = data[1], "", ""
    assert (data[0], login) == (5, 2 in data[2 : 2 + count])
    data = data[2 + count :]
    if login:
        size = data[1]
        user, data = data[2 : 2 + size].decode(), data[2 + size :]
        size = data[0]
        password, data = data[1 : 1 + size].decode(), data[1 + size :]
    assert data[:3] == b"\5\1\0"
    kind, data = data[3], data[4:]
    size = {1: 4, 4: 16}.get(kind) or data[0] + 1
    raw, port = data[:size], int.from_bytes(data[size:])
    return (user, password), raw[1:].decode() if kind == 3 else str(ipaddress.ip_address(raw)), port


def said(proxy: Proxy, host: str, port: int, answers: bytes) -> tuple[bytes, bytes]:
    """Give a client these answers; return what it says, and the answers that it left."""
    stream = Bytes(answers)
    asyncio.run(socks_connect(stream, proxy, host, port))
    return stream.sent, stream.data


@given(
    hosts,
    st.integers(1, 65535),
    st.none() | logins,
    st.sampled_from([b"\1ABCD", b"\4" + b"x" * 16, b"\3\2hi"]),
)
def test_a_socks_proxy_reads_host_port_and_login_and_what_follows_is_the_targets(
    host: str, port: int, login: tuple[str, str] | None, bound: bytes
) -> None:
    proxy = replace(SOCKS, user=login[0], password=login[1]) if login else SOCKS
    answers = (b"\5\2\1\0" if login else b"\5\0") + b"\5\0\0" + bound + b"PP" + b"target"
    sent, left = said(proxy, host, port, answers)

    assert socks_server(sent, login is not None) == (login or ("", ""), str(host), port)
    assert left == b"target"


@pytest.mark.parametrize(
    ("answers", "told"),
    [(b"\5\xff", "login is wanted"), (b"\5\2", "login is wanted"), (b"\5\0\5\2\0\1", "not allowed")],
)
def test_a_socks_proxy_that_refuses_is_told(answers: bytes, told: str) -> None:
    with pytest.raises(ProxyRefused, match=told):
        said(SOCKS, "host", 1, answers)
    with pytest.raises(ProxyRefused, match="login is refused"):
        said(replace(SOCKS, user="me"), "host", 1, b"\5\2\1\1")


@given(st.binary(max_size=60))
def test_garbage_from_a_socks_proxy_is_an_error_or_not_enough(answers: bytes) -> None:
    try:
        said(SOCKS, "host", 1, answers)
    except (ValueError, ProxyRefused, ConnectionError):
        return


def connect(proxy: Proxy, host: str, port: int, answers: list[bytes]) -> tuple[bytes, bytes]:
    """Run CONNECT against answers that arrive one by one; return what was asked, and the target's bytes."""

    async def run() -> tuple[bytes, bytes]:
        near, far = memory_pair()
        asked = asyncio.create_task(http_connect(near, proxy, host, port))
        async with asyncio.timeout(10):
            request = await far.came.readuntil(b"\r\n\r\n")
            for answer in answers:
                await far.send(answer)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            if not asked.done():
                far.close()
            await asked
            return request, await near.came.read(1 << 20)

    return asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(hosts, st.integers(1, 65535), st.none() | logins, st.integers(0, 80))
def test_an_http_proxys_answer_may_come_in_pieces_and_the_targets_first_bytes_with_it(
    host: str, port: int, login: tuple[str, str] | None, cut: int
) -> None:
    proxy = replace(HTTP, user=login[0], password=login[1]) if login else HTTP
    answer = b"HTTP/1.1 200 Connection established\r\nVia: proxy\r\n\r\n\xfftarget"
    asked, came = connect(proxy, host, port, [answer[:cut], answer[cut:]])

    first, *headers = asked.split(b"\r\n")
    assert first == f"CONNECT {join_address(host, port)} HTTP/1.1".encode()
    sent = dict(header.split(b": ", 1) for header in headers if header)
    wanted = b"Basic " + base64.b64encode(":".join(login).encode()) if login else None
    assert sent.get(b"Proxy-Authorization") == wanted
    assert came == b"\xfftarget"


@pytest.mark.parametrize(
    "status", ["403 Forbidden", "407 Proxy Authentication Required", "502 Bad Gateway", "301 Elsewhere"]
)
def test_an_http_proxy_that_refuses_is_told_with_its_status(status: str) -> None:
    with pytest.raises(ProxyRefused, match=status):
        connect(HTTP, "host", 443, [f"HTTP/1.0 {status}\r\nContent-Type: text/html\r\n\r\n<html>".encode()])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.binary(max_size=200) | st.just(b"HTTP/1.1 200 OK\r\n") | st.just(b"A: b\r\n" * 3000), max_size=8
    )
)
def test_garbage_from_an_http_proxy_is_an_error_within_bounds(answers: list[bytes]) -> None:
    try:
        connect(HTTP, "host", 443, answers)
    except (ValueError, OSError, ProxyRefused):
        return
