"""Chooses whether packets are passed on, by what peers measure. No clock, no I/O.

Each report says how many bytes of an aggregate its peer can fetch beside its compute (Report.fits), so the
median over the members is the speed of the way there, by the hub or by helpers.

    MEASURING   the hub sends to all; where that is slow, its median is noted      -> TRYING
    TRYING      helpers pass packets on; compared with the hub's after TRIAL rounds -> PASSING or RESTING
    PASSING     until it is slower than the hub was                                 -> RESTING
    RESTING     the hub sends to all for REST rounds                                -> MEASURING
"""

from __future__ import annotations

from collections.abc import Collection
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
