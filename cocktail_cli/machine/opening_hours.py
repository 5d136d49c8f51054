"""Times of day as volunteers give them: `--hours 22:00-07:00` over midnight, `--until 08:00`. Local time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta

import typer

_TIME = re.compile(r"(\d{1,2}):(\d{2})")


@dataclass(frozen=True)
class Hours:
    """From `start` to `end` each day, the end not included; over midnight where it is the earlier one."""

    start: time
    end: time

    def open(self, now: datetime) -> bool:
        if self.start < self.end:
            return self.start <= now.time() < self.end
        return now.time() >= self.start or now.time() < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"


def next_at(moment: time, now: datetime) -> datetime:
    """When a clock on the wall says this next: today or tomorrow."""
    today = datetime.combine(now.date(), moment)
    return today if today > now else today + timedelta(days=1)


def parse_time(text: str) -> time:
    """Raises typer.BadParameter, which is a usage error (exit 2)."""
    match = _TIME.fullmatch(text.strip())
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise typer.BadParameter(f"{text!r} is no time of day; write 08:00 or 22:30")
    return time(int(match[1]), int(match[2]))


def parse_hours(text: str) -> Hours:
    """Raises typer.BadParameter."""
    start, dash, end = text.partition("-")
    if not dash:
        raise typer.BadParameter(f"{text!r} are no hours; write 22:00-07:00")
    hours = Hours(parse_time(start), parse_time(end))
    if hours.start == hours.end:
        raise typer.BadParameter(f"{text!r} begins when it ends; leave --hours out to lend the whole day")
    return hours
