"""The dashboard: runs as a page in the browser of this machine, and as one file of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocktail_cli.assembly import Extension, View, ViewParts


class Dashboard(Extension):
    """Both are read from a run's folder or its hub's answers, by processes of their own."""

    def views(self, parts: ViewParts) -> Sequence[View]:
        """Serve the page of a launch, by a process that starts once its hub listens."""
        from .page_process import PageProcess

        return (PageProcess(parts),)

    def events(self) -> tuple[type[Any], ...]:
        from .events import PageOpened

        return (PageOpened,)


extension = Dashboard()
