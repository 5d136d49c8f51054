"""Catching up as a state machine without sockets, disk and clock: where to start, what to fetch, progress.

    PLANNING   no plan is chosen, or its snapshot is gone
    WEIGHTS    the weights that the plan starts from are being fetched
    PACKETS    packets are fetched ahead and applied in order, also those of rounds committed meanwhile
    READY      the global model of the newest committed round is here
    FAILED     no plan is left

A plan starts from this machine's checkpoint, the base weights or a snapshot, plus the packets from there on.
Fewest bytes wins. If a snapshot is gone (the hub offers newer ones) a new plan is made, PLANS times in all,
the last time without snapshots: the base is always served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf

from transport.ledger import HEADER_SIZE
from transport.protocol import messages

RANGE = 4 << 20  # bytes of packets requested as one object, about
MOST = 2 * RANGE  # bytes of such an object; one that is longer is asked for in smaller ranges
LONGEST = 4096  # rounds of one object
AHEAD = 256 << 20  # bytes of packets that may wait to be applied, as while the model loads
PLANS = 3  # plans made with snapshots among them
WINDOW_S = 10.0  # over which the rate is averaged


class CatchUpSource(Enum):
    """Weights that a plan starts from; among equals the first wins."""

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
    """Events of the state machine."""

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
class Plan:
    """One way to catch up, and its cost."""

    way: CatchUpSource
    start: int  # round of the weights
    weights: int  # bytes of weights to fetch
    packets: int  # bytes of the packets from `start` on, as the hub said
    offer: messages.SnapshotOffer | None = None

    @property
    def bytes(self) -> int:
        return self.weights + self.packets


@dataclass(frozen=True)
class Range:
    """The packets of rounds start .. stop-1, fetched as one object of at most `most` bytes."""

    start: int
    stop: int
    most: int

    @property
    def name(self) -> str:
        return f"packets/{self.start}-{self.stop}"


@dataclass(frozen=True)
class Progress:
    """Progress of catching up."""

    way: CatchUpSource
    state: CatchUpState
    done: int  # bytes
    total: int  # bytes; grows with the rounds committed meanwhile
    rate: float  # bytes a second, recently
    eta: float | None  # seconds; None: unknown, or rounds are committed faster than this line fetches


def ways(welcome: messages.Welcome, base: int, own: int | None, frozen: bool = False) -> list[Plan]:
    """List all plans. `base`: bytes of base weights not on the disk; `own`: round of this machine's
    checkpoint; `frozen`: every plan needs the base."""
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
    if own is not None and own <= now:
        before = log * own // now if now else 0  # rounds have about as many bytes each
        found.append(Plan(CatchUpSource.OWN, own, beside, log - before))
    return found


class CatchUp:
    """One peer's way to the newest global model.

    Args:
        base: bytes of the base's weights that are not on this disk.
        own: round of the global model in this machine's checkpoint; None: there is none.
        room: bytes free on the disk; a plan that needs more is chosen only if no other fits.
        frozen: the base weights are not trained, and needed beside the global model of any round.
    """

    def __init__(
        self,
        welcome: messages.Welcome,
        base: int,
        own: int | None = None,
        room: float = inf,
        frozen: bool = False,
    ) -> None:
        self.state, self.plans = CatchUpState.PLANNING, 0
        # round -> the most bytes of its packet, once the model is known
        self.longest: Callable[[int], int] | None = None
        self._base, self._own, self._room, self._frozen = base, own, room, frozen
        self._gone: set[int] = set()  # rounds of snapshots that cannot be had
        self._choose(welcome)

    # ---- the plan ------------------------------------------------------------------------------------------

    def _choose(self, welcome: messages.Welcome) -> None:
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
        self.target = welcome.round  # round to reach
        self.applied = self.asked = self.plan.start  # packets before these rounds are applied, requested
        self._records(self.plan.packets, self.target - self.plan.start)
        self._weights_here = self._packets_here = 0  # bytes
        self._came_to = self.plan.start  # packets before this round are here
        self._waiting: dict[Range, int] = {}  # requested and not applied -> bytes, or the most it can have
        self._seen: deque[tuple[float, int, float]] = deque()  # (now, done, total)
        self._move(CatchUpEvent.CHOSEN)

    def gone(self, welcome: Callable[[], messages.Welcome]) -> bool:
        """Replan, with the offers of `welcome()`: the weights are gone. Returns False if no plan is left."""
        self._move(CatchUpEvent.GONE)
        if self.plan.offer is None:
            self._move(CatchUpEvent.STUCK)
            return False
        self._gone.add(self.plan.offer.round)
        self._choose(welcome())
        return True

    def weights_came(self, came: int) -> None:
        """Note the bytes of the weights received so far."""
        if self.state is CatchUpState.WEIGHTS:
            self._weights_here = came

    def weights_here(self) -> None:
        self._weights_here = self.plan.weights
        self._move(CatchUpEvent.HERE)

    # ---- packets -------------------------------------------------------------------------------------------

    def heard(self, newest: int) -> None:
        """Note the newest round that the hub has committed."""
        self.target = max(self.target, newest + 1)
        if self.state is CatchUpState.READY and self.applied < self.target:
            self._move(CatchUpEvent.BEHIND)
        self._level()

    def next_range(self, room: float = inf) -> Range | None:
        """Return the packets to request now; None: none, or not before more are applied.

        room: bytes that the packets which wait may take on this machine.
        """
        if self.state is not CatchUpState.PACKETS or self.asked >= self.target:
            return None
        mean = self._mean if self.longest is None else min(self._mean, HEADER_SIZE + self.longest(self.asked))
        if self.longest is None and mean > MOST:
            return None  # before the model is known nobody can tell whether packets are so long
        rounds = int(min(LONGEST, max(1, RANGE // max(1, mean))))
        range = self._range(self.asked, min(self.target, self.asked + rounds))
        ahead, waiting = sum(self._waiting.values()) + range.most, len(self._waiting)
        # Two where there is room: one is fetched while another is applied.
        if (waiting and ahead > room) or (waiting > 1 and ahead > AHEAD):
            return None
        self.asked = range.stop
        self._waiting[range] = range.most
        return range

    def _range(self, start: int, stop: int) -> Range:
        if stop > start + 1 or self.longest is None:
            return Range(start, stop, MOST)
        return Range(start, stop, HEADER_SIZE + self.longest(start))

    def shorter(self, range: Range) -> list[Range]:
        """Return what to request in place of a range that was too long; nothing where it is one round, whose
        packet is longer than it can be."""
        if range.stop == range.start + 1:
            again = self._range(range.start, range.stop)
            parts = [again] if again.most > range.most else []
        else:
            middle = (range.start + range.stop) // 2
            parts = [self._range(range.start, middle), self._range(middle, range.stop)]
        self._waiting.pop(range)
        self._waiting |= {part: part.most for part in parts}
        return parts

    def range_came(self, range: Range, size: int) -> None:
        """Note that the packets of a range are here: `size` bytes with their headers."""
        self._packets_here += size
        self._waiting[range] = size
        self._came_to = range.stop
        self._records(size, range.stop - range.start)

    def _records(self, size: int, count: int) -> None:
        """Estimate the mean bytes of a record; none is shorter than its header, whatever a hub claims."""
        self._mean = max(HEADER_SIZE, size / max(1, count))  # bytes of a record

    def apply(self, round: int) -> None:
        """Note that the packet of `round` is applied."""
        assert round == self.applied, f"packet {round} applied, {self.applied} is next"
        self.applied = round + 1
        self._waiting = {range: size for range, size in self._waiting.items() if range.stop > self.applied}
        self._level()

    def _level(self) -> None:
        if self.state is CatchUpState.PACKETS and self.applied == self.target:
            self._move(CatchUpEvent.LEVEL)

    def _move(self, kind: CatchUpEvent) -> None:
        assert kind in NEXT[self.state], f"{self.state} and {kind.value}"
        self.state = NEXT[self.state][kind]

    # ---- progress ------------------------------------------------------------------------------------------

    def progress(self, now: float, under: int = 0) -> Progress:
        """Compute the progress. `under`: bytes received of ranges that are not complete."""
        done = self._weights_here + self._packets_here + under
        total = self.plan.weights + self._packets_here + self._mean * (self.target - self._came_to)
        self._seen.append((now, done, total))
        while self._seen[0][0] < now - WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        then, done_then, total_then = self._seen[0]
        seconds = max(now - then, 1e-9)
        rate = (done - done_then) / seconds
        nearer = rate - (total - total_then) / seconds  # less the growth of the log
        eta = (total - done) / nearer if nearer > 0 else None
        return Progress(self.plan.way, self.state, done, max(done, int(total)), rate, eta)
