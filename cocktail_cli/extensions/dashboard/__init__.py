"""The dashboard: runs as a page in the browser of this machine, and as one file of HTML."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cocktail_cli.assembly import Extension, View, ViewParts
from cocktail_cli.host import start_command
from cocktail_cli.ui import Event, RunStarted, Warning, events


@events.event
class PageOpened(events.OfExtension):
    """The dashboard is served on this machine, at an address that contains its key."""

    url: str

    def sentence(self) -> str:
        return f"page: {self.url}"

    def recorded(self) -> PageOpened:
        """Leave out the key."""
        return PageOpened(self.url.partition("#")[0])


class PageProcess:
    """Runs `cocktail dashboard` from the start of a run until its end, and a little longer."""

    def __init__(self, parts: ViewParts) -> None:
        self.parts = parts
        self.process: subprocess.Popen[str] | None = None

    def show(self, event: Event) -> None:
        """Start it once there is a run to show."""
        if isinstance(event, RunStarted):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            words = ["dashboard", str(self.parts.folder), "--life-line", "--json"]
            self.process = start_command(words, **pipes)
            threading.Thread(target=self._listen, args=(self.process,), name="page", daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Tell where the page is, or why there is none."""
        assert process.stdout is not None
        said = json.loads(process.stdout.readline().strip() or "{}")
        if "url" in said:
            self.parts.tell(PageOpened(said["url"]))
        else:
            why = said.get("error", {}).get("message", "its process ended")
            self.parts.tell(Warning(f"there is no page: {why}"))

    def close(self) -> None:
        """Close its stdin, at which it ends."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):  # it has ended
                self.process.stdin.close()


class Dashboard(Extension):
    """Both are read from a run's folder or its hub's answers, by processes of their own."""

    def views(self, parts: ViewParts) -> Sequence[View]:
        """Serve the page of a launch, by a process that starts once its hub listens."""
        return (PageProcess(parts),)

    def events(self) -> tuple[type[Any], ...]:
        return (PageOpened,)


extension = Dashboard()
