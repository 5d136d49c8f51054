"""Ctrl-C, SIGTERM and a closed terminal: the first asks to leave in good order, the second ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cocktail_cli.errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def leave_on_signal(leave: Callable[[str], None]) -> Iterator[None]:
    """Call `leave` with a word for people at the first signal; raise Interrupted at the second.

    `leave` runs in the main thread between two lines of whatever it does: it may only set flags.
    """
    count = 0

    def taken(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise Interrupted(signum)
        leave("Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name)

    before = {signum: signal.signal(signum, taken) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
