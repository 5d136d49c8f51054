"""Views of a run's events: a live table on a terminal, plain lines, NDJSON for programs, almost
nothing for -q.

Results (the run URL, the model's folder, JSON) go to stdout and all else to stderr. The live table is in
live_view.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from cocktail_cli.errors import disk_is_full
from cocktail_cli.options import Progress

from .board import megabytes, progress_text, rate_text
from .events import (
    Checkpoint,
    Eval,
    Event,
    Joined,
    Left,
    PageOpened,
    PeerAsks,
    PeerJoined,
    PeerLeft,
    PeerReady,
    Progressed,
    Reached,
    RunFinished,
    RunPaused,
    RunStarted,
    Step,
    Warning,
    as_json,
    timestamp,
)
from .metrics_lines import step_numbers


@dataclass(frozen=True)
class Display:
    """The user's choice of output."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: bool = True
    progress: Progress = "auto"

    def live(self, stream: TextIO) -> bool:
        """Tell whether a table that redraws itself is useful on this stream."""
        if self.progress == "auto":
            dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))
            return stream.isatty() and not dumb
        return self.progress == "rich"


class View(Protocol):
    """A sink for events. Both methods are called from the main thread only."""

    def show(self, event: Event) -> None: ...
    def close(self) -> None: ...


@contextmanager
def open_view(display: Display) -> Iterator[View]:
    """Open the view that `display` selects, and close it however the block ends."""
    view = DiskFullTolerantView(choose_view(display))
    try:
        yield view
    finally:
        view.close()


class DiskFullTolerantView:
    """A view whose output may go to a file on a full disk: training goes on, and later output is tried
    again.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    def show(self, event: Event) -> None:
        with suppressed_if_full():
            self.view.show(event)

    def close(self) -> None:
        with suppressed_if_full():
            self.view.close()


def poll_status(view: View, ask: Callable[[], dict[str, Any]]) -> None:
    """Have a view that shows all peers call `ask` periodically; other views ignore it."""
    inner = view.view if isinstance(view, DiskFullTolerantView) else view
    if hasattr(inner, "look_on"):
        inner.look_on(ask)


@contextmanager
def suppressed_if_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise


def choose_view(display: Display) -> View:
    if display.json:
        return JsonView(sys.stdout)
    if display.quiet:
        return QuietView(sys.stdout, sys.stderr)
    if display.live(sys.stderr):
        from .live_view import LiveView

        return LiveView(sys.stdout, sys.stderr, display.color)
    return PlainView(sys.stdout, sys.stderr, steps=display.progress != "none", verbose=display.verbose)


# ---- for programs ------------------------------------------------------------------------------------------


class JsonView:
    """Write every event as a line of JSON to stdout."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def show(self, event: Event) -> None:
        print(as_json(event), file=self.out, flush=True)

    def close(self) -> None:
        self.out.flush()


class QuietView:
    """Write the run URL, the model's folder, warnings, and requests to join."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err

    def show(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            print(event.url, file=self.out, flush=True)
        elif isinstance(event, RunFinished):
            print(event.model, file=self.out, flush=True)
        elif isinstance(event, (Warning, PeerAsks)):
            print(sentence(event), file=self.err, flush=True)

    def close(self) -> None:
        self.out.flush()


# ---- for people --------------------------------------------------------------------------------------------


def invitation(event: RunStarted, out: TextIO, err: TextIO) -> None:
    """Print a run's first words. The run URL stands alone on stdout, unwrapped."""
    size = (
        f"{event.parameters / 1e6:,.2f} M parameters"
        if event.parameters < 1e9
        else (f"{event.parameters / 1e9:,.2f} B parameters")
    )
    print(f"recipe    {event.recipe}  sha256 {event.recipe_hash[:8]}", file=err)
    print(f"training  {size}, {event.steps} steps", file=err)
    if event.round:
        print(f"resumed   {event.round} rounds are committed; peers that were here come back", file=err)
    print(f"reach     {event.reach}", file=err)
    print("Pass on the next line; whoever has it types `cocktail join` and the line:\n", file=err, flush=True)
    print(event.url, file=out, flush=True)
    folder = event.output_dir
    print(
        f"\nUseful: cocktail status {event.run} · cocktail stop {event.run} · log: {folder}/cocktail.log\n",
        file=err,
        flush=True,
    )


def farewell(event: RunFinished, out: TextIO, err: TextIO) -> None:
    """Print a run's last words: where the model is, and the command to type next."""
    loss = "" if event.eval_loss is None else f", held-out loss {event.eval_loss:.4f}"
    of = f" of {event.planned}" if event.planned > event.steps else ""
    said = f"{event.run} is over: {event.reason}; {event.steps}{of} steps{loss}. The model:"
    print(said, file=err, flush=True)
    print(event.model, file=out, flush=True)
    print(f'Next: cocktail generate {event.model} "Once upon a time"', file=err, flush=True)


