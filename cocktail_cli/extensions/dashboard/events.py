"""The event that names the page of a launch."""

from __future__ import annotations

from cocktail_cli.ui import events


@events.event
class PageOpened(events.OfExtension):
    """The dashboard is served on this machine, at an address that contains its key."""

    url: str

    def sentence(self) -> str:
        return f"page: {self.url}"

    def recorded(self) -> PageOpened:
        """Leave out the key."""
        return PageOpened(self.url.partition("#")[0])
