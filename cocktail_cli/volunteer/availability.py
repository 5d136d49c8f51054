"""One stay after the other: this machine takes part while its owner's terms allow it, waits in between.

Between two stays the peer is out of the run: it has said goodbye, its residual is kept (kept_peer.py), and
the GPU's memory is given back but for what CUDA itself holds, some hundred MB.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Protocol

from cocktail_cli.errors import EXIT
from cocktail_cli.signals import Asked, leave_on_signal
from cocktail_cli.ui import Event, Progressed

from .lending_terms import Gauge, Mood, Terms, decide
from .nvml import NvidiaGpus, nvidia_gpus

LOOK_S = 2.0  # seconds between two looks


class Watch:
    """Looks at clock and GPU, and remembers what was decided."""

    def __init__(self, terms: Terms, devices: list[str], told: Callable[[str], None]) -> None:
        self.terms, self.mood = terms, Mood()
        self.gpus: NvidiaGpus | None = nvidia_gpus(devices, told) if terms.watches_gpu else None

    def look(self, ours: set[int] | None) -> Mood:
        """`ours`: the processes of the peer; None: it does not train at present."""
        gauge = self.gpus.look(ours) if self.gpus is not None else Gauge()
        self.mood = decide(self.terms, self.mood, datetime.now(), time.monotonic(), gauge)
        return self.mood

    @contextmanager
    def during(self, ours: set[int], leave: Callable[[str], None]) -> Iterator[None]:
        """In here `leave` is called, with a word for people, once the terms no longer allow to take part.
        `ours`: the processes of the peer.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                mood = self.look(ours)
                if mood.pause or mood.over:
                    leave(mood.pause or mood.over)
                    return

        if self.terms.any:
            threading.Thread(target=watch, name="terms", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def wait(self, show: Callable[[Event], None]) -> int | None:
        """Until the terms allow to take part; an exit status where this machine is to leave for good."""
        told = ""
        with leave_on_signal(lambda why: None) as wish:
            try:
                with wish.ending():
                    while (mood := self.look(None)).pause:
                        if mood.pause != told:
                            told = mood.pause
                            show(Progressed(f"paused: {told}"))
                        time.sleep(LOOK_S)
            except Asked:
                return EXIT["lost"] if wish.asked == "SIGTERM" else 0
        if mood.over:
            show(Progressed(f"not taking part any more: {mood.over}"))
            return 0
        return None


class Stay(Protocol):
    """One stay that has ended (join.Membership)."""

    @property
    def paused(self) -> bool: ...
    @property
    def status(self) -> int: ...


def stays(watch: Watch, stay: Callable[[bool], Stay], at_once: bool, show: Callable[[Event], None]) -> int:
    """The exit status of all of them.

    Args:
        stay: joins, takes part and leaves; called with whether it is a return.
        at_once: the first is not waited for: somebody at the terminal is to be asked.
    """
    from transport.protocol import RefusedByHub

    again = False
    while True:
        if again or not at_once:
            ended = watch.wait(show)
            if ended is not None:
                return ended
        try:
            one = stay(again)
        except RefusedByHub as refused:
            if not again or refused.code != "over":
                raise
            show(Progressed("the run has ended meanwhile"))
            return 0
        if not one.paused:
            return one.status
        again = True
        del one
        give_back_memory()


def give_back_memory() -> None:
    """What the GPU held for the stay before."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
