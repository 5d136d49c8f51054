"""How long a packet may be that its line carries while the peer computes. No clock, no I/O.

    fits = SHARE x T x rate     T     seconds that a round's gradient takes
                                rate  bytes a second of whole transfers; of both the median of the last WINDOW

In a round all packets go up, are summed, and the sum comes down. No device waits if that is done within T.
Nobody has anything to fetch before the last is up; so each direction has a share of T that is the same for
all, not what the other leaves. What remains is for encoding, the sum and the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

SHARE = 0.35
WINDOW = 3  # one odd time says nothing
MOST = 2**40  # bytes
SHORT = 16 * 1024  # bytes

Last = tuple[float, ...]


@dataclass(frozen=True)
class Slot:
    """Of one peer; what it has measured."""

    times: Last = ()  # T
    ups: Last = ()  # rates
    downs: Last = ()

    def computed(self, seconds: float) -> Slot:
        return replace(self, times=after(self.times, seconds))

    def sent(self, size: int, seconds: float) -> Slot:
        return replace(self, ups=measured(self.ups, size, seconds))

    def came(self, size: int, seconds: float) -> Slot:
        return replace(self, downs=measured(self.downs, size, seconds))

    @property
    def up(self) -> int:
        """Bytes that fit; 0: not known."""
        return fits(self.times, self.ups)

    @property
    def down(self) -> int:
        return fits(self.times, self.downs)


def after(values: Last, new: float) -> Last:
    """With one more; 0 says nothing."""
    return (*values, new)[-WINDOW:] if new > 0 else values


def measured(rates: Last, size: int, seconds: float) -> Last:
    """With that of a transfer. Of a short one the round trip is most of the time: it says that the line is no
    slower."""
    rate = size / seconds if seconds > 0 else 0.0
    if size < SHORT:
        rate = max(rate, median(rates)) if rates else 0.0
    return after(rates, rate)


def fits(times: Last, rates: Last) -> int:
    return max(1, min(MOST, int(SHARE * median(times) * median(rates)))) if times and rates else 0
