"""`cocktail` in a world that is out of order: a wrong wall clock, or too little memory.

python -m scripts.fault_injection.guest [--hours H] [--memory BYTES] [--jump H] -- join ...
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time


def shift_clock(hours: float) -> None:
    """Shift every clock of the time of day that Python code can read; the monotonic one stays."""
    seconds, told, told_ns, real = 3600 * hours, time.time, time.time_ns, datetime.datetime

    class Shifted(real):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(time.time(), tz)

    time.time = lambda: told() + seconds
    time.time_ns = lambda: told_ns() + int(seconds * 1e9)
    datetime.datetime = Shifted  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--jump", type=float, default=0.0, help="hours, at each SIGUSR2")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if given.hours:
        shift_clock(given.hours)
    if given.jump:
        signal.signal(signal.SIGUSR2, lambda number, frame: shift_clock(given.jump))
    if given.memory:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (given.memory, given.memory))
    from cocktail_cli.main import main as cocktail

    sys.argv = ["cocktail", *given.command]
    cocktail()


if __name__ == "__main__":
    main()
