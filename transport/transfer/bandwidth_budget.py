"""Packet sizes that a line carries while the peer computes. No clock, no I/O.

    fits = share x T x rate    T      seconds of a round's gradients: local steps x a step's, median of WINDOW
                               rate   bytes a second of whole transfers, median of the last WINDOW
                               share  of T, for each direction: SHARE at first

In a round all packets go up, are summed, and the sum comes down. No device waits if that is done within T.
No peer can fetch before the last packet is up, so both directions get the same share of T. The remainder is
for encoding, summing and the disk, whose times are not known beforehand. But each peer sees how long all of
it took, E, and if that is not within LOW and HIGH of T,

    share <- share x AIM x T / E     by no more than MORE up, LESS down, then unchanged for SETTLE rounds

AIM is below 1 by as much as the last of several peers is later than the others: transfers vary by a tenth and
more, and a round waits for the last. Lines filled to .94 make 8 peers wait 9 % of the time, in simulation.

With a staleness S above 1 one round goes up while another comes down: each direction may take twice the share
at first, and the exchange S rounds. But the hub opens a round when the one before is committed, so

    E = the longer of  E / S  and  the time from opening to commit

The share grows only if packets are FULL: nearly the size that fits. It does not shrink for a peer whose own
transfers are less than MINE of E: others caused the delay. Where both packets are larger than what fits, as
the sparsest are on a thin line, the share makes none of them smaller. There it does not shrink, and grows by
any factor, so that K soon follows a line that becomes faster, and rounds of more local steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

SHARE, LEAST_SHARE, MOST_SHARE = 0.35, 0.1, 0.8
LOW, AIM, HIGH = 0.85, 0.88, 0.91
MORE, LESS = 1.1, 0.7
MINE, FULL = 0.25, 0.85
SETTLE = 2  # rounds; aggregates follow what a peer can fetch one round later
WINDOW = 3  # samples of each median
MOST = 2**40  # bytes
SHORT = 16 * 1024  # bytes

Last = tuple[float, ...]


@dataclass(frozen=True)
class BandwidthBudget:
    """One peer's measurements, and the packet sizes that follow from them."""

    times: Last = ()  # seconds of a local step
    steps: int = 1  # local steps of the newest round
    encodes: Last = ()  # seconds from the opening of a round to its upload
    ups: Last = ()  # rates
    downs: Last = ()
    share: float = SHARE
    staleness: int = 1  # rounds that an exchange may take
    settling: int = 0  # rounds
    spent: float = 0.0  # seconds of the newest round's transfers
    full: bool = False  # one of them was nearly the size that fits
    over: bool = False  # both were larger than that

    def opened(self, steps: int, staleness: int) -> BandwidthBudget:
        """Begin a round of so many local steps, whose exchange may take so many rounds."""
        now, before = (min(max(one, 1), 2) for one in (staleness, self.staleness))
        share = min(MOST_SHARE, self.share * now / before)
        return replace(self, steps=steps, staleness=max(staleness, 1), share=share)

    def computed(self, seconds: float, encoding: float = 0.0) -> BandwidthBudget:
        """Note what a local step has taken, and what passed from the opening of a round to its upload."""
        return replace(self, times=after(self.times, seconds), encodes=after(self.encodes, encoding))

    def sent(self, size: int, seconds: float) -> BandwidthBudget:
        full, over = 0 < FULL * self.up <= size, 0 < self.up < FULL * size
        return replace(self, ups=measured(self.ups, size, seconds), spent=seconds, full=full, over=over)

    def received(self, size: int, seconds: float) -> BandwidthBudget:
        full, spent = self.full or 0 < FULL * self.down <= size, self.spent + seconds
        over = self.over and 0 < self.down < FULL * size
        downs = measured(self.downs, size, seconds)
        return replace(self, downs=downs, spent=spent, full=full, over=over)

    def ended(self, seconds: float, committed: float = 0.0) -> BandwidthBudget:
        """Adapt the share: the aggregate arrived so many seconds after the round was opened, which was
        committed after `committed` seconds."""
        seconds = max(seconds / self.staleness, committed)
        if self.settling or not self.times or seconds <= 0:
            return replace(self, settling=max(0, self.settling - 1))
        used = seconds / self.round_s
        more, less = used < LOW and self.full, used > HIGH and self.spent >= MINE * seconds
        if not more and (self.over or not less):
            return self
        most = AIM / used if self.over else MORE
        share = self.share * min(most, max(LESS, AIM / used))
        return replace(self, share=min(MOST_SHARE, max(LEAST_SHARE, share)), settling=SETTLE)

    @property
    def round_s(self) -> float:
        """Return T; 0: not known."""
        return self.steps * median(self.times) if self.times else 0.0

    @property
    def up(self) -> int:
        """Return the bytes of an update that fit; 0: not known."""
        return fits(self.share * self.round_s, self.ups)

    @property
    def down(self) -> int:
        """Return the bytes of an aggregate that fit; 0: not known."""
        return fits(self.share * self.round_s, self.downs)

    def needs(self, size: int) -> float:
        """Return the local steps whose compute an exchange of packets of `size` bytes takes, without the time
        spent waiting for other peers; 0: not known."""
        if not (size and self.times and self.ups and self.downs):
            return 0.0
        up, down = size / median(self.ups), size / median(self.downs)
        up += median(self.encodes) if self.encodes else 0.0
        return (up + down) / (AIM * median(self.times))


def after(values: Last, new: float) -> Last:
    """Append a sample; 0 is not one."""
    return (*values, new)[-WINDOW:] if new > 0 else values


def measured(rates: Last, size: int, seconds: float) -> Last:
    """Append a throughput sample. A short transfer, mostly round trip, can only raise the estimate."""
    rate = size / seconds if seconds > 0 else 0.0
    if size < SHORT:
        rate = max(rate, median(rates)) if rates else 0.0
    return after(rates, rate)


def fits(seconds: float, rates: Last) -> int:
    return max(1, int(min(MOST, seconds * median(rates)))) if seconds and rates else 0
