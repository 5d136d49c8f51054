"""The board at the foot of a terminal: redrawn in place, while other output scrolls above it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, SegmentLines
from rich.text import Text

from cocktail_cli.foreign_text import one_line
from cocktail_cli.ui import GuardedStream, events, farewell, invitation, sentence, showable, unguarded

from .board import Board, is_news

# events that change only the board; the others are said above it
DRAWN = (events.Eval, events.PeerReady, events.Progressed, events.Step)
REDRAW_S = 1.0  # seconds; some cells change by themselves, such as when a peer was last seen
ASK_S = 3.0


class LiveView(RenderHook):
    """Show events on a board. Methods may be called from any thread."""

    def __init__(self, out: TextIO, err: TextIO, color: bool) -> None:
        self.out, self.err = out, err
        encoding, term = getattr(err, "encoding", None) or "utf-8", os.environ.get("TERM", "")
        self.console = Console(
            file=cast("TextIO", GuardedStream(unguarded(err), lambda text: showable(text, encoding, term))),
            force_terminal=True,
            no_color=None if color else True,
            markup=False,
            emoji=False,
            highlight=False,
        )
        self.console.push_render_hook(self)
        self.board = Board()
        self.live = Live(console=self.console)
        self.drawn: list[int] = []  # widths of the lines on the screen
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.begin(self.redraw)

    def show(self, event: events.Event) -> None:
        with self.lock:
            self.board.take(event)
            if isinstance(event, events.RunStarted):
                self.put_away()
                invitation(event, self.out, self.err)
                self.draw()
            elif isinstance(event, events.RunFinished):
                self.close()
                farewell(event, self.out, self.err)
            elif isinstance(event, (events.Left, events.RunPaused)):
                self.leave_board()
                self.board = Board()  # this machine may join again
                self.say(sentence(event))
            elif isinstance(event, events.Progressed) and self.board.progress is None and not self.board.run:
                self.say(event.state)
            else:
                self.say(None if is_news(event) or isinstance(event, DRAWN) else sentence(event))

    def say(self, text: str | None) -> None:
        """Print a line above the board."""
        with self.lock, self.console:
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
            self.board.run, self.board.watched = one_line(str(status["run"])), True
            self.board.look(status)
            self.draw()

    def begin(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="live view", daemon=True).start()

    # ---- the terminal --------------------------------------------------------------------------------------

    def draw(self) -> None:
        with self.lock:
            options = self.console.options.update(width=self.console.width - 1)
            lines = [] if self.over.is_set() else self.console.render_lines(self.board, options, pad=False)
            if not lines:
                self.put_away()
                return
            if not self.live.is_started:
                self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
                self.live.start()
                self.console.show_cursor()  # it stays where this process is ended at once
                sys.stderr = cast("TextIO", GuardedStream(sys.stderr))
            self.live.update(SegmentLines(lines, new_lines=True), refresh=True)
            self.drawn = [Segment.get_line_length(line) for line in lines]

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the rows that lines of the board take beyond their own in a terminal made narrower since."""
        width = max(1, self.console.width)
        more = sum(max(0, cells - 1) // width for cells in self.drawn)
        self.drawn = [min(cells, width) for cells in self.drawn]
        return [Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * more), *renderables]

    def redraw(self) -> None:
        while not self.over.wait(REDRAW_S):
            self.draw()

    def put_away(self) -> None:
        """Erase the board."""
        self.live.transient = True
        self.live.stop()
        self.drawn = []

    def close(self) -> None:
        """Stop redrawing and leave the board on the screen."""
        with self.lock:
            self.leave_board()
            self.over.set()

    def leave_board(self) -> None:
        """Draw the board a last time, without its keys; what follows is printed below it."""
        self.board.over = True
        if self.live.is_started:
            self.draw()
            self.live.stop()
        self.drawn = []
