"""Views of a run's events: plain lines, NDJSON for programs, almost nothing for -q; and progress as events.

Results (the run URL, the model's folder, JSON) go to stdout and all else to stderr. An extension may draw on
a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from cocktail_cli.assembly import Screen, View, open_screen
from cocktail_cli.errors import disk_is_full

from . import events
from .events import Event, Progressed
from .output import put, put_own
from .wording import farewell, invitation, progress_text, sentence, step_line

EVERY_S = 0.5  # least seconds between two events
KNOWN_S = 1.0  # seconds before a rate is reported
OF_LATE_S = 10.0  # seconds over which the rate is averaged: a line may slow down


class ProgressMeter:
    """A callback `(done, total)` that emits Progressed events; a total of 0 means unknown."""

    def __init__(self, tell: Callable[[Event], None], state: str, unit: str) -> None:
        self.tell, self.state, self.unit = tell, state, unit
        self.told = time.monotonic()
        self.marks = deque[tuple[float, int]]()  # (time, done), from the first call on
        self.begun = False  # an event was emitted, so the end must be as well

    def __call__(self, done: int, total: int = 0) -> None:
        now = time.monotonic()
        if not self.marks:
            self.marks.append((now, done))
        if now < self.told + EVERY_S and not (self.begun and done == total):
            return
        self.told, self.begun = now, True
        self.marks.append((now, done))
        while len(self.marks) > 2 and self.marks[1][0] <= now - OF_LATE_S:
            self.marks.popleft()
        began, had = self.marks[0]
        rate = (done - had) / (now - began) if now - began >= KNOWN_S else 0.0
        eta = max(0, total - done) / rate if rate > 0 and total else None  # a total may grow
        self.tell(Progressed(self.state, done, total, self.unit, round(rate, 1), eta))


Progress = Literal["auto", "rich", "plain", "none"]


@dataclass(frozen=True)
class Display:
    """The user's choice of output."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: bool = True
    progress: Progress = "auto"
    life_line: bool = False  # whoever reads the output may end first; stdin then says so

    def live(self, stream: TextIO) -> bool:
        """Tell whether a screen that redraws itself is useful on this stream."""
        if self.progress == "auto":
            dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))
            return stream.isatty() and not dumb
        return self.progress == "rich"


@contextmanager
def open_view(display: Display) -> Iterator[View]:
    """Open the view that `display` selects, and close it however the block ends."""
    inner: View
    if display.json:
        inner = JsonView(sys.stdout)
    elif display.quiet:
        inner = QuietView(sys.stdout, sys.stderr)
    else:
        screen = open_screen(sys.stdout, sys.stderr, display.color) if display.live(sys.stderr) else None
        steps = display.progress != "none"
        inner = screen or PlainView(sys.stdout, sys.stderr, steps, display.verbose)
    view = TolerantView(inner, display.life_line)
    try:
        yield view
    finally:
        view.close()


class TolerantView:
    """A view whose output cannot end the training: it may go to a file on a full disk.

    Args:
        life_line: a closed pipe ends nothing either, as the life line then asks to leave in good order.
    """

    def __init__(self, view: View, life_line: bool = False) -> None:
        self.view, self.life_line = view, life_line

    def show(self, event: events.Event) -> None:
        with self.tolerated():
            self.view.show(event)

    def close(self) -> None:
        with self.tolerated():
            self.view.close()

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not disk_is_full(error) and not (self.life_line and isinstance(error, BrokenPipeError)):
                raise


def poll_status(view: View, ask: Callable[[], dict[str, Any]]) -> None:
    """Have a view that shows all peers call `ask` periodically; other views ignore it."""
    inner = view.view if isinstance(view, TolerantView) else view
    if isinstance(inner, Screen):
        inner.look_on(ask)


# ---- for programs ------------------------------------------------------------------------------------------


class JsonView:
    """Write every event as a line of JSON to stdout."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def show(self, event: events.Event) -> None:
        put(events.as_json(event), self.out)

    def close(self) -> None:
        self.out.flush()


class QuietView:
    """Write the run URL, the model's folder, warnings, and requests to join."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err

    def show(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            put_own(event.url, self.out)
        elif isinstance(event, events.RunFinished):
            put_own(event.model, self.out)
        elif isinstance(event, (events.Warning, events.PeerAsks)):
            put(sentence(event) or "", self.err)

    def close(self) -> None:
        self.out.flush()


# ---- for people --------------------------------------------------------------------------------------------


class PlainView:
    """Write one line per event with its time, for logs and pipes; progress every ten seconds."""

    def __init__(self, out: TextIO, err: TextIO, steps: bool = True, verbose: int = 0) -> None:
        self.out, self.err, self.steps, self.verbose = out, err, steps, verbose
        self.state, self.told = "", 0.0
        self.every = 1  # steps between two lines

    def show(self, event: events.Event) -> None:
        if isinstance(event, (events.RunStarted, events.Joined)):
            self.every = event.logging_steps
        if isinstance(event, events.RunStarted):
            invitation(event, self.out, self.err)
        elif isinstance(event, events.RunFinished):
            farewell(event, self.out, self.err)
        elif isinstance(event, events.Step):
            if self.steps and event.step % self.every == 0:
                self.line(step_line(event, self.verbose))
        elif isinstance(event, events.Progressed):
            self.progress(event)
        else:
            self.line(sentence(event) or "")

    def progress(self, event: events.Progressed) -> None:
        now = time.monotonic()
        if event.state == self.state and now - self.told < 10:
            return
        self.state, self.told = event.state, now
        self.line(event.state + progress_text(event))

    def line(self, text: str) -> None:
        put(f"{events.timestamp()} {text}", self.err)

    def close(self) -> None:
        self.err.flush()
