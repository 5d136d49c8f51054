"""The ways to a hub: its own address, its relay's, and TLS to that relay; each with or without a proxy.

All of them are values. The addresses come with the run URL, the proxies from whoever parsed it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from .errors import UrlError

RUN = "run"  # a relay's name for what a peer wants: <run name>.run
NAME = re.compile(r"[0-9a-f]{32}")  # of a run, or of a machine, at relays
# by scheme: where a URL names none; 1080 else
PROXY_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port" to (host, port). Raises UrlError."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        named = bool(re.fullmatch(r"[0-9A-Fa-f:.%a-z]+", host))
    else:
        named = bool(re.fullmatch(r"[A-Za-z0-9._-]+", host))
    if not colon or not host or not named:
        raise UrlError(f"the address {address[:80]!r} in the run URL is not of the form host:port")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UrlError(f"the port {port[:20]!r} in the run URL is not a number from 1 to 65535")
    return host, int(port)


# ---- proxies -----------------------------------------------------------------------------------------------


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


# ---- routes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """One way to a server: an address, what to ask a relay for there, and what carries the bytes."""

    host: str
    port: int
    name: str = ""  # what a relay is asked for; "": the server itself is there
    tls: bool = False  # a WebSocket over TLS carries them
    proxy: Proxy | None = None

    def __str__(self) -> str:
        where = f"the relay {self.address}" if self.name else self.address
        by = " by TLS" if self.tls else ""
        return f"{where}{by}" + (f" through the proxy {self.proxy}" if self.proxy else "")

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def plain(self) -> bool:
        """True where libzmq can dial it by itself."""
        return not self.tls and not self.name and self.proxy is None


def run_name(key: str) -> str:
    """Return a run's name at relays: a hash of its hub's public key, which a name must not give away."""
    return hashlib.sha256(b"cocktail relay\0" + key.encode()).hexdigest()[:32]


def relayed_address(relay: str, key: str) -> str:
    """Return the address of what has claimed this key's name at the relay at "host:port"."""
    return f"{relay}/{run_name(key)}"


def directness(address: str) -> int:
    """Rank a machine's address: 2 is dialled directly, 1 through a relay, 0 not at all."""
    return 0 if not address else 1 if "/" in address else 2


def dials(here: str, there: str, *, first: bool) -> bool:
    """Tell whether of two machines the one at `here` dials the one at `there`: the more direct address is
    dialled, and of equal ones that of the second machine."""
    return bool(there) and (directness(there), first) > (directness(here), False)


def plain_routes(host: str, port: int, name: str, proxies: Proxies) -> tuple[Route, ...]:
    """Return the ways to an address without TLS. A proxy that is for TLS is used where nothing else works."""
    tcp, tls = proxies.of(host, port)
    last = () if tls in (None, tcp) or tcp else (Route(host, port, name, proxy=tls),)
    return (Route(host, port, name, proxy=tcp), *last)


def relay_routes(relay: str, name: str, proxies: Proxies = Proxies()) -> tuple[Route, ...]:
    """Return the ways to the relay at "host:port", in the order in which they are tried. Raises UrlError."""
    host, port = parse_address(relay)
    tls = Route(host, port, name, tls=True, proxy=proxies.of(host, port)[1])
    return (*plain_routes(host, port, name, proxies), tls)


def machine_routes(address: str, proxies: Proxies = Proxies()) -> tuple[Route, ...]:
    """Return the ways to a machine at "host:port", or at "host:port/name" of a relay. Raises UrlError."""
    place, slash, name = address.partition("/")
    if not slash:
        return (Route(*parse_address(place)),)
    if not NAME.fullmatch(name):
        raise UrlError(f"the name {name[:40]!r} at the relay {place[:80]} is not of 32 hex digits")
    return relay_routes(place, f"{name}.{RUN}", proxies)
