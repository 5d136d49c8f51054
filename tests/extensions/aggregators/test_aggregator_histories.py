"""Whatever happens to a swarm whose peers own shards, no round waits for ever and each sample counts once."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_aggregators import ShardedSim
from test_hub_state import DECISIONS, drawn_history, lives_through


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.integers(0, 2), st.integers(1, 4), st.lists(DECISIONS, max_size=60))
def test_whatever_happens_to_aggregators_the_run_ends(
    staleness: int, peers: int, history: list[tuple[str, int]]
) -> None:
    lives_through(ShardedSim(staleness), peers, history)


@pytest.mark.slow
def test_sixty_histories_of_aggregators() -> None:
    for seed in range(60):
        random = Random(seed)
        history = drawn_history(random)
        lives_through(ShardedSim(random.randint(0, 2)), random.randint(1, 4), history, f"seed {seed}")


def test_without_faults_every_round_moves_all_shards() -> None:
    swarm = ShardedSim()
    for _ in range(3):
        swarm.join()
    swarm.settle()

    assert swarm.attempt > 2, "peers own shards"
    assert not [event for event in swarm.events if "have not moved" in getattr(event, "message", "")]
