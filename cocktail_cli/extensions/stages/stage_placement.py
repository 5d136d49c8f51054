"""Places pipeline stages on machines by what these measure of each other (after DT-FM, Yuan et al., 2022).

A replica is a ring of machines. Their speeds are not known, and count as much faster than any line. For M
micro-batches it takes

    seconds of a ring = M slowest edge + sum of edges there and back
    slowest edge      = the largest of activation / rate_ij and gradient / rate_ji, and for each machine
                        (activation + gradient) / its fastest link, since both share its line

DT-FM averages gradients between machines and places replicas for that too; here packets go to the hub.

The search is local: swaps of two machines and reversed stretches, from several beginnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from random import Random

Matrix = Sequence[Sequence[float]]  # from row to column
Ring = tuple[int, ...]  # machines by number, in the order of their stages
RESTARTS = 16  # beginnings of the search


@dataclass(frozen=True)
class Machines:
    """Measurements of machines, by number."""

    rates: Matrix  # bytes a second of a link
    latencies: Matrix  # seconds of a link, one way
    memories: Sequence[float]  # bytes


@dataclass(frozen=True)
class PipelineLoad:
    """A replica's step."""

    micro_batches: int
    activation: float  # bytes of a micro-batch between two stages
    gradient: float
    memory: float  # bytes that all stages of a replica take together


class Placement:
    """Seconds of rings, remembered by ring."""

    def __init__(self, machines: Machines, load: PipelineLoad) -> None:
        self.machines, self.load = machines, load
        self._seconds: dict[Ring, float] = {}
        count = range(len(machines.memories))
        a, g, rates, latencies = load.activation, load.gradient, machines.rates, machines.latencies
        ways = [[(a / rates[i][j], g / rates[j][i]) for j in count] for i in count]  # there and back
        self._edge = [[max(ways[i][j]) * (i != j) for j in count] for i in count]
        self._ramp = [
            [(sum(ways[i][j]) + latencies[i][j] + latencies[j][i] if i != j else 0.0) for j in count]
            for i in count
        ]
        links = [[rate for j in count if j != i for rate in (rates[i][j], rates[j][i])] for i in count]
        self._line = [(a + g) / max(each, default=inf) for each in links]

    def seconds(self, ring: Ring) -> float:
        """Return the seconds of a step; infinite where the ring has not the memory."""
        if ring not in self._seconds:
            self._seconds[ring] = self._step(ring)
        return self._seconds[ring]

    def _step(self, ring: Ring) -> float:
        if sum(self.machines.memories[i] for i in ring) < self.load.memory:
            return inf
        pairs = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        slowest = max(max(self._edge[i][j] for i, j in pairs), max(self._line[i] for i in ring))
        ramp = sum(self._ramp[i][j] for i, j in pairs)
        return self.load.micro_batches * slowest + ramp

    def improve(self, order: list[int], stages: int) -> tuple[float, list[int]]:
        """Improve an order of all machines, the first of which are the ring."""
        best, moved = self.seconds(ring_of(order, stages)), True
        while moved:
            moved = False
            for candidate in neighbours(order, stages):
                seconds = self.seconds(ring_of(candidate, stages))
                if seconds * (1 + 1e-12) < best:
                    best, order, moved = seconds, candidate, True
                    break
        return best, order


def best_ring(machines: Machines, load: PipelineLoad, stages: int) -> Ring | None:
    """Choose and order so many machines for a ring, two or more; of equal rings that of the first machines.
    None: no ring has the memory."""
    count = len(machines.memories)
    placement, random, found = Placement(machines, load), Random(0), list[tuple[float, list[int]]]()
    order = [*range(count)]
    for _ in range(RESTARTS):
        found.append(placement.improve(order, stages))
        order = random.sample(range(count), count)
    seconds, order = min(found, key=lambda each: each[0])
    return ring_of(order, stages) if seconds < inf else None


def ring_of(order: Sequence[int], stages: int) -> Ring:
    """Cut the ring off an order of machines, from its least machine on: a ring has no beginning."""
    least = order.index(min(order[:stages]))
    return (*order[least:stages], *order[:least])


def neighbours(order: list[int], stages: int) -> Iterator[list[int]]:
    """Yield the orders that a swap of two machines, or a reversed stretch of the ring, makes."""
    for i, j in combinations(range(len(order)), 2):
        if i < stages:
            swapped = order.copy()
            swapped[i], swapped[j] = order[j], order[i]
            yield swapped
        if j < stages and j - i > 1:
            yield [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]]