def sentence(event: Event) -> str | None:
    """Format an event as a line; None for steps and for events that other functions print."""
    if isinstance(event, Joined):
        fetch = f", {megabytes(event.download_bytes)} to download" if event.download_bytes else ""
        return f"joined {event.run} as {event.peer}: recipe {event.recipe}{fetch}"
    if isinstance(event, PageOpened):
        return f"page: {event.url}"
    if isinstance(event, PeerJoined):
        return f"{event.peer} joined" + (f" ({event.hardware})" if event.hardware else "")
    if isinstance(event, Reached):
        return f"reach: confirmed by {event.peer}, from {event.where}"
    if isinstance(event, PeerReady):
        return f"{event.peer} is ready, after {event.joining_s:.1f} s"
    if isinstance(event, PeerAsks):
        what = f" ({event.hardware})" if event.hardware else ""
        return f"{event.peer}{what} asks to join: cocktail peers RUN --approve {event.key}, or --deny"
    if isinstance(event, PeerLeft):
        return f"{event.peer} left: {event.reason.removeprefix('left: ')}"
    if isinstance(event, Eval):
        return f"eval step={event.step} loss={event.loss:.4f}"
    if isinstance(event, Checkpoint):
        return f"snapshot of round {event.round} in {event.model}: {megabytes(event.bytes)}"
    if isinstance(event, RunPaused):
        return f"{event.run} is paused after {event.steps} of {event.planned} steps"
    if isinstance(event, Warning):
        return f"warning: {event.message}"
    if isinstance(event, Left):
        sent = f"sent {megabytes(event.up_bytes)}, received {megabytes(event.down_bytes)}"
        return f"left {event.run}: {event.reason}; {event.steps} steps, {sent}"
    return None


def step_line(event: Step, verbose: int) -> str:
    """Format a step as `step=131/452 round=131 loss=1.8420 peers=2 ...`, for `cut` and `awk`."""
    fields = [f"step={event.step}/{event.steps}", f"round={event.round}"]
    if event.loss is not None:
        fields.append(f"loss={event.loss:.4f}")
    if event.lr is not None:
        fields.append(f"lr={event.lr:.1e}")
    fields.append(f"peers={event.peers}")
    numbers = step_numbers(event)
    for key, name, digits in (("tokens_per_s", "tok_s", 0), ("step_s", "step_s", 2), ("sync_s", "sync_s", 2)):
        if numbers[key]:
            fields.append(f"{name}={numbers[key]:.{digits}f}")
    members = max(len(event.up_bytes), 1)
    fields.append(f"up_kb={sum(event.up_bytes.values()) / members / 1e3:.1f}")
    fields.append(f"down_kb={sum(event.down_bytes.values()) / max(len(event.down_bytes), 1) / 1e3:.1f}")
    if event.ratio_fp16:
        fields.append(f"ratio_fp16={event.ratio_fp16:.1f}")
    if event.step_s and event.step < event.steps:
        fields.append(f"eta_s={event.step_s * (event.steps - event.step):.0f}")
    if verbose:
        fields.append(f"fingerprint={event.fingerprint}")
        fields += [f"{peer}={up}/{event.down_bytes.get(peer, 0)}" for peer, up in event.up_bytes.items()]
    return " ".join(fields)


class PlainView:
    """Write one line per event with its time, for logs and pipes. Progress appears on a change of
    state and every
    ten seconds.
    """

    def __init__(self, out: TextIO, err: TextIO, steps: bool = True, verbose: int = 0) -> None:
        self.out, self.err, self.steps, self.verbose = out, err, steps, verbose
        self.state, self.told = "", 0.0
        self.every = 1  # steps between two lines

    def show(self, event: Event) -> None:
        if isinstance(event, (RunStarted, Joined)):
            self.every = event.logging_steps
        if isinstance(event, RunStarted):
            invitation(event, self.out, self.err)
        elif isinstance(event, RunFinished):
            farewell(event, self.out, self.err)
        elif isinstance(event, Step):
            if self.steps and event.step % self.every == 0:
                self.line(step_line(event, self.verbose))
        elif isinstance(event, Progressed):
            self.progress(event)
        else:
            self.line(sentence(event) or "")

    def progress(self, event: Progressed) -> None:
        now = time.monotonic()
        if event.state == self.state and now - self.told < 10:
            return
        self.state, self.told = event.state, now
        self.line(event.state + progress_text(event) + rate_text(event))

    def line(self, text: str) -> None:
        print(f"{timestamp()} {text}", file=self.err, flush=True)

    def close(self) -> None:
        self.err.flush()
