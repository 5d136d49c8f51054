"""Catching up without sockets, disk and clock: which way to x', what to fetch next, how far it is.

    PLANNING   no way is chosen, or what was chosen is gone
    WEIGHTS    the model of the round that the way starts at is on its way here
    PACKETS    packets are fetched ahead and applied in order, also those of rounds committed meanwhile
    READY      x' of the newest committed round is here
    FAILED     there is no way left

The ways: the x' that this machine kept when it left, the weights of the base, a snapshot; each plus the
packets from there on. Fewest bytes wins. A snapshot that is gone (the hub offers newer ones) means planning
anew, PLANS times in all, the last time without snapshots: the base is always there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf

from transport.ledger import HEADER_SIZE
from transport.protocol import SnapshotOffer, Welcome

RANGE = 4 << 20  # bytes of packets asked for as one object, about
LONGEST = 4096  # rounds of it
AHEAD = 256 << 20  # bytes of packets, about, that may be here and not applied: while the model loads, say
PLANS = 3  # ways tried with snapshots among them
WINDOW_S = 10.0  # of what a rate is the mean


class CatchUpSource(Enum):
    """Where x' comes from, before packets; of equals the first wins."""

    OWN = "own state"
    BASE = "base model"
    SNAPSHOT = "snapshot"


class CatchUpState(Enum):
    PLANNING = "planning"
    WEIGHTS = "weights"
    PACKETS = "packets"
    READY = "ready"
    FAILED = "failed"


class CatchUpEvent(Enum):
    """What can happen to one who catches up."""

    CHOSEN = "a way is chosen"
    HERE = "the weights are here"
    GONE = "the snapshot is not offered any more, or comes damaged"
    STUCK = "there is no other way"
    LEVEL = "the packets of all committed rounds are applied"
    BEHIND = "a round is committed"


NEXT: dict[CatchUpState, dict[CatchUpEvent, CatchUpState]] = {
    CatchUpState.PLANNING: {
        CatchUpEvent.CHOSEN: CatchUpState.WEIGHTS,
        CatchUpEvent.STUCK: CatchUpState.FAILED,
    },
    CatchUpState.WEIGHTS: {CatchUpEvent.HERE: CatchUpState.PACKETS, CatchUpEvent.GONE: CatchUpState.PLANNING},
    CatchUpState.PACKETS: {CatchUpEvent.LEVEL: CatchUpState.READY},
    CatchUpState.READY: {CatchUpEvent.BEHIND: CatchUpState.PACKETS},
    CatchUpState.FAILED: {},
}


@dataclass(frozen=True)
class LocalCopy:
    """The x' that this machine kept."""

    round: int
    log_bytes: int | None = None  # of the packet log before `round`; None: not known


@dataclass(frozen=True)
class Plan:
    """One way, and what it costs to go it."""

    way: CatchUpSource
    start: int  # the weights are x' of this round
    weights: int  # bytes of them to fetch
    packets: int  # bytes of the packets from `start` on, as the hub said
    offer: SnapshotOffer | None = None

    @property
    def bytes(self) -> int:
        return self.weights + self.packets


