"""The proxies that this machine's environment names: HTTPS_PROXY, ALL_PROXY and NO_PROXY."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from cocktail_cli.errors import Failure
from transport.protocol import join_address

# by scheme: where a URL names none; 1080 else
PROXY_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
HINT = "http://USER:PASSWORD@HOST:PORT, or socks5://HOST:PORT; unset it to dial without a proxy"


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
