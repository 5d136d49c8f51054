"""Rounds of a swarm as its hub sees them: a clock of floats, lognormal noise, real shares of the batch."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cocktail_cli.extensions.diagnosis.bodies import Spent
from cocktail_cli.extensions.diagnosis.slow_rounds import PeerSample, RoundSample
from transport.scheduling import LoadBalancer


@dataclass(frozen=True)
class Machine:
    """The times of one peer's round, in seconds. A fault replaces some of them."""

    sample: float = 0.25  # of compute, each
    encode: float = 0.05
    up: float = 2e5  # bytes a second
    down: float = 1e6
    apply: float = 0.05
    counters: Mapping[str, float] = field(default_factory=dict)  # of Spent
    stops: float = 0.0  # before its next update


@dataclass
class Place:
    """The phase of its round that a peer is in."""

    done: float = 0.0
    taken: float = 0.0
    reported: float = 0.0
    arrived: float = 0.0
    computed: float = 0.0
    compute_s: float = 0.0
    samples: int = 0
    idle: float = 0.0
    download: float = 0.0
    apply: float = 0.0


class SimulatedRounds:
    """A run at staleness 1: `round` yields the next sample. `fault(number, name)` returns a machine."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        *,
        seed: int = 1,
        noise: float = 0.2,
        batch: int = 16,
        packet: int = 100_000,
        fault: Callable[[int, str], Machine | None] = lambda number, name: None,
        hub_disk: Callable[[int], float] = lambda number: 0.02,
    ) -> None:
        self.machines, self.noise, self.batch, self.packet = machines, noise, batch, packet
        self.random, self.fault, self.hub_disk = random.Random(seed), fault, hub_disk
        self.places = {name: Place() for name in machines}
        self.balancer, self.opened, self.number = LoadBalancer(), 0.0, 0

    def noisy(self, seconds: float) -> float:
        return seconds * self.random.lognormvariate(0.0, self.noise)

    def round(self) -> RoundSample:
        number, opened, names = self.number, self.opened, sorted(self.machines)
        portions = self.balancer.portions([1.0] * self.batch, names, number, 1)
        peers = {}
        for name, portion in zip(names, portions, strict=True):
            machine, place = self.fault(number, name) or self.machines[name], self.places[name]
            taken = max(opened, place.done) + machine.stops
            waited = max(0.0, opened - place.done)
            encode, upload = self.noisy(machine.encode), self.noisy(self.packet / machine.up)
            reported, before = taken + encode, place.reported
            counters = {"stopped": machine.stops, **machine.counters}
            spent = Spent(
                cycle=millis(reported - before),
                idle=millis(place.idle + waited),
                encode=millis(encode),
                download=millis(place.download),
                apply=millis(place.apply),
                **{key: round(1000 * value) for key, value in counters.items()},
            )
            compute = self.noisy(len(portion.samples) * machine.sample)
            peers[name] = PeerSample(
                name,
                reported + upload,
                compute_s=place.compute_s,
                samples=place.samples,
                cost=float(place.samples),
                upload_s=upload,
                up=self.packet,
                down=self.packet,
                spent=spent,
            )
            self.balancer.note(name, place.samples, place.compute_s)
            self.places[name] = replace(
                place,
                taken=taken,
                reported=reported,
                arrived=reported + upload,
                computed=taken + 0.01 + compute,
                compute_s=compute,
                samples=len(portion.samples),
            )
        disk = self.noisy(self.hub_disk(number))
        committed = max(peer.arrived for peer in peers.values()) + disk
        for name, place in self.places.items():
            machine = self.fault(number, name) or self.machines[name]
            place.download, place.apply = self.noisy(self.packet / machine.down), self.noisy(machine.apply)
            place.idle = max(0.0, committed - max(place.arrived, place.computed))
            place.done = max(committed + place.download, place.computed) + place.apply
        self.opened, self.number = committed, number + 1
        return RoundSample(number, opened, peers, disk_s=disk)


def millis(seconds: float) -> int:
    return max(0, round(1000 * seconds))
