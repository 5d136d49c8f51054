"""The ways to a hub, or to another machine, in the order in which they are tried: its own address, then each
relay, plainly and by TLS; all of them with or without a proxy."""

from __future__ import annotations

import hashlib
import re

from transport.protocol import Route, RunURL, UrlError, parse_address
from transport.wire import TcpRoute

from .dialling import FarRoute
from .proxies import NO_PROXIES, Proxies

RUN = "run"  # a relay's name for what a peer wants: <run name>.run
NAME = re.compile(r"[0-9a-f]{32}")  # of a run, or of a machine, at relays


def run_name(key: str) -> str:
    """Return a run's name at relays: a hash of its hub's public key, which a name must not give away."""
    return hashlib.sha256(b"cocktail relay\0" + key.encode()).hexdigest()[:32]


def hub_routes(url: RunURL, proxies: Proxies = NO_PROXIES) -> tuple[Route, ...]:
    """Return the ways to a hub."""
    direct = [
        route if route.proxy else TcpRoute(url.host, url.port)
        for route in plain_routes(url.host, url.port, "", proxies)
    ]
    name = f"{run_name(url.key)}.{RUN}"
    return (*direct, *(route for relay in url.places for route in relay_routes(relay, name, proxies)))


def plain_routes(host: str, port: int, name: str, proxies: Proxies) -> tuple[FarRoute, ...]:
    """Return the ways to an address without TLS. A proxy that is for TLS is used where nothing else works."""
    tcp, tls = proxies.of(host, port)
    last = () if tls in (None, tcp) or tcp else (FarRoute(host, port, name, proxy=tls),)
    return (FarRoute(host, port, name, proxy=tcp), *last)


def relay_routes(relay: str, name: str, proxies: Proxies = NO_PROXIES) -> tuple[FarRoute, ...]:
    """Return the ways to the relay at "host:port". Raises UrlError."""
    host, port = parse_address(relay)
    tls = FarRoute(host, port, name, tls=True, proxy=proxies.of(host, port)[1])
    return (*plain_routes(host, port, name, proxies), tls)


def machine_routes(address: str, proxies: Proxies = NO_PROXIES) -> tuple[FarRoute, ...]:
    """Return the ways to a machine at "host:port/name" of a relay. Raises UrlError."""
    relay, _, name = address.partition("/")
    if not NAME.fullmatch(name):
        raise UrlError(f"the name {name[:40]!r} at the relay {relay[:80]} is not of 32 hex digits")
    return relay_routes(relay, f"{name}.{RUN}", proxies)
