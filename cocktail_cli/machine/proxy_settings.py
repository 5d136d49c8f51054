"""The proxies that this machine's environment names, and run URLs that are dialled through them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure

from .network_address import local_host, own_address

if TYPE_CHECKING:
    from transport import RunURL
    from transport.protocol import CurveKeys, Proxies
    from transport.relay import HubTunnel

HINT = "http://USER:PASSWORD@HOST:PORT, or socks5://HOST:PORT; unset it to dial without a proxy"


def proxies_of(environment: Mapping[str, str]) -> Proxies:
    """Read HTTPS_PROXY, ALL_PROXY and NO_PROXY, in small letters or large, as curl does. Raises Failure
    (usage)."""
    from transport.protocol import Proxies, parse_proxy

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


def url_to_dial(text: str) -> RunURL:
    """Parse a run URL, and have it dialled through this machine's proxies. Raises UrlError, Failure."""
    from transport import parse_url

    url, proxies = parse_url(text), proxies_of(os.environ)
    if url.host == own_address():  # local peers dial the address at which their hub listens
        proxies = replace(proxies, exempt=(*proxies.exempt, url.host))
    return replace(url, proxies=proxies)


def open_tunnel(
    relay: str, keys: CurveKeys, bind: str, port: int, warn: Callable[[str], None], what: str = "the run"
) -> HubTunnel:
    """Make what listens on `bind` and `port` here reachable through a relay, until the tunnel is closed.

    `relay`: its "host:port". `what`: what listens there, as people call it.
    """
    from transport.relay import HubTunnel

    return HubTunnel(relay, keys, (local_host(bind), port), warn, proxies_of(os.environ), what)
