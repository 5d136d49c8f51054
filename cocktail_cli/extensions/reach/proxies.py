"""The proxies that this machine's environment names: HTTPS_PROXY, ALL_PROXY and NO_PROXY.

The words to a proxy before the bytes pass: HTTP CONNECT (RFC 9110), SOCKS 5 (RFC 1928, 1929).

Names are given to the proxy, which resolves them: this machine may know none. No byte behind a proxy's answer
is read: a hub speaks first, and its greeting may come with that answer. The functions raise ProxyRefused,
OSError, and ValueError where the proxy speaks something else.

Not python-socks: it takes the first piece of an HTTP answer for all of it, drops what comes behind, and sends
no login of SOCKS beyond ASCII. Nor websockets' own CONNECT, which drops what comes behind as well.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

import h11

from cocktail_cli.errors import Failure
from transport.protocol import join_address

from .streams import Stream, exactly

# by scheme: where a URL names none; 1080 else
PROXY_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
HINT = "http://USER:PASSWORD@HOST:PORT, or socks5://HOST:PORT; unset it to dial without a proxy"
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


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy that takes CONNECT, itself over TLS or not, or a SOCKS 5 proxy."""

    scheme: str  # others than those of PROXY_PORTS lead nowhere
    host: str
    port: int
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{join_address(self.host, self.port)}"

    __repr__ = __str__  # neither a message nor a traceback may show the password


def parse_proxy(text: str) -> Proxy:
    """Parse "http://user:password@host:port"; without a scheme it is HTTP, as for curl. Raises ValueError,
    whose text has no password."""
    try:
        parts: SplitResult = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError("it is not of the form http://HOST:PORT") from None
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", host) or port == 0:
        raise ValueError("it names no host, or a port that is none")
    login = unquote(parts.username or ""), unquote(parts.password or "")
    if any(len(one.encode()) > 255 or not one.isprintable() for one in login) or ":" in login[0]:
        raise ValueError("its login cannot be sent: 255 bytes at most, and no ':' in the name")
    return Proxy(parts.scheme, host, port or PROXY_PORTS.get(parts.scheme, 1080), *login)


@dataclass(frozen=True)
class Proxies:
    """The proxies of a machine, as HTTPS_PROXY, ALL_PROXY and NO_PROXY name them."""

    https: Proxy | None = None  # takes TLS, and the rest where there is no other way
    every: Proxy | None = None  # takes everything: nothing is dialled without it
    # "*", a name and all below it, an address, or a network; with ":port" or not
    exempt: tuple[str, ...] = ()

    def of(self, host: str, port: int) -> tuple[Proxy | None, Proxy | None]:
        """Return the proxies for plain TCP and for TLS to this address."""
        if is_loopback(host) or any(is_exempt(host, port, rule) for rule in self.exempt):
            return None, None
        return self.every, self.https or self.every


NO_PROXIES = Proxies()


def is_loopback(host: str) -> bool:
    """Tell whether a proxy elsewhere would look for this host on its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_exempt(host: str, port: int, rule: str) -> bool:
    """Tell whether an entry of NO_PROXY names this address."""
    if re.fullmatch(r"[^:]+:[0-9]+|\[.+\]:[0-9]+", rule):
        rule, _, only = rule.rpartition(":")
        if int(only) != port:
            return False
    rule, host = rule.strip("[]").lower().lstrip("."), host.lower().rstrip(".")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return rule == "*" or (bool(rule) and (host == rule or host.endswith(f".{rule}")))


def proxies_of(environment: Mapping[str, str]) -> Proxies:
    """Read HTTPS_PROXY, ALL_PROXY and NO_PROXY, in small letters or large, as curl does. Raises Failure
    (usage)."""

    def value(name: str) -> str:
        return environment.get(name.lower(), "") or environment.get(name, "")

    found = {}
    for name in ("HTTPS_PROXY", "ALL_PROXY"):
        try:
            found[name] = parse_proxy(value(name)) if value(name) else None
        except ValueError as error:
            raise Failure("usage", f"{name} names no proxy: {error}", hints=(HINT,)) from None
    exempt = tuple(filter(None, re.split(r"[,\s]+", value("NO_PROXY"))))
    return Proxies(found["HTTPS_PROXY"], found["ALL_PROXY"], exempt)


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
