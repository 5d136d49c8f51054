"""Reach: relays, proxies and TLS on the way to hubs and machines that cannot be dialled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, Lead, Server
from cocktail_cli.machine import joined, own_address, parse_advertised

if TYPE_CHECKING:
    from recipes.errors import Finding
    from transport import RunURL
    from transport.protocol import Route


class Reach(Extension):
    """A relay joins hubs and peers that both dial it; proxies and TLS are on this machine's way out."""

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        from .command import proxy_finding

        return {"proxy": proxy_finding}

    def places(self, options: Mapping[str, Any]) -> Sequence[str]:
        from .command import RELAY_PORT
        from .hub_tunnel import check_relay
        from .proxies import proxies_of

        relay = joined(*parse_advertised(options["relay"], RELAY_PORT, "--relay"))
        check_relay(relay, proxies_of(os.environ))
        return (relay,)

    def lead(self, place: str, server: Server) -> Lead:
        """Make a server reachable through a relay."""
        from .hub_tunnel import HubTunnel
        from .proxies import proxies_of

        return HubTunnel(place, server, proxies_of(os.environ))

    def hub_routes(self, url: RunURL) -> Sequence[Route]:
        from .dialling import hub_routes
        from .proxies import proxies_of

        proxies = proxies_of(os.environ)
        if url.host == own_address():  # local peers dial the address at which their hub listens
            proxies = replace(proxies, exempt=(*proxies.exempt, url.host))
        return hub_routes(url, proxies)

    def machine_routes(self, address: str) -> Sequence[Route]:
        from .dialling import machine_routes
        from .proxies import proxies_of

        return machine_routes(address, proxies_of(os.environ))


extension = Reach()
