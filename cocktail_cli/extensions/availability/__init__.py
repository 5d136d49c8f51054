"""Availability: when a volunteer's machine takes part in a run. Hours, other GPU programs, temperature.

A decision is a function of the previous one, the time and a GPU reading. Leaving and coming back cost
seconds, so the thresholds have hysteresis. Between two sessions the peer is out of the run: it has said
goodbye, its checkpoint is on the disk, and the GPU's memory is free but for the CUDA context, some hundred
MB.
"""

from __future__ import annotations

import re
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta
from typing import Any

import typer

from cocktail_cli.assembly import Extension, Joining
from cocktail_cli.errors import EXIT
from cocktail_cli.machine import GpuReading, NvidiaGpus, nvidia_gpus
from cocktail_cli.signals import StopAsked, leave_on_signal
from cocktail_cli.ui import events

POLL_S = 2.0  # seconds between two readings
BUSY = 0.1  # share of the GPU's time; a desktop in use stays below
BUSY_S = 10.0  # seconds of other work before a pause: a window that opens is no reason to leave
FREE_S = 60.0  # seconds without other work before the return
COOLER = 10  # degrees below the limit before the return
_TIME = re.compile(r"(\d{1,2}):(\d{2})")


@dataclass(frozen=True)
class DailyHours:
    """The span from `start` to `end` each day in local time, `end` excluded; it may pass midnight."""

    start: time
    end: time

    def open(self, now: datetime) -> bool:
        if self.start < self.end:
            return self.start <= now.time() < self.end
        return now.time() >= self.start or now.time() < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"


def next_at(moment: time, now: datetime) -> datetime:
    """Return when the clock next shows `moment`: today or tomorrow."""
    today = datetime.combine(now.date(), moment)
    return today if today > now else today + timedelta(days=1)


def parse_time(text: str) -> time:
    """Parse `08:00`. Raises typer.BadParameter, a usage error (exit 2)."""
    match = _TIME.fullmatch(text.strip())
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise typer.BadParameter(f"{text!r} is no time of day; write 08:00 or 22:30")
    return time(int(match[1]), int(match[2]))


def parse_hours(text: str) -> DailyHours:
    """Parse `22:00-07:00`. Raises typer.BadParameter."""
    start, dash, end = text.partition("-")
    if not dash:
        raise typer.BadParameter(f"{text!r} are no hours; write 22:00-07:00")
    hours = DailyHours(parse_time(start), parse_time(end))
    if hours.start == hours.end:
        raise typer.BadParameter(f"{text!r} begins when it ends; leave --hours out to lend the whole day")
    return hours


@dataclass(frozen=True)
class Availability:
    """The rules that a volunteer sets for this machine; by default it always takes part."""

    hours: DailyHours | None = None
    until: datetime | None = None  # local time at which it leaves for good
    only_idle: bool = False  # pause while other programs use the GPU
    max_temp: int | None = None  # degrees Celsius

    @property
    def needs_gpu(self) -> bool:
        return self.only_idle or self.max_temp is not None

    def lines(self) -> list[str]:
        """Describe the rules for the join prompt."""
        said = []
        if self.hours:
            said.append(f"from {self.hours.start:%H:%M} to {self.hours.end:%H:%M}")
        if self.until:
            said.append(f"until {self.until:%H:%M}")
        if self.only_idle:
            said.append("while no other program uses the GPU")
        if self.max_temp is not None:
            said.append(f"while the GPU is below {self.max_temp} °C")
        return said


@dataclass(frozen=True)
class AvailabilityState:
    """A decision, and the history that the next one needs."""

    pause: str = ""  # why this machine does not take part now; empty: it does
    over: str = ""  # why it leaves for good
    hot: bool = False
    busy: bool = False
    changing: float | None = field(default=None, compare=False)  # since when `busy` is about to flip


def decide(
    rules: Availability, before: AvailabilityState, now: datetime, at: float, reading: GpuReading
) -> AvailabilityState:
    """Decide whether this machine takes part.

    Args:
        now: local wall-clock time.
        at: monotonic seconds.
    """
    if rules.until is not None and now >= rules.until:
        return AvailabilityState(over=f"it is {rules.until:%H:%M}")
    state, why = _with_reading(rules, before, at, reading), ""
    if rules.hours is not None and not rules.hours.open(now):
        why = f"outside {rules.hours}, back at {next_at(rules.hours.start, now):%H:%M}"
    elif state.hot:
        why = f"the GPU is too hot, back at {(rules.max_temp or 0) - COOLER} °C"
    elif state.busy:
        why = f"another program uses the GPU, back {FREE_S:.0f} s after it"
    return replace(state, pause=why)


def _with_reading(
    rules: Availability, before: AvailabilityState, at: float, reading: GpuReading
) -> AvailabilityState:
    """Update heat and contention; a value that the driver does not tell stays as before."""
    hot, busy, changing = before.hot, before.busy, before.changing
    if rules.max_temp is not None and reading.temperature is not None:
        hot = reading.temperature > rules.max_temp - (COOLER if before.hot else 0)
    if rules.only_idle and reading.others is not None:
        if (reading.others >= BUSY) == busy:
            changing = None
        else:
            changing = at if changing is None else changing
            if at - changing >= (FREE_S if busy else BUSY_S):
                busy, changing = not busy, None
    return AvailabilityState(hot=hot, busy=busy, changing=changing)


class AvailabilityMonitor(Joining):
    """Polls clock and GPU, and remembers the newest decision in `state`."""

    def __init__(self, rules: Availability) -> None:
        self.rules, self.state = rules, AvailabilityState()
        self.gpus: NvidiaGpus | None = None

    def terms(self) -> list[str]:
        return self.rules.lines()

    def begin(self, devices: Sequence[str], warn: Callable[[str], None]) -> None:
        self.gpus = nvidia_gpus(devices, warn) if self.rules.needs_gpu else None

    def update(self, ours: set[int] | None) -> AvailabilityState:
        """Decide anew. `ours`: process ids of the peer; None while it is paused."""
        reading = self.gpus.read(ours) if self.gpus is not None else GpuReading()
        self.state = decide(self.rules, self.state, datetime.now(), clock.monotonic(), reading)
        return self.state

    @contextmanager
    def beside(self, processes: set[int], leave: Callable[[str], None]) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(POLL_S):
                state = self.update(processes)
                if state.pause or state.over:
                    leave(state.pause or state.over)
                    return

        threading.Thread(target=watch, name="availability", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def returns_after(self, reason: str) -> bool:
        return bool(self.state.pause) and reason == self.state.pause

    def wait(self, show: Callable[[events.Event], None]) -> int | None:
        shown = ""
        with leave_on_signal(lambda why: None) as stop:
            try:
                with stop.raising():
                    while (state := self.update(None)).pause:
                        if state.pause != shown:
                            shown = state.pause
                            show(events.Progressed(f"paused: {shown}"))
                        clock.sleep(POLL_S)
            except StopAsked:
                return EXIT["lost"] if stop.reason == "SIGTERM" else 0
        if state.over:
            show(events.Progressed(f"not taking part any more: {state.over}"))
            return 0
        return None


class AvailabilityExtension(Extension):
    """Makes a volunteer leave, and come back, by its options."""

    def joining(self, options: Mapping[str, Any]) -> Joining | None:
        until = options.get("until")
        leave_at = next_at(until, datetime.now()) if until else None
        hours, only_idle, max_temp = map(options.get, ("hours", "only_idle", "max_temp"))
        return AvailabilityMonitor(Availability(hours, leave_at, bool(only_idle), max_temp))


extension = AvailabilityExtension()
