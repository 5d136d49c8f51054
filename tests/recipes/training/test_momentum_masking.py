"""Momentum masking: nothing of the first moment is left where an update was taken, all of it elsewhere."""

import pytest
import torch
from test_matrix_optimizers import model
from torch import Tensor

from recipes.algorithm import Aggregator, compressor_of
from recipes.config import Recipe, load_recipe
from recipes.errors import RecipeError
from recipes.training import Peer, SingleDeviceTrainer, build_peer

MASKED = "compression.momentum_masking=true"
WHOLE, LATE = 0, 2  # rounds: everything is sent; the update is not taken


def recipe(*keys: str) -> Recipe:
    return load_recipe("smoke", ["compression.topk_ratio=0.05", "compression.staleness=0", *keys])


def take_step(peer: Peer, seed: int) -> None:
    trainer = peer.trainer
    assert isinstance(trainer, SingleDeviceTrainer)
    drawn = torch.randn(trainer.layout.size, generator=torch.Generator().manual_seed(seed))
    trainer.flat.grad.copy_(drawn)
    trainer.step(1e-2)


def moment(peer: Peer) -> Tensor:
    """Read AdamW's first moment of all parameters (P,), in the vector's order."""
    trainer = peer.trainer
    assert isinstance(trainer, SingleDeviceTrainer)
    state = trainer.optimizer.state
    return torch.cat([state[parameter]["exp_avg"].flatten() for parameter in trainer.flat.masters])


@pytest.mark.parametrize(
    "keys",
    [
        ("compression.random_ratio=1.0",),
        ("compression.random_ratio=0.4", "compression.sample_kind=element", "compression.shards=3"),
        ("model.dtype=bfloat16", "training.fp32_master_weights=false"),
    ],
)
def test_a_taken_update_clears_the_first_moment_where_it_had_values_and_a_late_or_whole_one_nowhere(
    keys: tuple[str, ...],
) -> None:
    asked = recipe(MASKED, "compression.uncompressed_steps=1", *keys)
    peer = build_peer(model(), asked, 1)
    worker, size = peer.worker, peer.trainer.layout.size
    aggregator = Aggregator(size, compressor_of(asked.compression), asked.training.seed)
    for round in range(4):
        take_step(peer, round)
        before = moment(peer).clone()
        sent = worker.start(0, False, round, ())
        packet = aggregator.step(round, [("peer", sent.packet, 1.0)])
        worker.follow(worker.global_model.decode(packet), None if round == LATE else sent)
        worker.global_model.move(worker.global_model.decode(packet))
        had = torch.zeros(size)
        for update in sent.shard_updates:
            update.add_(had)

        stays = (had == 0) | (round in (WHOLE, LATE))
        assert bool(before[had != 0].any())
        assert torch.equal(moment(peer), before * stays)


def test_without_the_key_a_taken_update_leaves_the_first_moment_alone() -> None:
    peer = build_peer(model(), recipe(), 1)
    take_step(peer, 0)
    before = moment(peer).clone()
    peer.worker.subtract(peer.worker.start(0, False, 0, ()))

    assert torch.equal(moment(peer), before)


def test_other_optimizers_refuse_it() -> None:
    with pytest.raises(RecipeError, match="`muon` has no first moment in float32 that could be masked"):
        recipe(MASKED, "optim=muon")
