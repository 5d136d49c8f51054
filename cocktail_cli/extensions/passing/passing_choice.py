"""Chooses whether packets are passed on, and divides them among the peers that do. No clock, no I/O.

Each report says how many bytes of an aggregate its peer can fetch beside its compute (Report.fits), so the
median over the members is the speed of the way there, by the hub or by helpers.

    MEASURING   the hub sends to all; where that is slow, its median is noted      -> TRYING
    TRYING      helpers pass packets on; compared with the hub's after TRIAL rounds -> PASSING or RESTING
    PASSING     until it is slower than the hub was                                 -> RESTING
    RESTING     the hub sends to all for REST rounds                                -> MEASURING

The hub sends each stripe to its helper alone, and the chunks of no stripe to all. With N peers, a share f of
such chunks, an uplink h of the hub and uplinks of U in all of the helpers, these lines are busy for

    hub  (1 + (N - 1) f) s / h        helpers  (N - 1) (1 - f) s / U

f makes the two equal, within f >= 0 and a hub that sends no more than MOST packets. A stripe is as long as
the uplink of its helper is fast. So N helpers with the hub's line take the time of one download.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from statistics import median

WARM = 4  # rounds of one way before its median counts: peers report a median of three
TRIAL = 6
REST = 64
SLOW = 2.0  # the slowest peer cannot fetch so many packets beside its compute
GAIN = 1.2  # by which helpers must be faster


class Way(Enum):
    """States of the choice."""

    MEASURING = "measuring"
    TRYING = "trying"
    PASSING = "passing"
    RESTING = "resting"


class PassingChoice:
    """Chooses for each round whether helpers pass its packet on. `mode`: auto or always."""

    def __init__(self, mode: str = "auto") -> None:
        self._way = Way.PASSING if mode == "always" else Way.MEASURING
        self._fixed = mode == "always"
        self._rounds = self._worse = 0  # rounds in this state; of them, the last ones slower than the hub
        self._of_hub = 0.0  # median of `fits` while the hub sent to all

    @property
    def on(self) -> bool:
        return self._way in (Way.TRYING, Way.PASSING)

    def note(self, fits: Collection[int], size: int) -> None:
        """Note a committed round: what its members can fetch, 0 where not known, and the packet's bytes."""
        self._rounds += 1
        if self._fixed or not fits or not all(fits):
            return
        now = median(fits)
        if self._way is Way.MEASURING and self._rounds >= WARM and min(fits) < SLOW * size:
            self._of_hub = now
            self._go(Way.TRYING)
        elif self._way is Way.TRYING and self._rounds >= TRIAL:
            self._go(Way.PASSING if now >= GAIN * self._of_hub else Way.RESTING)
        elif self._way is Way.PASSING:
            self._worse = self._worse + 1 if now < self._of_hub else 0
            if self._worse >= WARM:
                self._go(Way.RESTING)
        elif self._way is Way.RESTING and self._rounds >= REST:
            self._go(Way.MEASURING)

    def _go(self, way: Way) -> None:
        self._way, self._rounds, self._worse = way, 0, 0


CHUNKS = 32  # of a packet, at least: helpers pass each on while the next one comes
LEAST, LONGEST = 4 * 1024, 256 * 1024  # bytes of a chunk
MOST = 1.8  # packets over the hub's line in a round; messages and what is asked for twice stay within 2


def divide(chunks: int, uplinks: Mapping[str, float], peers: int, turn: int = 0) -> dict[str, range]:
    """Return helper -> the chunks that it passes on, for helpers that have any. The hub sends all others.

    Args:
        uplinks: helper -> bytes a second, above 0; the hub's own is taken for their mean.
        peers: those that fetch the packet, the helpers too.
        turn: rotates the helpers, so that small packets are passed on by each in turn.
    """
    if not uplinks or peers < 2:
        return {}
    names = sorted(uplinks)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    passed = chunks - int(chunks * share_of_hub(uplinks, peers))
    total, sent, first = sum(uplinks.values()), 0.0, 0
    stripes = {}
    for name in names:
        sent += uplinks[name]
        stop = round(passed * sent / total) if name != names[-1] else passed
        if stop > first:
            stripes[name] = range(first, stop)
        first = stop
    return stripes


def chunk_of(size: int) -> int:
    """Return the bytes of a chunk of a packet of `size` bytes, a power of two."""
    return min(LONGEST, max(LEAST, 1 << max(0, (size // CHUNKS).bit_length() - 1)))


def packets_over(helpers: int, peers: int) -> tuple[float, float]:
    """Return how many packets a round sends over the hub's line, and over each helper's, where uplinks are
    alike."""
    share = share_of_hub({str(number): 1.0 for number in range(helpers)}, peers)
    return 1 + (peers - 1) * share, (peers - 1) * (1 - share) / helpers


def share_of_hub(uplinks: Mapping[str, float], peers: int) -> float:
    """Return f, the share of a packet that the hub sends to every peer."""
    helpers, others = sum(uplinks.values()), peers - 1
    hub = helpers / len(uplinks)
    equal = (hub * others - helpers) / (others * (helpers + hub))
    return min(max(0.0, equal), (MOST - 1) / others)
