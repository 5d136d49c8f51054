"""The board: a run at the foot of a terminal, redrawn in place."""

from __future__ import annotations

from typing import TextIO

from cocktail_cli.assembly import Extension, Screen


class BoardOfRun(Extension):
    """Runs are drawn where a terminal shows them, and rich is imported there: it takes a while."""

    def open_screen(self, out: TextIO, err: TextIO, color: bool) -> Screen:
        from .live_view import LiveView

        return LiveView(out, err, color)


extension = BoardOfRun()
