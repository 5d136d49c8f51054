"""Diagnosis of slow rounds: which peer lengthens them, and why; which line bounds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, HostParts, PagePart, PeerExtension, PeerParts

if TYPE_CHECKING:
    from transport.hub import Extend

    from .shown_figures import Figures


class Diagnosis(Extension):
    """Peers measure how they spend their time, and the hub names who makes rounds longer."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import Diagnostician

        return Diagnostician

    def peer(self, peer: PeerParts) -> PeerExtension:
        from .peer import TimeKeeper

        return TimeKeeper(peer.recipe.compression.staleness, peer.devices)

    def events(self) -> tuple[type[Any], ...]:
        from .events import Culprit

        return (Culprit,)

    def figures(self) -> type[Figures]:
        from .shown_figures import Figures

        return Figures

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        from .shown_figures import bottleneck_line

        yield from bottleneck_line(status)

    def below_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        from .events import accusation

        yield from map(accusation, status.get("culprits", ()))

    def hubs_line(self, status: Mapping[str, Any]) -> tuple[float, float]:
        from .shown_figures import hubs_line

        return hubs_line(status)

    def page(self) -> PagePart:
        from .shown_figures import SlowRoundsOnPage

        return SlowRoundsOnPage()


extension = Diagnosis()
