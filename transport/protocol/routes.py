"""Addresses, and the ways that lead to them."""

from __future__ import annotations

import re
from typing import Protocol

from .errors import UrlError


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


class OpenRoute(Protocol):
    """A route while connections are made along it."""

    @property
    def port(self) -> int:
        """Return the port of 127.0.0.1 that leads along it."""

    def close(self) -> None: ...


class Route(Protocol):
    """One way to a server: a value, whose text names it for people. Its methods block; all but `open` raise
    Unreachable.
    """

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def kind(self) -> str:
        """Return "direct", or what it leads through."""

    def probe(self) -> str:
        """Return the IP address of the host once it answers; empty: an open route leads there."""

    def open(self) -> OpenRoute | None:
        """Let connections be made along it; None: libzmq makes them by itself."""

    def seconds(self, timeout: float) -> float:
        """Measure how long a connection to the server takes."""

    def remark(self) -> str:
        """Return a clause on what its user should know, once it works; empty: there is nothing."""
