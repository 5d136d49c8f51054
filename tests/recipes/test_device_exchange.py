"""The study's exchange on a device: what it computes is what the product's packets say."""

import pytest
import torch
from torch import Tensor

from compress import Cocktail
from recipes.algorithm import Aggregator, GlobalModel, OuterOptimizer, Worker
from scripts.study.device_exchange import DeviceExchange, compressed

WIDTH, PEERS = 40_000, 4


def heavy_tailed(count: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draws) / torch.rand(count, generator=draws).sqrt()


def alike(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit but for buckets whose scale lies on the border of two BF16 numbers."""
    return (
        float((one == other).float().mean()) > 0.995 and float(torch.dist(one, other) / other.norm()) < 1e-3
    )


@pytest.mark.parametrize("keep", [1.0, 0.2])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16, 32])
def test_a_compressed_vector_is_what_its_packet_decodes_to(bits: int, keep: float) -> None:
    compressor = Cocktail(random_ratio=1.0, topk_ratio=keep, quant_bits=bits)
    both = torch.stack([heavy_tailed(WIDTH + 5, seed) for seed in (1, 2)])

    for own, found in zip(both, compressed(compressor, both), strict=True):
        assert alike(found, compressor.encode(own).update().decoded().dense())


@pytest.mark.parametrize("outer", [OuterOptimizer(), OuterOptimizer("packets"), OuterOptimizer(0.7, 0.9)])
@pytest.mark.parametrize("mix", [Cocktail(0.3, 0.2, 2), Cocktail(1.0, 1.0, 4)])
def test_rounds_of_four_peers_are_those_of_workers_and_an_aggregator(
    mix: Cocktail, outer: OuterOptimizer
) -> None:
    """Unequal weights, and a peer whose updates are so long that they are shortened."""
    start, weights = heavy_tailed(WIDTH, 3), [1.0, 2.0, 1.0, 1.0]
    workers = [Worker(start.clone(), GlobalModel(start.clone(), mix, 1)) for _ in range(PEERS)]
    aggregator = Aggregator(WIDTH, mix, 1, outer=outer)
    xs, model = [start.clone() for _ in range(PEERS)], GlobalModel(start.clone(), mix, 1)
    exchange = DeviceExchange(model, outer, decay=1.0)
    for round in range(5):
        for peer in range(PEERS):
            step = heavy_tailed(WIDTH, 10 * round + peer) * (0.03 if peer else 0.3)
            workers[peer].x.add_(step)
            xs[peer].add_(step)
        sent = [worker.start() for worker in workers]
        packets = [(str(i), one.packet, weights[i]) for i, one in enumerate(sent)]
        aggregate = aggregator.step(round, packets)
        for worker, one in zip(workers, sent, strict=True):
            worker.finish(aggregate, one)
        exchange.finish(xs, exchange.start(xs, round), weights)

    moved = float(torch.dist(workers[0].global_model.vector, start))
    assert float(torch.dist(model.vector, workers[0].global_model.vector)) < 2e-3 * moved
    for worker, x in zip(workers, xs, strict=True):
        assert float(torch.dist(x, worker.x)) < 2e-3 * moved
    assert float(torch.dist(exchange.error, aggregator.assigned[0].error)) < 2e-3 * moved
