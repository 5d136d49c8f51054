"""Passing: peers that accept connections pass packets on, and the run's files to newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Crossing, Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport.hub import Extend

    from .bodies import PassingStatus


class Passing(Extension):
    """The hub names who passes what on; peers fetch it there, and from the hub what they do not get."""

    def hub(self, host: HostParts) -> Extend | None:
        from .keys import mode_of

        if (mode := mode_of(host.recipe)) == "off":
            return None
        from .hub import PassingCoordinator

        return partial(PassingCoordinator, mode=mode)

    def peer(self, peer: PeerParts) -> PeerExtension | None:
        from .keys import mode_of

        if mode_of(peer.recipe) == "off":
            return None
        from cocktail_cli.machine import own_keys
        from transport.direct import link_to

        from .peer import PassingPeer

        return PassingPeer(peer.link, partial(link_to, peer.link, own_keys()), peer.server)

    def crossing(self, recipe: Recipe, reachable: int, peers: int) -> Crossing | None:
        from .keys import mode_of
        from .passing_choice import packets_over

        mode, helpers = mode_of(recipe), min(reachable, peers)
        if mode == "off" or not helpers or peers < 2:
            return None
        return Crossing(*packets_over(helpers, peers), always=mode == "always")

    def figures(self) -> type[PassingStatus]:
        from .bodies import PassingStatus

        return PassingStatus

    def others_send(self, status: Mapping[str, Any]) -> bool:
        return bool(status.get("passing"))


extension = Passing()
