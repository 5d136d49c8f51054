"""Chooses whether peers aggregate the shards or the hub does, by what devices wait for. No clock, no I/O.

    MEASURING   the hub aggregates; where its line bounds the rounds                 -> TRYING
                after EARLY rounds                                                   -> HUB
    TRYING      peers aggregate; where steps take 1 / GAIN of the time               -> PEERS
                else                                                                 -> HUB
    PEERS, HUB  to the end of the run

A shard moves with its error feedback, which is mostly 0 after the first rounds, and takes 3.4 bytes a
parameter in the end. So the choice is made once, early.
"""

from __future__ import annotations

from enum import Enum

from transport.diagnosis import SlowestLine

EARLY = 16  # rounds; later, error feedback is long
GAIN = 1.1  # by which steps must be faster
LEAST = 2  # peers that can aggregate


class Way(Enum):
    """States of the choice."""

    MEASURING = "measuring"
    TRYING = "trying"
    PEERS = "peers"
    HUB = "hub"


class AggregationChoice:
    """Chooses for each round who aggregates.

    Args:
        round: the first one of this hub; that of a restarted hub is above 0.
        aggregators: peers that aggregated in the round before it, which a restarted hub goes on with.
    """

    def __init__(self, round: int = 0, aggregators: int = 0) -> None:
        self.way = Way.PEERS if aggregators else Way.MEASURING
        self._round = round
        self._able = 0
        self._waited = 0.0  # share of a step, while the hub aggregated

    def peers_aggregate(self, able: int) -> bool:
        """Tell who aggregates in a round for which so many peers are able to."""
        self._able = able
        return self.way in (Way.TRYING, Way.PEERS)

    def note(self, slowest: SlowestLine | None, *, moving: bool) -> bool:
        """Note a committed round; return whether somebody else aggregates from now on.

        Args:
            slowest: what bounds the rounds since the last change; None: not known yet.
            moving: error feedback is still on its way to its new aggregators, over the same lines.
        """
        self._round += 1
        before = self.way
        if self.way is Way.MEASURING and self._able >= LEAST and slowest is not None and slowest.is_hubs:
            self.way, self._waited = Way.TRYING, slowest.waiting
        elif self.way is Way.MEASURING and self._round >= EARLY:
            self.way = Way.HUB
        elif self.way is Way.TRYING and slowest is not None and not moving:
            faster = (1 - slowest.waiting) >= GAIN * (1 - self._waited)
            self.way = Way.PEERS if faster else Way.HUB
        return (before, self.way) in ((Way.MEASURING, Way.TRYING), (Way.TRYING, Way.HUB))
