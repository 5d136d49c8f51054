"""How long a packet may be that its line carries while the peer computes. No clock, no I/O.

    fits = share x T x rate    T      seconds that a round's gradient takes
                               rate   bytes a second of whole transfers; of both the median of the last WINDOW
                               share  of T, for each direction: SHARE at first

In a round all packets go up, are summed, and the sum comes down. No device waits if that is done within T.
Nobody has anything to fetch before the last is up; so each direction has the same share of T, not what the
other leaves. What remains is for encoding, the sum and the disk, which nobody knows before. But each sees how
long the whole took, E, and if that is not within LOW and HIGH of T,

    share <- share x AIM x T / E     by no more than MORE up, LESS down, and then not for SETTLE rounds

It grows only where packets are FULL: nearly what fits. A peer whose own transfers are less than MINE of E
takes no less for it: what takes so long is others'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

SHARE, LEAST_SHARE, MOST_SHARE = 0.35, 0.1, 0.8
LOW, AIM, HIGH = 0.91, 0.94, 0.97
MORE, LESS = 1.1, 0.7
MINE, FULL = 0.25, 0.85
SETTLE = 2  # what a peer can fetch is in the owner's packets a round later
WINDOW = 3  # one odd time says nothing
MOST = 2**40  # bytes
SHORT = 16 * 1024  # bytes

Last = tuple[float, ...]


@dataclass(frozen=True)
class BandwidthBudget:
    """Of one peer; what it has measured."""

    times: Last = ()  # T
    ups: Last = ()  # rates
    downs: Last = ()
    share: float = SHARE
    settling: int = 0  # rounds
    spent: float = 0.0  # seconds of the newest round's transfers
    full: bool = False  # whether one of them was nearly what fits

    def computed(self, seconds: float) -> BandwidthBudget:
        return replace(self, times=after(self.times, seconds))

    def sent(self, size: int, seconds: float) -> BandwidthBudget:
        full = 0 < FULL * self.up <= size
        return replace(self, ups=measured(self.ups, size, seconds), spent=seconds, full=full)

    def came(self, size: int, seconds: float) -> BandwidthBudget:
        full, spent = self.full or 0 < FULL * self.down <= size, self.spent + seconds
        return replace(self, downs=measured(self.downs, size, seconds), spent=spent, full=full)

    def ended(self, seconds: float) -> BandwidthBudget:
        """The sum is here, E seconds after the round was opened."""
        if self.settling or not self.times or seconds <= 0:
            return replace(self, settling=max(0, self.settling - 1))
        used = seconds / median(self.times)
        more, less = used < LOW and self.full, used > HIGH and self.spent >= MINE * seconds
        if not more and not less:
            return self
        share = self.share * min(MORE, max(LESS, AIM / used))
        return replace(self, share=min(MOST_SHARE, max(LEAST_SHARE, share)), settling=SETTLE)

    @property
    def up(self) -> int:
        """Bytes that fit; 0: not known."""
        return fits(self.share, self.times, self.ups)

    @property
    def down(self) -> int:
        return fits(self.share, self.times, self.downs)


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


def fits(share: float, times: Last, rates: Last) -> int:
    return max(1, int(min(MOST, share * median(times) * median(rates)))) if times and rates else 0
