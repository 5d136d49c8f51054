"""Every preset in a whole run: one model on all peers to the bit, and an owner that can be had again."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Member, Swarm, recipe_of

from cocktail_cli.host import RunDelegate
from recipes.config import PRESETS
from recipes.training import Event, StepDone
from transport import Ledger
from transport.protocol import events as hub

pytestmark = pytest.mark.slow

STEPS = 10
# of ten steps
SHORT: dict[str, dict[str, Any]] = {
    "cocktail": {},
    "cocktail-paper": {},
    "cocktail-wide": {},
    "cocktail-thin": {},
    "lora-cocktail": {},
    "allreduce": {},
    "local-sgd": {"local_steps": 4},
    "diloco": {"local_steps": 3, "shards": 2},
    "streaming-diloco": {"local_steps": 2, "random_ratio": 0.25},
    "sparseloco": {"local_steps": 2, "topk_chunk": 256, "topk_ratio": 1 / 16},
    "dgc": {"uncompressed_steps": 3, "topk_ratio": 0.05},
    "onebit": {"uncompressed_steps": 3},
    "co2": {"local_steps": 2, "staleness": 3},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_one_model_and_its_owner_is_replayed_to_the_bit(
    preset: str, neox: Path, data: Path, tmp_path: Path
) -> None:
    """Two peers and a third that comes late; who only reads the ledger has x' too, and e and v besides."""
    wanted: dict[str, Any] = {"compression": {"preset": preset, **SHORT[preset]}}
    if preset == "lora-cocktail":
        wanted["lora"] = {"lora_r": 4, "lora_dropout": 0.0}
    recipe = recipe_of(neox, data, **wanted)
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:

        def late(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.round == 0 and member.name == "ann":
                swarm.start("cat")
                while "cat" not in [ready.peer for ready in swarm.all(hub.PeerReady)]:
                    time.sleep(0.005)  # so that she is a member from the next round but one

        ann, bob = swarm.start("ann", "bob", watch=late)
        swarm.finish()
        cat = swarm.members["cat"]
        commits = swarm.all(hub.RoundCommitted)
        losses = [event.loss for event in swarm.all(hub.EvaluationDone)]

        assert len(commits) == -(-STEPS // recipe.compression.local_steps) + min(
            recipe.compression.staleness, 1
        )
        assert commits[-1].step == STEPS
        assert losses[-1] < losses[0]
        assert any(step.accepted for step in cat.steps)
        assert torch.equal(ann.common, bob.common)
        assert torch.equal(ann.common, cat.common)
        assert torch.equal(ann.common, swarm.folded())
        swarm.audit()
        mine = swarm.work.aggregator.assigned

    again = RunDelegate(recipe, swarm.base, swarm.corpus, tmp_path / "run" / "ledger")
    with Ledger(tmp_path / "run" / "ledger", run="test-run", samples=len(swarm.corpus)) as ledger:
        again.recover(ledger)
    again.close()
    for number, owner in again.aggregator.assigned.items():
        assert torch.equal(owner.error, mine[number].error)
        assert torch.equal(owner.momentum, mine[number].momentum)
        assert bool(owner.momentum.numel()) == (recipe.compression.outer_momentum > 0)


def test_a_peer_that_leaves_in_the_middle_of_its_local_steps_costs_no_sample(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """Its lease is done again by who stays, and every sample is counted once."""
    recipe = recipe_of(neox, data, compression={"preset": "diloco", "local_steps": 3})
    with Swarm(recipe, tmp_path / "run", min_peers=1) as swarm:
        bob = swarm.prepare("bob")
        model = bob.peer.trainer.model  # type: ignore[attr-defined]
        made = []

        def leave(*_: object) -> None:
            made.append(bob.peer.unfinished)
            if made.count(True) == 1:
                bob.leave()

        model.register_forward_hook(leave)
        ann = swarm.prepare("ann")
        swarm.go(ann)
        swarm.go(bob)
        swarm.finish()

        assert True in made
        assert bob.peer.unfinished
        assert torch.equal(ann.common, swarm.folded())
        swarm.audit()
