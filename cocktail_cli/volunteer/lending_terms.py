"""What a volunteer lends, and when: the hours, how warm the GPU may be, who else wants it.

A decision is a function of what was decided before, the time and a look at the GPU (nvidia.py); stays.py
acts on it. Leaving and coming back cost seconds, so a pause is not ended by the first sign of its cause being
gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from cocktail_cli.machine import Hours, hardware, next_at

BUSY = 0.1  # of the GPU's time: what a desktop that is looked at takes is below
BUSY_S = 10.0  # that another program must be at it: a window that opens is no reason to leave
FREE_S = 60.0  # without one before this machine comes back
COOLER = 10  # degrees below the limit at which it comes back


@dataclass(frozen=True)
class Lent:
    """What this machine's owner lends, and how."""

    name: str
    devices: list[str]  # several: one peer is spread over them
    micro_batch_size: int | None
    ask: bool  # before anything is fetched
    max_up: float | None = None  # bytes a second
    max_down: float | None = None
    listen: str | None = None  # "host:port" where other members reach this machine, which then owns shards
    advertise: str | None = None  # the same, as others dial it
    vram_limit: int | None = None  # bytes of each GPU
    max_disk: int | None = None  # bytes of what is fetched, and of what is kept
    trust_remote_code: bool = False

    @property
    def hardware(self) -> str:
        return hardware(self.devices[0], len(self.devices))


@dataclass(frozen=True)
class Terms:
    """What the machine's owner has said; by default it takes part always."""

    hours: Hours | None = None
    until: datetime | None = None  # local time: then it leaves for good
    only_idle: bool = False  # not while other programs use the GPU
    max_temp: int | None = None  # degrees Celsius

    @property
    def watches_gpu(self) -> bool:
        return self.only_idle or self.max_temp is not None

    @property
    def any(self) -> bool:
        return bool(self.hours or self.until or self.watches_gpu)

    def lines(self) -> list[str]:
        """For people, what they have said."""
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
class Gauge:
    """A look at the GPU. None: it does not say."""

    temperature: int | None = None  # degrees Celsius
    others: float | None = None  # share of its time that other programs take


@dataclass(frozen=True)
class Mood:
    """What was decided, and what the next decision needs to know of the past."""

    pause: str = ""  # why this machine does not take part; empty: it does
    over: str = ""  # why it leaves for good
    hot: bool = False
    busy: bool = False
    turned: float | None = field(default=None, compare=False)  # since when others are at it, or gone again


def decide(terms: Terms, before: Mood, now: datetime, at: float, gauge: Gauge) -> Mood:
    """
    Args:
        now: local time, as on the wall.
        at: seconds, of a clock that nobody sets.
    """
    if terms.until is not None and now >= terms.until:
        return Mood(over=f"it is {terms.until:%H:%M}")
    mood = feel(terms, before, at, gauge)
    why = ""
    if terms.hours is not None and not terms.hours.open(now):
        why = f"outside {terms.hours}, back at {next_at(terms.hours.start, now):%H:%M}"
    elif mood.hot:
        why = f"the GPU is too hot, back at {(terms.max_temp or 0) - COOLER} °C"
    elif mood.busy:
        why = f"another program uses the GPU, back {FREE_S:.0f} s after it"
    return replace(mood, pause=why)


def feel(terms: Terms, before: Mood, at: float, gauge: Gauge) -> Mood:
    """Is it too hot, is somebody else at it; what the GPU does not say stays as it was."""
    hot, busy, turned = before.hot, before.busy, before.turned
    if terms.max_temp is not None and gauge.temperature is not None:
        hot = gauge.temperature > terms.max_temp - (COOLER if before.hot else 0)
    if terms.only_idle and gauge.others is not None:
        if (gauge.others >= BUSY) == busy:
            turned = None
        else:
            turned = at if turned is None else turned
            if at - turned >= (FREE_S if busy else BUSY_S):
                busy, turned = not busy, None
    return Mood(hot=hot, busy=busy, turned=turned)
