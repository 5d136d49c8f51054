"""Packets of some shards together are that of all."""

import pytest
import torch
from test_aggregator import MIX, SEED, N, updates_of, workers

from cocktail_cli.extensions.aggregators.durable_shards import assemble, before, longest_errors
from compress import join, split
from recipes.algorithm import Aggregator, OuterOptimizer, RejectedUpdate, adaptive_rate_of, select_shards
from recipes.config import PRESETS, Compression


def test_aggregators_of_some_shards_together_are_the_aggregator_of_all() -> None:
    peers, one, two = workers(), Aggregator(N, MIX, SEED), Aggregator(N, MIX, SEED)
    one.assign([0, 2])
    two.assign([1])
    updates = updates_of(peers)

    def of(numbers: list[int]) -> list[tuple[str, bytes, float]]:
        return [(peer, select_shards(packet, numbers, 3), weight) for peer, packet, weight in updates]

    parts = [("two", [1], two.step(0, of([1])))]
    assert assemble(one, 0, one.step(0, of([0, 2])), parts) == Aggregator(N, MIX, SEED).step(0, updates)


def test_what_an_aggregator_sends_for_its_shards_is_looked_at() -> None:
    aggregator = Aggregator(N, MIX, SEED)
    good = aggregator.step(0, updates_of(workers()))
    for bad in (good[:-1], select_shards(good, [0], 3), join([good, good, good])):
        with pytest.raises(
            RejectedUpdate, match="the update of eve is refused: as the aggregator of shard 1"
        ):
            assemble(aggregator, 0, select_shards(good, [0], 3), [("ann", [2], good), ("eve", [1], bad)])

    assert split(assemble(aggregator, 0, select_shards(good, [0, 2], 3), []), 3)[1] == b"", "it has not moved"


@pytest.mark.parametrize("outer", [OuterOptimizer(1.0), OuterOptimizer(0.7, 0.9)], ids=["sum", "momentum"])
def test_an_aggregate_that_was_not_committed_is_taken_back(outer: OuterOptimizer) -> None:
    peers, aggregator = workers(), Aggregator(N, MIX, SEED, outer=outer)
    aggregator.step(0, updates_of(peers))

    def state() -> list[torch.Tensor]:
        return [
            vector.clone() for own in aggregator.assigned.values() for vector in (own.error, own.momentum)
        ]

    was = state()
    for worker in peers:
        worker.global_model.round = 1
    take_back = before(aggregator, 1)
    packet = aggregator.step(1, updates_of(peers))
    assert not all(map(torch.equal, state(), was))
    take_back()

    assert all(map(torch.equal, state(), was))
    assert aggregator.step(1, updates_of(peers)) == packet


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("shards", [1, 3])
def test_no_error_feedback_is_longer_than_its_receiver_knows_beforehand(preset: str, shards: int) -> None:
    parameters, compression = 8_001, Compression(preset=preset, shards=shards)
    aggregator = Aggregator(parameters, adaptive_rate_of(compression), 3)
    for shard in aggregator.assigned.values():
        shard.error.copy_(torch.randn(shard.shard.size))

    given = aggregator.assign([])
    assert 2 * parameters < len(given) <= longest_errors(compression, parameters)
