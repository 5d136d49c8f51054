"""The words to a proxy before the bytes pass: HTTP CONNECT (RFC 9110), SOCKS 5 (RFC 1928, 1929).

Names are given to the proxy, which resolves them: this machine may know none. No byte behind a proxy's answer
is read: a hub speaks first, and its greeting may come with that answer. The functions raise ProxyRefused,
OSError, and ValueError where the proxy speaks something else.

Not python-socks: it takes the first piece of an HTTP answer for all of it, drops what comes behind, and sends
no login of SOCKS beyond ASCII. Nor websockets' own CONNECT, which drops what comes behind as well.
"""

from __future__ import annotations

import base64
import ipaddress

import h11

from transport.protocol import join_address

from .proxies import Proxy
from .streams import Stream, exactly

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


async def http_connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """Have an HTTP proxy connect to host:port."""
    connection, target = h11.Connection(h11.CLIENT), join_address(host, port)  # takes 16 KiB of an answer
    headers = [("Host", target)]
    if proxy.user:
        login = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {login}"))
    try:
        request = connection.send(h11.Request(method="CONNECT", target=target, headers=headers))
        await stream.send((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := connection.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                connection.receive_data(await exactly(stream, 1))
    except h11.RemoteProtocolError as error:
        raise ValueError(f"not an HTTP proxy: {error}") from None
    if not 200 <= event.status_code < 300:
        raise ProxyRefused(f"{event.status_code} {event.reason.decode('ascii', 'replace')[:80]}".strip())


async def socks_connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """Have a SOCKS 5 proxy connect to host:port."""
    methods = bytes((NO_LOGIN, LOGIN) if proxy.user else (NO_LOGIN,))
    await stream.send(bytes((VERSION, len(methods))) + methods)
    version, method = await exactly(stream, 2)
    if version != VERSION:
        raise ValueError("not SOCKS 5")
    if method == LOGIN and proxy.user:
        user, password = proxy.user.encode(), proxy.password.encode()
        await stream.send(bytes((1, len(user))) + user + bytes((len(password),)) + password)
        if (await exactly(stream, 2))[1]:
            raise ProxyRefused("the login is refused")
    elif method != NO_LOGIN:
        raise ProxyRefused("a login is wanted")
    await stream.send(bytes((VERSION, CONNECT, 0)) + socks_address(host) + port.to_bytes(2, "big"))
    version, code, _, kind = await exactly(stream, 4)
    if version != VERSION:
        raise ValueError("not SOCKS 5")
    if code:
        raise ProxyRefused(REPLIES.get(code, f"reply {code}"))
    size = {IPV4: 4, IPV6: 16}.get(kind) or (await exactly(stream, 1))[0]
    await exactly(stream, size + 2)


def socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
        return bytes((IPV4 if address.version == 4 else IPV6,)) + address.packed
    except ValueError:
        name = host.encode("idna")
        return bytes((DOMAIN, len(name))) + name
