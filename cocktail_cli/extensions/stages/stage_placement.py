"""Places pipeline stages on machines by what these measure of each other (after DT-FM, Yuan et al., 2022).

A replica is a ring of machines, each with as many layers as its speed is worth. For M micro-batches it takes

    seconds of a ring = M max(whole / sum of speeds, slowest edge) + sum of edges there and back
    slowest edge      = the largest of activation / rate_ij and gradient / rate_ji, and for each machine
                        (activation + gradient) / its fastest link, since both share its line

Shares of the batch follow speed, so the best placement has the largest sum over replicas of 1 / seconds.
DT-FM averages gradients between machines and places replicas for that too; here packets go to the hub.

The search is local: swaps of two machines and reversed stretches, from several seeded beginnings.
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
    speeds: Sequence[float]  # micro-batches of the whole model a second
    memories: Sequence[float]  # bytes


@dataclass(frozen=True)
class PipelineLoad:
    """A replica's step."""

    micro_batches: int
    activation: float  # bytes of a micro-batch between two stages
    gradient: float
    memory: float  # bytes that all stages of a replica take together


@dataclass(frozen=True)
class Placed:
    """Rings, and machines that wait."""

    rings: tuple[Ring, ...]
    waiting: tuple[int, ...]
    rate: float  # steps a second, summed over the rings; 0: none has the memory


class Placement:
    """Seconds of rings, remembered by ring."""

    def __init__(self, machines: Machines, load: PipelineLoad) -> None:
        self.machines, self.load = machines, load
        self._seconds: dict[Ring, float] = {}
        count = range(len(machines.speeds))
        a, g, rates = load.activation, load.gradient, machines.rates
        self._edge = [
            [max(a / rates[i][j], g / rates[j][i]) if i != j else 0.0 for j in count] for i in count
        ]
        self._ramp = [
            [
                a / rates[i][j] + g / rates[j][i] + machines.latencies[i][j] + machines.latencies[j][i]
                if i != j
                else 0.0
                for j in count
            ]
            for i in count
        ]
        self._line = []
        for i in count:
            links = [rate for j in count if j != i for rate in (rates[i][j], rates[j][i])]
            self._line.append((a + g) / max(links, default=inf))

    def seconds(self, ring: Ring) -> float:
        """Return the seconds of a step; infinite where the ring has not the memory."""
        if ring not in self._seconds:
            self._seconds[ring] = self._step(ring)
        return self._seconds[ring]

    def _step(self, ring: Ring) -> float:
        if sum(self.machines.memories[i] for i in ring) < self.load.memory:
            return inf
        compute = 1 / sum(self.machines.speeds[i] for i in ring)
        if len(ring) == 1:
            return self.load.micro_batches * compute
        pairs = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        slowest = max(max(self._edge[i][j] for i, j in pairs), max(self._line[i] for i in ring))
        ramp = sum(self._ramp[i][j] for i, j in pairs)
        return self.load.micro_batches * max(compute, slowest) + ramp

    def rate(self, rings: Sequence[Ring]) -> float:
        return sum(1 / self.seconds(ring) for ring in rings)

    def improve(self, order: list[int], stages: int, replicas: int) -> tuple[float, list[int]]:
        """Improve an order of all machines, the first stages x replicas of which are the rings."""
        best, moved = self.rate(rings_of(order, stages, replicas)), True
        while moved:
            moved = False
            for candidate in neighbours(order, stages, replicas):
                rate = self.rate(rings_of(candidate, stages, replicas))
                if rate > best * (1 + 1e-12):
                    best, order, moved = rate, candidate, True
                    break
        return best, order


def place(
    machines: Machines, load: PipelineLoad, stages: int = 0, replicas: int = 0, seed: int = 0
) -> Placed:
    """Place replicas; the same on all machines, and of equal placements that of the first machines.

    Args:
        stages: of each replica; 0: that number which gives the highest rate, the fewest of equal ones.
        replicas: 0: as many as there are machines for.
    """
    count = len(machines.speeds)
    if stages == 0:
        every = [place(machines, load, tried, seed=seed) for tried in range(1, count + 1)]
        return max(every, key=lambda placed: placed.rate)
    if not 1 <= stages <= count:
        raise ValueError(f"{stages} stages on {count} machines")
    placement, random, found = Placement(machines, load), Random(seed), list[tuple[float, list[int]]]()
    replicas = replicas or count // stages
    order = sorted(range(count), key=lambda i: (-machines.speeds[i], i))
    for _ in range(RESTARTS):
        found.append(placement.improve(order, stages, replicas))
        order = random.sample(range(count), count)
    rate, order = max(found, key=lambda each: each[0])
    rings = rings_of(order, stages, replicas)
    able = tuple(ring for ring in rings if placement.seconds(ring) < inf)
    used = {machine for ring in able for machine in ring}
    return Placed(able, tuple(i for i in range(count) if i not in used), rate)


def rings_of(order: Sequence[int], stages: int, replicas: int) -> list[Ring]:
    """Cut an order of machines into rings, each from its least machine on: a ring has no beginning."""
    found = []
    for start in range(0, stages * replicas, stages):
        ring = order[start : start + stages]
        least = ring.index(min(ring))
        found.append((*ring[least:], *ring[:least]))
    return found


def neighbours(order: list[int], stages: int, replicas: int) -> Iterator[list[int]]:
    """Yield the orders that a swap of two machines, or a reversed stretch of a ring, makes."""
    placed = stages * replicas
    for i, j in combinations(range(len(order)), 2):
        if i < placed:
            swapped = order.copy()
            swapped[i], swapped[j] = order[j], order[i]
            yield swapped
        if j < placed and i // stages == j // stages and j - i > 1:
            yield [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]]
