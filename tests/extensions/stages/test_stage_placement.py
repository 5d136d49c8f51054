"""The placement of stages is near the best there is, and changes little when a machine goes."""

import dataclasses
from itertools import permutations
from math import inf
from random import Random

import pytest

from cocktail_cli.extensions.stages.lines import check_address, dials
from cocktail_cli.extensions.stages.stage_placement import Machines, PipelineLoad, Placement, best_ring
from transport.protocol import UrlError

LOAD = PipelineLoad(micro_batches=16, activation=4e6, gradient=8e6, memory=4.0)
SHAPES = [
    (2, 4),
    (3, 6),
    (2, 6),
    (4, 4),
    (3, 7),
    (4, 8),
    (2, 8),
    (3, 9),
    (5, 10),
    (2, 10),
]  # stages, machines


def drawn(count: int, seed: int, memory: float = 4.0) -> Machines:
    """Machines in a few places, with lines from 20 Mbit/s to 1 Gbit/s."""
    random = Random(seed)
    homes = [random.randrange(3) for _ in range(count)]
    lines = [10 ** random.uniform(6.4, 8.1) for _ in range(count)]
    rates = [[min(lines[i], lines[j]) * random.uniform(0.3, 1) for j in range(count)] for i in range(count)]
    latencies = [
        [0.002 if homes[i] == homes[j] else random.uniform(0.01, 0.1) for j in range(count)]
        for i in range(count)
    ]
    return Machines(rates, latencies, [memory] * count)


def least(machines: Machines, stages: int) -> float:
    """The fewest seconds of all rings, tried one by one."""
    placement = Placement(machines, LOAD)
    rings = (ring for ring in permutations(range(len(machines.memories)), stages) if ring[0] == min(ring))
    return min(map(placement.seconds, rings))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_no_ring_is_five_per_cent_better(stages: int, count: int, mixed: bool) -> None:
    """Beside all rings of up to 10 machines, tried one by one, whether each has the memory for the model or
    rings must be composed to have it."""
    for seed in range(SEEDS):
        machines = drawn(count, seed)
        if mixed:
            random = Random(seed + 99)
            sizes = [random.choice([0.8, 1.3, 2.0, 4.0]) for _ in range(count)]
            machines = dataclasses.replace(machines, memories=sizes)
        ring = best_ring(machines, LOAD, stages)
        found = inf if ring is None else Placement(machines, LOAD).seconds(ring)
        assert found <= 1.05 * least(machines, stages)


SEEDS = 2  # matrices of each shape and kind; 50 are 1,000


def test_machines_too_small_for_the_model_are_no_ring() -> None:
    assert sorted(best_ring(drawn(4, 1, memory=1.0), LOAD, 4) or ()) == [0, 1, 2, 3]
    assert best_ring(drawn(3, 1, memory=1.0), LOAD, 3) is None


def test_where_all_are_alike_the_ring_is_that_of_the_first_machines() -> None:
    alike = Machines([[1e6] * 5] * 5, [[0.01] * 5] * 5, [2.0] * 5)
    assert best_ring(alike, LOAD, 3) == (0, 1, 2)


def test_a_thin_link_is_avoided() -> None:
    """Two pairs of machines with fast links between each, and thin ones across: a pair is the ring."""
    fast, thin = 1e8, 1e6
    rates = [[fast if i // 2 == j // 2 else thin for j in range(4)] for i in range(4)]
    machines = Machines(rates, [[0.01] * 4] * 4, [2.0] * 4)
    assert best_ring(machines, LOAD, 2) in ((0, 1), (2, 3))
    assert Placement(machines, LOAD).seconds((0, 2)) < inf


ADDRESSES = ("", "relay:29399/" + "a" * 32, "there:1")  # from the least direct one


@pytest.mark.parametrize("here", ADDRESSES)
@pytest.mark.parametrize("there", ADDRESSES)
def test_of_two_machines_one_dials_the_more_direct_address(here: str, there: str) -> None:
    forth, back = dials(here, there, first=True), dials(there, here, first=False)
    assert forth + back == bool(here or there)
    if forth:
        assert ADDRESSES.index(there) >= ADDRESSES.index(here)


def test_an_address_leads_to_a_machine_itself_or_to_its_name_behind_another_place() -> None:
    name = "a" * 32
    for right in ("there:1", f"relay:29399/{name}"):
        check_address(right)
    for wrong in (f"relay/{name}", "relay:29399/", "relay:29399/x", f"relay:1/{name}/{name}"):
        with pytest.raises(UrlError):
            check_address(wrong)
