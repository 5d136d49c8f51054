"""Whatever happens to a swarm whose peers own shards, no round waits for ever and each sample counts once."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_owners import OwnersSim
from test_hub_state import DECISIONS, WORDS, play


def lives_through(swarm: OwnersSim, peers: int, history: list[tuple[str, int]]) -> None:
    for _ in range(peers):
        swarm.join()
    play(swarm, history)
    swarm.reject = ""
    if swarm.ended is None:
        swarm.join()
    ended = swarm.settle()

    once = len(set(swarm.trained)) == len(swarm.trained)
    assert sorted(swarm.trained) == list(range(13)) if ended.finished else once
    assert ended.finished or ended.exit_code == 7


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.integers(0, 1), st.integers(1, 4), st.lists(DECISIONS, max_size=60))
def test_whatever_happens_to_owners_the_run_ends(
    staleness: int, peers: int, history: list[tuple[str, int]]
) -> None:
    lives_through(OwnersSim(staleness), peers, history)


@pytest.mark.slow
def test_five_hundred_histories_of_owners() -> None:
    for seed in range(500):
        random = Random(seed)
        weights = [random.random() ** 2 for _ in WORDS]
        history = [
            (random.choices(WORDS, weights)[0], random.randint(0, 5)) for _ in range(random.randint(0, 150))
        ]
        lives_through(OwnersSim(random.randint(0, 1)), random.randint(1, 4), history)


def test_without_faults_every_round_moves_all_shards() -> None:
    swarm = OwnersSim()
    for _ in range(3):
        swarm.join()
    swarm.settle()

    assert swarm.attempt > 2, "peers own shards"
    assert not [event for event in swarm.events if "have not moved" in getattr(event, "message", "")]
