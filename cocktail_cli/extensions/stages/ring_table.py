"""Which lent machines form which ring, and who replaces a lost one. No messages, no clock, no I/O.

    WAITING     in no ring
    IN A RING   has a place, and the layers of that place

A ring forms as soon as the waiting machines have the memory for the model: of the fewest that have it, those
with the best lines; of equal ones, the strongest. Its layers are divided once. From then on a lost machine
leaves a gap, and a waiting machine with the memory for its layers takes them: by the best lines; of equal
ones, that with the least memory. All others keep theirs, so what they have loaded stays. A ring that has a
gap for GAP_S, or no machine, is dissolved. Where the line between two neighbours is lost, a waiting machine
takes the place of one of them, which waits then: of that which most others do not reach. Where none can,
nothing changes.

Of two neighbours one must be reachable, directly or elsewhere. So a new ring has at most every second
machine that is not. The best lines are those on which a step takes the fewest seconds
(`stage_placement.best_ring`), by the latencies and rates that the machines have measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from .stage_placement import Machines, PipelineLoad, Placement, best_ring

if TYPE_CHECKING:
    from .compute import StageMemory  # which imports torch

GAP_S = 60.0  # that a ring waits for a machine in the place of a lost one
BACK_S = 10.0  # the same for those that had its places at the hub before this one
MOST = 64  # machines of a ring: all of them are named in a message of a hub
ORDERED = 10  # machines of which the best ring is looked for, within a tenth of a second
UNKNOWN_S = 0.05  # latency of two machines that have not measured it
UNKNOWN_RATE = 1e6  # bytes a second of a line that was not measured


@dataclass(frozen=True)
class Lender:
    """A machine that lends its memory."""

    id: str
    memory: int  # bytes
    reachable: bool


@dataclass(frozen=True)
class Ring:
    """A ring. Its machines by stage, the head first; "": lost, and not replaced yet."""

    id: str
    machines: tuple[str, ...]
    layers: tuple[range, ...]
    gap_since: float | None = None
    restored: bool = False  # by machines that had their places at the hub before

    @property
    def whole(self) -> bool:
        return "" not in self.machines


class RingTable:
    """All lent machines of a run. `changed` collects those whose place, or whose ring, is another now."""

    def __init__(self, division: StageMemory) -> None:
        self._division = division
        self.lenders: dict[str, Lender] = {}  # in the order in which they came
        self.rings: dict[str, Ring] = {}
        self.changed: set[str] = set()
        self._latencies: dict[frozenset[str], float] = {}  # seconds, by pair
        self._lost: set[tuple[str, str]] = set()  # lines: who does not reach whom
        self._rates: dict[tuple[str, str], float] = {}  # bytes a second, from one machine to the other
        self._place: dict[str, str] = {}  # machine -> its ring

    def ring_of(self, machine: str) -> Ring | None:
        """Return the ring that a machine is in."""
        return self.rings.get(self._place.get(machine, ""))

    @property
    def waiting(self) -> list[Lender]:
        return [lender for lender in self.lenders.values() if lender.id not in self._place]

    def latency(self, one: str, other: str) -> float:
        """Return the seconds from one machine to the other; inf: one does not reach the other."""
        if {(one, other), (other, one)} & self._lost:
            return inf
        return self._latencies.get(frozenset((one, other)), UNKNOWN_S)

    def measured(self, one: str, other: str, seconds: float) -> None:
        """Take a latency that one machine has measured to the other; inf: it does not reach it."""
        self._lost -= {(one, other), (other, one)}
        if seconds == inf:
            self._lost.add((one, other))
        else:
            self._latencies[frozenset((one, other))] = seconds

    def rated(self, one: str, other: str, rate: float) -> None:
        """Take the bytes a second from one machine to the other."""
        self._rates[one, other] = rate

    def _machines(self, ids: Sequence[str]) -> Machines:
        """Return what is known of machines and of the lines between them; "": of none."""
        rates = [[self._rates.get((one, other), UNKNOWN_RATE) for other in ids] for one in ids]
        latencies = [
            [self.latency(one, other) if self._connect(one, other) else inf for other in ids] for one in ids
        ]
        memories = [self.lenders[id].memory if id else inf for id in ids]
        return Machines(rates, latencies, memories)

    def _load(self, stages: int) -> PipelineLoad:
        """Return a step of a ring of so many machines."""
        division = self._division
        memory = division.memory(stages, 0, range(division.layers))
        return PipelineLoad(division.micro_batches, division.activation, division.gradient, memory)

    def _connect(self, one: str, other: str) -> bool:
        """Tell whether one of two machines can dial the other; "" can."""
        return any(not id or self.lenders[id].reachable for id in (one, other))

    # ---- machines come and go ------------------------------------------------------------------------------

    def come(self, lender: Lender) -> None:
        """Take a machine that lends its memory."""
        self.lenders[lender.id] = lender
        self.changed.add(lender.id)

    def restore(self, lender: Lender, ring: Ring, number: int) -> bool:
        """Take a machine with the place that it says it had at the hub before this one.

        The first of a ring says how its layers are divided; for BACK_S nobody else gets the others' places.
        Returns False where the place is taken, too large for the machine, or no place of such a ring.
        """
        new = Ring(ring.id, ("",) * len(ring.layers), ring.layers, restored=True)
        known = self.rings.get(ring.id, new)
        whole = ring.layers[-1].stop == self._division.layers and known.layers == ring.layers
        if not whole or not self._suits(known, number, lender) or known.machines[number]:
            return False
        self.lenders[lender.id] = lender
        self._put(known, number, lender.id)
        return True

    def gone(self, machine: str) -> None:
        """Take a machine out: it has left, or is lost."""
        self.lenders.pop(machine, None)
        self._latencies = {pair: s for pair, s in self._latencies.items() if machine not in pair}
        self._lost = {pair for pair in self._lost if machine not in pair}
        self._rates = {pair: rate for pair, rate in self._rates.items() if machine not in pair}
        ring = self.ring_of(machine)
        if ring is None:
            return
        del self._place[machine]
        left = tuple("" if other == machine else other for other in ring.machines)
        if any(left):
            self._set(replace(ring, machines=left))
        else:
            self._dissolve(ring)

    def _put(self, ring: Ring, number: int, machine: str) -> None:
        if old := ring.machines[number]:
            del self._place[old]
            self.changed.add(old)
        machines = (*ring.machines[:number], machine, *ring.machines[number + 1 :])
        self._place[machine] = ring.id
        self._set(replace(ring, machines=machines))

    def _set(self, ring: Ring) -> None:
        since, restored = (None, False) if ring.whole else (ring.gap_since, ring.restored)
        self.rings[ring.id] = replace(ring, gap_since=since, restored=restored)
        self.changed |= {machine for machine in ring.machines if machine}

    def _dissolve(self, ring: Ring) -> None:
        """Let all machines of a ring wait."""
        del self.rings[ring.id]
        for machine in ring.machines:
            if machine in self._place:
                del self._place[machine]
                self.changed.add(machine)

    # ---- time ----------------------------------------------------------------------------------------------

    def tick(self, now: float, new_id: Iterator[str]) -> None:
        """Fill gaps, dissolve rings that had one for too long, and form rings of those that wait."""
        for ring in list(self.rings.values()):
            if ring.restored and ring.gap_since is not None and now >= ring.gap_since + BACK_S:
                self.rings[ring.id] = ring = replace(ring, restored=False)
            if not ring.restored:
                self._fill(ring)
        for ring in list(self.rings.values()):
            if not ring.whole and ring.gap_since is None:
                self.rings[ring.id] = replace(ring, gap_since=now)
            elif ring.gap_since is not None and now >= ring.gap_since + GAP_S:
                self._dissolve(ring)
        while (found := self._choose()) is not None:
            machines, layers = found
            self._place |= dict.fromkeys(machines, id := next(new_id))
            self._set(Ring(id, machines, layers))

    def deadline(self) -> float:
        """Return when `tick` has something to do, if no machine comes or goes before. inf: never."""
        return min((due(ring) for ring in self.rings.values() if not ring.whole), default=inf)

    def _fill(self, ring: Ring) -> None:
        """Give waiting machines the places of lost ones, and of those that have lost a line to a neighbour,
        the one that most do not reach first."""
        lost = [(machine != "", -sum(to == machine for _, to in self._lost)) for machine in ring.machines]
        for number in sorted(range(len(lost)), key=lambda number: (*lost[number], -number)):
            beside = neighbours(ring, number) - {""}
            if (machine := ring.machines[number]) and self._reaches(machine, beside):
                continue
            able = [one for one in self.waiting if self._suits(ring, number, one)]
            if able:
                step_s = {one.id: self._step_s(ring, number, one) for one in able}
                self._put(ring, number, min(able, key=lambda one: (step_s[one.id], one.memory)).id)
                ring = self.rings[ring.id]

    def _step_s(self, ring: Ring, number: int, lender: Lender) -> float:
        """Return the seconds of a step with a machine in that place of a ring, by its lines."""
        ids = [*ring.machines[:number], lender.id, *ring.machines[number + 1 :]]
        return Placement(self._machines(ids), self._load(len(ids))).seconds(tuple(range(len(ids))))

    def _reaches(self, machine: str, others: Iterable[str]) -> bool:
        return all(self.latency(machine, other) < inf for other in others)

    def _suits(self, ring: Ring, number: int, lender: Lender) -> bool:
        """True where a machine has the memory for a place of a ring, and its neighbours and it can dial."""
        stages = len(ring.layers)
        if not 0 <= number < stages:
            return False
        if lender.memory < self._division.memory(stages, number, ring.layers[number]):
            return False
        beside = neighbours(ring, number) - {"", lender.id}
        if not self._reaches(lender.id, beside):
            return False
        return lender.reachable or all(self.lenders[other].reachable for other in beside)

    def _choose(self) -> tuple[tuple[str, ...], tuple[range, ...]] | None:
        """Choose machines for a new ring, and divide the layers among them. None: they lack the memory."""
        able = sorted(self.waiting, key=lambda one: -one.memory)  # of equal ones, in the order of coming
        for count in range(1, min(len(able), MOST) + 1):
            chosen = strongest(able, count)
            if not chosen or self._division.divide([one.memory for one in chosen]) is None:
                continue
            others = [one for one in able if one not in chosen]
            for order in (self._best([*chosen, *others], count), self._best(chosen, count), chosen):
                if not all(self._reaches(one.id, [other.id]) for one, other in pairs(order)):
                    continue
                layers = self._division.divide([one.memory for one in order])
                if layers is not None:
                    return tuple(one.id for one in order), layers
        return None

    def _best(self, able: Sequence[Lender], count: int) -> Sequence[Lender]:
        """Choose and order `count` of these machines by their lines: where these are equal, the first ones.
        Returns those where there is nothing to choose, or too much."""
        if not 1 < count <= ORDERED:
            return able[:count]
        able = able[:ORDERED]
        ring = best_ring(self._machines([one.id for one in able]), self._load(count), count)
        return [able[number] for number in ring or range(count)]


def pairs(order: Sequence[Lender]) -> list[tuple[Lender, Lender]]:
    """Return all neighbours of a ring."""
    return list(zip(order, (*order[1:], order[0]), strict=True))


def due(ring: Ring) -> float:
    """Return when something becomes of a ring that is not whole, whoever comes."""
    if ring.gap_since is None:
        return -inf
    return ring.gap_since + (BACK_S if ring.restored else GAP_S)


def neighbours(ring: Ring, number: int) -> set[str]:
    """Return the machines before and after a place; "": that one is lost."""
    count = len(ring.machines)
    return {ring.machines[(number + step) % count] for step in (-1, 1)}


def strongest(able: Sequence[Lender], count: int) -> list[Lender]:
    """Choose `count` machines, those first that come first, in an order in which they can dial each other.

    Returns [] where too few can be reached. The first of several is reachable, and has the layers' ends.
    """
    if count == 1:
        return list(able[:1])
    hidden = [one for one in able if not one.reachable][: count // 2]
    open_ = [one for one in able if one.reachable]
    if len(open_) + len(hidden) < count:
        return []
    order = {one.id: at for at, one in enumerate(able)}
    chosen = sorted([*open_, *hidden], key=lambda one: order[one.id])[:count]
    inside = [one for one in chosen if not one.reachable]
    outside = [one for one in chosen if one.reachable]
    places: list[Lender] = []
    for number in range(count):
        places.append((inside if number % 2 and inside else outside).pop(0))
    return places
