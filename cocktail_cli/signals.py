"""Ctrl-C, SIGTERM and a closed terminal: the first asks to leave in good order, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


LEAVE_WITHIN = 22.0  # seconds from the wish to leave to the goodbye, whatever this process is at
PAUSE_WITHIN = 600.0  # where nobody takes the machine away: what is kept for the return is written whole
SAME_S = 0.5  # `timeout` and systemd tell the process and then its group, a terminal and its shell likewise


class Asked(BaseException):
    """The first signal, where there is nothing to finish. Not an Exception: nothing may swallow it."""


class Wish:
    """The wish to leave, as signals bring it."""

    def __init__(self) -> None:
        self.asked = ""  # the first signal, in a word for people
        self.signum, self.at = 0, 0.0
        self.ends = False  # there is nothing to finish: the first signal ends what is going on

    @contextmanager
    def ending(self) -> Iterator[None]:
        """In here nothing polls the wish, and nothing is in flight: it is raised, as Asked."""
        self.ends = True
        try:
            if self.asked:
                raise Asked
            yield
        finally:
            self.ends = False


@contextmanager
def leave_on_signal(
    leave: Callable[[str], None], at_once: Callable[[], None] = lambda: None
) -> Iterator[Wish]:
    """Call `leave` with a word for people at the first signal; `at_once`, and raise Interrupted, at the
    second.

    Both run in the main thread between two lines of whatever it does: they may only set flags.
    """
    wish = Wish()

    def taken(signum: int, frame: FrameType | None) -> None:
        if signum == wish.signum != signal.SIGINT and time.monotonic() < wish.at + SAME_S:
            return
        if wish.asked:
            at_once()
            raise Interrupted(signum)
        wish.asked = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        wish.signum, wish.at = signum, time.monotonic()
        leave(wish.asked)
        if wish.ends:
            raise Asked

    # SIGHUP is ignored under nohup, and is to stay so
    wanted = [s for s in SIGNALS if s == signal.SIGINT or signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, taken) for signum in wanted}
    try:
        yield wish
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def leave_in_time(
    by: Callable[[], float], goodbye: Callable[[], None], status: Callable[[], int]
) -> Iterator[None]:
    """In here this process ends at the monotonic time `by` at the latest, after a `goodbye`: a long batch or
    a slow disk do not look at the wish to leave.
    """
    over = threading.Event()

    def watch() -> None:
        while time.monotonic() < by():
            if over.wait(0.2):
                return
        threading.Timer(2.0, lambda: os._exit(status())).start()  # should the goodbye be what is stuck
        goodbye()
        os._exit(status())

    threading.Thread(target=watch, name="leave in time", daemon=True).start()
    try:
        yield
    finally:
        over.set()