@dataclass(frozen=True)
class Range:
    """Packets of rounds start .. stop-1, one object."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"packets/{self.start}-{self.stop}"


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    way: CatchUpSource
    state: CatchUpState
    done: int  # bytes
    total: int  # bytes; grows with the rounds committed meanwhile
    rate: float  # bytes a second, of late
    eta: float | None  # seconds; None: not known, or the run is faster than this line


def ways(welcome: Welcome, base: int, own: LocalCopy | None, frozen: bool = False) -> list[Plan]:
    """All there are. `base`: bytes of its weights that are not here; `frozen`: each way needs them."""
    log, now = welcome.log_bytes, welcome.round
    beside = base if frozen else 0
    found = [Plan(CatchUpSource.BASE, 0, base, log)]
    for offer in welcome.snapshots:
        if offer.round <= now:
            found.append(
                Plan(
                    CatchUpSource.SNAPSHOT,
                    offer.round,
                    beside + offer.size,
                    max(0, log - offer.log_bytes),
                    offer,
                )
            )
    if own is not None and own.round <= now:
        before = log * own.round // now if own.log_bytes is None and now else own.log_bytes or 0
        found.append(Plan(CatchUpSource.OWN, own.round, beside, max(0, log - before)))
    return found


class CatchUp:
    """One peer's way to x'.

    Args:
        base: bytes of the base's weights that are not on this disk.
        own: what this machine kept of an earlier stay.
        room: bytes that fit on the disk; a way that needs more is taken only where there is no other.
        frozen: the base's weights are not what is trained, and needed beside x' of whatever round.
    """

    def __init__(
        self,
        welcome: Welcome,
        base: int,
        own: LocalCopy | None = None,
        room: float = inf,
        frozen: bool = False,
    ) -> None:
        self.state, self.plans = CatchUpState.PLANNING, 0
        self._base, self._own, self._room, self._frozen = base, own, room, frozen
        self._gone: set[int] = set()  # rounds of snapshots that cannot be had
        self._choose(welcome)

    # ---- the way -------------------------------------------------------------------------------------------

    def _choose(self, welcome: Welcome) -> None:
        self.plans += 1
        possible = [
            plan
            for plan in ways(welcome, self._base, self._own, self._frozen)
            if plan.offer is None or (self.plans <= PLANS and plan.start not in self._gone)
        ]
        fitting = [plan for plan in possible if plan.weights <= self._room] or possible
        self.plan = min(
            fitting, key=lambda plan: (plan.bytes, [*CatchUpSource].index(plan.way), plan.weights)
        )
        self.target = welcome.round  # x' of this round is to be had
        self.applied = self.asked = self.plan.start  # packets before these are applied, asked for
        self._records(self.plan.packets, self.target - self.plan.start)
        self._weights_here = self._packets_here = 0  # bytes
        self._came_to = self.plan.start  # packets before this are here
        self._seen: deque[tuple[float, int, float]] = deque()  # (now, done, total)
        self._move(CatchUpEvent.CHOSEN)

    def gone(self, welcome: Callable[[], Welcome]) -> bool:
        """The weights cannot be had. Thinks anew, with what `welcome` gives; False: there is no other way."""
        self._move(CatchUpEvent.GONE)
        if self.plan.offer is None:
            self._move(CatchUpEvent.STUCK)
            return False
        self._gone.add(self.plan.offer.round)
        self._choose(welcome())
        return True

    def weights_came(self, came: int) -> None:
        """So many bytes of the weights have come so far."""
        if self.state is CatchUpState.WEIGHTS:
            self._weights_here = came

    def weights_here(self) -> None:
        self._weights_here = self.plan.weights
        self._move(CatchUpEvent.HERE)

    # ---- packets -------------------------------------------------------------------------------------------

    def heard(self, newest: int) -> None:
        """The hub has committed this round."""
        self.target = max(self.target, newest + 1)
        if self.state is CatchUpState.READY and self.applied < self.target:
            self._move(CatchUpEvent.BEHIND)
        self._level()

    def next_range(self) -> Range | None:
        """What to ask for now; None: nothing, or not before more is applied."""
        if self.state is not CatchUpState.PACKETS or self.asked >= self.target:
            return None
        rounds = int(min(LONGEST, max(1, RANGE // max(1, self._mean))))
        # Two at least: one on its way while another is applied.
        if self.asked > self.applied + rounds and (self.asked - self.applied) * self._mean >= AHEAD:
            return None
        first, self.asked = self.asked, min(self.target, self.asked + rounds)
        return Range(first, self.asked)

    def range_came(self, range: Range, size: int) -> None:
        """The packets of a range are here: `size` bytes, records and all."""
        self._packets_here += size
        self._came_to = range.stop
        self._records(size, range.stop - range.start)

    def _records(self, size: int, count: int) -> None:
        """So many bytes for so many rounds. None is shorter than its header, whatever a hub says."""
        self._mean = max(HEADER_SIZE, size / max(1, count))  # bytes of a packet's record

    def apply(self, round: int) -> None:
        """The packet of `round` is applied."""
        assert round == self.applied, f"packet {round} applied, {self.applied} is next"
        self.applied = round + 1
        self._level()

    def _level(self) -> None:
        if self.state is CatchUpState.PACKETS and self.applied == self.target:
            self._move(CatchUpEvent.LEVEL)

    def _move(self, kind: CatchUpEvent) -> None:
        assert kind in NEXT[self.state], f"{self.state} and {kind.value}"
        self.state = NEXT[self.state][kind]

    # ---- how far -------------------------------------------------------------------------------------------

    def progress(self, now: float, under: int = 0) -> Progress:
        """`under`: bytes that are here of ranges that are not whole yet."""
        done = self._weights_here + self._packets_here + under
        total = self.plan.weights + self._packets_here + self._mean * (self.target - self._came_to)
        self._seen.append((now, done, total))
        while self._seen[0][0] < now - WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        then, done_then, total_then = self._seen[0]
        seconds = max(now - then, 1e-9)
        rate = (done - done_then) / seconds
        nearer = rate - (total - total_then) / seconds  # the log grows meanwhile
        eta = (total - done) / nearer if nearer > 0 else None
        return Progress(self.plan.way, self.state, done, max(done, int(total)), rate, eta)
