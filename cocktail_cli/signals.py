"""Ctrl-C, SIGTERM and a closed terminal: the first asks to leave in good order, the last ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
LEAVE_WITHIN = 22.0  # seconds from the first signal to the end, whatever this process does
GOODBYE_WITHIN = 5.0  # seconds from Ctrl-C to the goodbye: a person waits, and the others for its work
PAUSE_WITHIN = 600.0  # the same for a pause: nobody takes the machine away, so the checkpoint is completed
ENDS_WITHIN = 8.0  # seconds from Ctrl-C to the end, where nothing is in flight
WORDS_S = 2.0  # seconds that the last words have before the process ends
SAME_S = 0.5  # `timeout` and systemd signal a process and its group, systemd with SIGTERM and SIGHUP


class StopAsked(BaseException):
    """The first signal, where nothing is in flight. Not an Exception: no handler may swallow it."""


class LeaveRequest:
    """The request to leave that the first signal makes."""

    def __init__(self) -> None:
        self.reason = ""  # the first signal, for people
        self.signum, self.at = 0, 0.0
        self.raises = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopAsked at the first signal in this block, which must have nothing in flight."""
        self.raises = True
        try:
            if self.reason:
                raise StopAsked
            yield
        finally:
            self.raises = False


class Interruption:
    """Ctrl-C where there is nothing to end in good order: it raises KeyboardInterrupt.

    The process ends soon after in any case: a library that is being imported may swallow the exception, or
    turn it into an error of its own.
    """

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle Ctrl-C so in this block, unless it is ignored."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            if self.came and hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, 0)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.signal(signal.SIGALRM, lambda *_: os._exit(Interrupted(signum).exit))
            signal.setitimer(signal.ITIMER_REAL, ENDS_WITHIN)
        raise KeyboardInterrupt


@contextmanager
def leave_on_signal(
    leave: Callable[[str], None],
    at_once: Callable[[], None] = lambda: None,
    second: Callable[[str], None] | None = None,
) -> Iterator[LeaveRequest]:
    """Call `leave` with the reason at the first signal; call `at_once` and raise Interrupted at the next.

    All run in the main thread between two bytecodes of whatever it does: they may only set flags. In another
    thread no signal is handled.

    Args:
        second: is called at a second Ctrl-C, which then does not end at once.
    """
    request, left = LeaveRequest(), [second] if second else []

    def handle(signum: int, frame: FrameType | None) -> None:
        both = signal.SIGINT not in (signum, request.signum)
        if request.reason and both and time.monotonic() < request.at + SAME_S:
            return
        if request.reason and left and signum == signal.SIGINT:
            left.pop()("Ctrl-C")
            return
        if request.reason:
            at_once()
            raise Interrupted(signum)
        request.reason = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        request.signum, request.at = signum, time.monotonic()
        leave(request.reason)
        if request.raises:
            raise StopAsked

    # nohup has SIGHUP ignored, which is to stay so
    handled = [s for s in SIGNALS if s == signal.SIGINT or signal.getsignal(s) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    before = {signum: signal.signal(signum, handle) for signum in handled}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def leave_in_time(
    by: Callable[[], Sequence[float]], words: Sequence[Callable[[], None]], status: Callable[[], int]
) -> Iterator[None]:
    """Say the first of `words` at the first of these monotonic times, and so on, and end this process after
    the last, once all are said or WORDS_S have passed: a long batch does not poll for requests."""
    over = threading.Event()

    def watch() -> None:
        saying = [threading.Thread(target=word, daemon=True) for word in words]  # any of them may hang
        for which, thread in enumerate(saying):
            while time.monotonic() < by()[which]:
                if over.wait(0.2):
                    return
            thread.start()
        end = time.monotonic() + WORDS_S
        for thread in saying:
            thread.join(max(0.0, end - time.monotonic()))
        os._exit(status())

    threading.Thread(target=watch, name="leave in time", daemon=True).start()
    try:
        yield
    finally:
        over.set()
