"""A table at the foot of a terminal that is redrawn in place, while other output scrolls above it.

Only this module imports rich. The table has no frame and no line wider than the terminal: when a terminal is
made narrower it wraps the lines already drawn, and the rows they then take can be computed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from cocktail_cli.foreign_text import one_line

from . import events
from .board import Board
from .output import unguarded
from .styled_line import Line
from .text_chart import glyphs_for
from .wording import farewell, invitation, sentence

# events that change only the table; the others are said above it
DRAWN = (
    events.Eval,
    events.PeerDeciding,
    events.PeerDeclined,
    events.PeerJoined,
    events.PeerLeft,
    events.PeerReady,
    events.Progressed,
    events.Sample,
    events.Step,
)
# colours by the words of board.py; the 16 of the terminal, which its user has chosen
STYLES = {
    "title": "bold",
    "loss": "cyan",
    "eval": "magenta",
    "good": "green",
    "busy": "yellow",
    "bad": "bold red",
    "dim": "dim",
}
REDRAW_S = 1.0  # seconds; some cells change by themselves, such as when a peer was last seen
ASK_S = 3.0


class LiveView:
    """Show events as a table. Methods may be called from any thread."""

    def __init__(self, out: TextIO, err: TextIO, color: bool) -> None:
        self.out, self.err = out, err
        self.console = Console(file=unguarded(err), no_color=True if not color else None, highlight=False)
        self.encoding = getattr(err, "encoding", None) or "utf-8"
        self.board = Board(glyphs=glyphs_for(self.encoding, os.environ.get("TERM", "")))
        self.lock = threading.RLock()
        self.drawn: list[int] = []  # widths of the lines on the screen
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.above, sys.stderr = sys.stderr, cast("TextIO", StderrAboveTable(self, sys.stderr))

    def show(self, event: events.Event) -> None:
        with self.lock:
            self.board.take(event)
            if isinstance(event, events.RunStarted):
                self.erase()
                invitation(event, self.out, self.err)
                self.draw()
            elif isinstance(event, events.RunFinished):
                self.close()
                farewell(event, self.out, self.err)
            elif isinstance(event, (events.Left, events.RunPaused)):
                self.leave_table()
                self.board = Board(glyphs=self.board.glyphs)  # this machine may join again
                self.say(sentence(event))
            elif isinstance(event, events.Progressed) and self.board.progress is None and not self.board.run:
                self.say(event.state)
            elif isinstance(event, DRAWN):
                self.draw()
            else:
                self.say(sentence(event))

    def say(self, text: str | None) -> None:
        """Print a line above the table."""
        with self.lock, self.console:
            self.erase()
            if text:
                self.console.print(Text(one_line(text, None)), soft_wrap=True)
            self.draw()

    def look_on(self, ask: Callable[[], dict[str, Any]]) -> None:
        """Poll the state of all peers until the view is closed."""

        def looking() -> None:
            from transport.protocol import TransportError

            while not self.over.is_set():
                try:
                    status = ask()
                except TransportError:
                    status = None
                with self.lock:
                    if status is None:
                        self.board.miss()
                    elif not self.over.is_set():
                        self.board.look(status)
                self.over.wait(ASK_S)

        self.begin(looking)

    def watch(self, status: dict[str, Any]) -> None:
        """Show a run that this process takes no part in, from its hub's answers."""
        with self.lock:
            self.board.run, self.board.watched = str(status["run"]), True
            self.board.look(status)
            self.draw()

    def begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="live view", daemon=True)
        self.threads.append(thread)
        thread.start()

    # ---- the terminal --------------------------------------------------------------------------------------

    def draw(self) -> None:
        with self.lock, self.console:
            self.erase()
            if self.over.is_set():
                return
            width, height = self.console.size
            lines = self.board.screen(width - 1, height) if self.board.run else self.board.underway(width - 1)
            for line in lines:
                text = self.styled(line)
                text.truncate(width - 1, overflow="crop")
                self.drawn.append(cell_len(text.plain))
                self.console.print(text, no_wrap=True)
        if not self.threads:
            self.begin(self.redraw)

    def styled(self, line: Line) -> Text:
        """Convert a line to rich's, in characters of the terminal's encoding."""
        text = Text(line.within(self.encoding).text)
        for span in line.spans:
            text.stylize(STYLES[span.style], span.start, span.stop)
        return text

    def redraw(self) -> None:
        while not self.over.wait(REDRAW_S):
            with self.lock:
                if self.drawn:
                    self.draw()

    def erase(self) -> None:
        """Erase the table; in a terminal made narrower since, its lines take more rows than were drawn."""
        width = max(1, self.console.width)
        rows = sum(max(1, -(-line // width)) for line in self.drawn)
        self.drawn = []
        codes = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * min(rows, self.console.height)
        if codes:
            self.console.control(Control(ControlType.CARRIAGE_RETURN, *codes))

    def close(self) -> None:
        """Stop redrawing and leave the table on the screen."""
        with self.lock:
            if not self.over.is_set():
                self.leave_table()
                self.over.set()
                sys.stderr = self.above

    def leave_table(self) -> None:
        """Draw the table a last time, without its keys; what follows is printed below it."""
        self.board.over = True
        if self.drawn:
            self.draw()
        self.drawn = []


class StderrAboveTable:
    """A stand-in for sys.stderr that prints whole lines above the table."""

    def __init__(self, view: LiveView, stream: TextIO) -> None:
        self.view, self.stream, self.begun = view, stream, ""

    def write(self, text: str) -> int:
        if self.view.over.is_set() or not self.view.drawn:
            return self.stream.write(text)
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.view.say(line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
