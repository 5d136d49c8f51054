"""The words to a proxy before the bytes pass: HTTP CONNECT (RFC 9110), SOCKS 5 (RFC 1928, 1929).

Names are given to the proxy, which resolves them: this machine may know none.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Generator

import h11

from transport.protocol import Proxy, join_address

from .streams import ReadAhead, Stream, converse

VERSION, CONNECT, IPV4, DOMAIN, IPV6 = 5, 1, 1, 3, 4
NO_LOGIN, LOGIN = 0, 2  # methods; a login's own version is 1
REPLIES = {
    1: "general failure",
    2: "not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "timed out",
}


class ProxyRefused(Exception):
    """The proxy does not connect; the text is what it said."""


async def through_proxy(stream: Stream, proxy: Proxy, host: str, port: int) -> Stream:
    """Have a proxy connect to host:port; return the connection to there. Raises ProxyRefused, OSError and
    ValueError, where it speaks something else."""
    if proxy.scheme.startswith("socks"):
        await converse(stream, socks_handshake(proxy, host, port))
        return stream
    return ReadAhead(stream, await http_connect(stream, proxy, join_address(host, port)))


async def http_connect(stream: Stream, proxy: Proxy, target: str) -> bytes:
    """Return what came from the target behind the proxy's answer."""
    connection = h11.Connection(h11.CLIENT)  # accepts 16 KiB of an answer, and keeps what came behind it
    headers = [("Host", target)]
    if proxy.user:
        login = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {login}"))
    try:
        request = connection.send(h11.Request(method="CONNECT", target=target, headers=headers))
        await stream.send((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := connection.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive())
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("it hung up")
    except h11.RemoteProtocolError as error:
        raise ValueError(f"not an HTTP proxy: {error}") from None
    if not 200 <= event.status_code < 300:
        raise ProxyRefused(f"{event.status_code} {event.reason.decode('ascii', 'replace')[:80]}".strip())
    return connection.trailing_data[0]


def socks_handshake(proxy: Proxy, host: str, port: int) -> Generator[int | bytes, bytes, None]:
    """Have a SOCKS 5 proxy connect to host:port: yields how many bytes to read, or bytes to send. Raises
    ProxyRefused, and ValueError where it is not SOCKS 5."""
    methods = bytes((NO_LOGIN, LOGIN) if proxy.user else (NO_LOGIN,))
    yield bytes((VERSION, len(methods))) + methods
    version, method = yield 2
    if version != VERSION:
        raise ValueError("not SOCKS 5")
    if method == LOGIN and proxy.user:
        user, password = proxy.user.encode(), proxy.password.encode()
        yield bytes((1, len(user))) + user + bytes((len(password),)) + password
        if (yield 2)[1]:
            raise ProxyRefused("the login is refused")
    elif method != NO_LOGIN:
        raise ProxyRefused("a login is wanted")
    yield bytes((VERSION, CONNECT, 0)) + socks_address(host) + port.to_bytes(2, "big")
    version, code, _, kind = yield 4
    if version != VERSION:
        raise ValueError("not SOCKS 5")
    if code:
        raise ProxyRefused(REPLIES.get(code, f"reply {code}"))
    size = {IPV4: 4, IPV6: 16}.get(kind) or (yield 1)[0]
    yield size + 2


def socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
        return bytes((IPV4 if address.version == 4 else IPV6,)) + address.packed
    except ValueError:
        name = host.encode("idna")
        return bytes((DOMAIN, len(name))) + name
