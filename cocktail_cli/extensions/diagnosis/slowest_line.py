"""The line that bounds recent rounds: the hub's, up or down, or one peer's. No clock, no I/O.

    waiting    median share of a step that devices waited for the exchange; below LEAST the compute bounds
    direction  updates (a peer's up, the hub's down) or aggregates (a peer's down, the hub's up): the longer
    whose      the peer's, if it carries less than APART of the others' median; else the hub's or the peers':
               where rate x uploads at once varies less than the rate alone, they share the hub's line

Aggregates are fetched all at once, so their rates cannot tell lines that are alike from the hub's: then it is
the hub's, over which N of them go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median, pstdev

from .bodies import SlowestLine
from .slow_rounds import RoundSample

COMPUTE = "the compute"
HUBS = "the hub's"
ALIKE = "each peer's"
LATELY = 10  # rounds
LEAST = 0.1  # share of a step
APART = 0.6
MANY = 32  # peers; beyond, it is the hub's line that they share, and comparing all pairs takes long
SHORT_S = 0.02  # a shorter transfer says nothing of its line


@dataclass(frozen=True)
class Transfer:
    """One update on its way up, or one aggregate on its way down."""

    peer: str
    size: int
    started: float
    ended: float

    @property
    def rate(self) -> float:
        return self.size / (self.ended - self.started)

    def at_once(self, others: Sequence[Transfer]) -> float:
        """Return how many transfers went on beside each other, this one included, on average."""
        shared = (max(0.0, min(self.ended, o.ended) - max(self.started, o.started)) for o in others)
        return sum(shared) / (self.ended - self.started)


@dataclass(frozen=True)
class RoundLines:
    """The transfers of one round, and the share of a step that each device waited."""

    shares: list[float]
    ups: list[Transfer]
    downs: list[Transfer]


class LineWatch:
    """The transfers of the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[RoundLines] = deque(maxlen=LATELY)

    def add(self, sample: RoundSample) -> SlowestLine | None:
        """Add a round. Returns what bounds the last rounds; None: too little is known."""
        if not sample.uneven:
            peers = [peer for peer in sample.peers.values() if peer.whole and peer.compute_s > 0]
            shares = [peer.wait_s / (peer.compute_s + peer.wait_s) for peer in peers]
            self._rounds.append(RoundLines(shares, transfers(sample, up=True), transfers(sample, up=False)))
        shares = [share for one in self._rounds for share in one.shares]
        if len(self._rounds) < LATELY // 2 or not shares:
            return None
        waiting = median(shares)
        ups, downs = [one.ups for one in self._rounds], [one.downs for one in self._rounds]
        went_up, came_down = longest(ups), longest(downs)
        if waiting < LEAST or not went_up + came_down:
            return SlowestLine(COMPUTE, round(waiting, 3), 0)
        way, rounds = ("up", ups) if went_up >= came_down else ("down", downs)
        whose, rate = owner(rounds, up=way == "up")
        if whose == HUBS:  # what goes up at a peer comes down at the hub
            way = "down" if way == "up" else "up"
        return SlowestLine(f"{whose} {way}", round(waiting, 3), round(rate))


def transfers(sample: RoundSample, *, up: bool) -> list[Transfer]:
    """List the transfers of a round that took long enough to say something. Downloads begin at time 0."""
    found = []
    for peer in sample.peers.values():
        took, size = (peer.upload_s, peer.up) if up else (peer.seconds("download"), peer.down)
        if took >= SHORT_S and size and peer.whole:
            ended = peer.arrived if up else took
            found.append(Transfer(peer.name, size, ended - took, ended))
    return found


def longest(rounds: Sequence[Sequence[Transfer]]) -> float:
    """Return the median over the rounds of their longest transfer's seconds."""
    return median(max((one.ended - one.started for one in round), default=0.0) for round in rounds)


def owner(rounds: Sequence[Sequence[Transfer]], *, up: bool) -> tuple[str, float]:
    """Name whose line bounds these transfers, with the bytes a second of one."""
    rates: dict[str, list[float]] = {}
    for round in rounds:
        for one in round:
            rates.setdefault(one.peer, []).append(one.rate)
    typical = {peer: median(found) for peer, found in rates.items()}
    slowest = min(typical, key=lambda peer: typical[peer])
    others = [rate for peer, rate in typical.items() if peer != slowest]
    if not others or typical[slowest] < APART * median(others):
        return f"{slowest}'s", typical[slowest]
    if not up or len(typical) > MANY:
        return HUBS, median(typical.values())
    alone = [log(one.rate) for round in rounds for one in round]
    shared = [log(one.rate * one.at_once(round)) for round in rounds for one in round]
    return ALIKE if pstdev(alone) < pstdev(shared) else HUBS, median(typical.values())
