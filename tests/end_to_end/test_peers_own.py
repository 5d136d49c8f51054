"""Peers that own shards, with the real algorithm: the same model as with one owner, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from in_process import Member, Swarm, recipe_of

from recipes.training.types import Event, StepDone
from transport.diagnosis import RoundSample, SlowestLine
from transport.protocol import events as hub

# Nobody is lost by a machine that is busy: bits are compared.
SWARM = {"step_timeout": 60.0, "peer_timeout": 60.0, "start_timeout": 60.0}
SECTIONS: dict[str, Any] = {
    "compression": {"shards": 4, "topk_ratio": 0.3},
    "training": {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "global_batch_size": 6},
}


RELAXED = {"local_steps": 2, "outer_momentum": 0.5, "error_decay": 0.9}


@pytest.mark.parametrize("relaxed", [{"staleness": 0}, {"staleness": 2}, RELAXED])
def test_whoever_owns_the_shards_the_model_is_the_same_to_the_bit(
    neox: Path, data: Path, tmp_path: Path, relaxed: dict[str, Any]
) -> None:
    """Samples, packets, errors and momentum of a shard do not depend on its owner."""
    models = []
    for owners in ("hub", "peers"):
        sections = SECTIONS | {"swarm": SWARM | {"owners": owners}}
        sections["compression"] = SECTIONS["compression"] | relaxed
        with Swarm(recipe_of(neox, data, **sections), tmp_path / owners, min_peers=3) as swarm:
            swarm.start("ann", "bob", "cat")
            swarm.finish()
            swarm.audit()
            models.append(swarm.members["ann"].common)
            assert len(swarm.work.aggregator.assigned) == (4 if owners == "hub" else 0)

    assert torch.equal(*models)


def test_owners_come_and_go_and_all_peers_hold_the_same_bits(neox: Path, data: Path, tmp_path: Path) -> None:
    sections = SECTIONS | {"swarm": SWARM | {"owners": "peers"}}
    sections["training"] = SECTIONS["training"] | {"num_train_epochs": 2}
    sections["compression"] = SECTIONS["compression"] | {"staleness": 2}
    with Swarm(recipe_of(neox, data, **sections), tmp_path / "run", min_peers=2) as swarm:

        def at_round(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.round == 3 and member.name == "ann":
                swarm.start("late")
            if isinstance(event, StepDone) and event.round == 8 and member.name == "bob":
                member.leave()

        swarm.start("ann", "bob", watch=at_round)
        swarm.finish()

        seen: dict[int, set[int]] = {}
        for member in swarm.members.values():
            for step in member.steps:
                seen.setdefault(step.round, set()).add(step.fingerprint)
        assert all(len(fingerprints) == 1 for fingerprints in seen.values())
        truth = swarm.folded().view(torch.int32)
        for name in ("ann", "late"):
            assert torch.equal(swarm.members[name].common.view(torch.int32), truth)
        still = [e.peer for e in swarm.all(hub.Warned) if "have not moved" in e.message]
        assert still in ([], ["bob"]), "a leaver may cost the round that opened with it"
        swarm.audit()


@pytest.mark.parametrize(("waited", "aggregators"), [(0.3, ["hub", "peers"]), (0.8, ["hub", "peers", "hub"])])
def test_peers_aggregate_as_long_as_that_is_faster_than_the_hub(
    neox: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waited: float,
    aggregators: list[str],
) -> None:
    """Error feedback goes to the peers, and back: all samples count once, and all hold the same bits."""
    by_hub: list[bool] = []  # of each round that was opened

    class Lines:
        """Devices wait for .8 of a step where the hub aggregates, else for `waited`; known after 5 rounds."""

        def __init__(self) -> None:
            self.shares: list[float] = []

        def add(self, sample: RoundSample) -> SlowestLine | None:
            self.shares.append(0.8 if by_hub[-1] else waited)
            return SlowestLine("the hub's down", median(self.shares), 1e5) if len(self.shares) > 4 else None

    monkeypatch.setattr("transport.scheduling.rounds.LineWatch", Lines)
    sections = SECTIONS | {"swarm": SWARM | {"owners": "auto"}}
    sections["training"] = SECTIONS["training"] | {"num_train_epochs": 3}
    with Swarm(recipe_of(neox, data, **sections), tmp_path / "run", min_peers=3) as swarm:
        own = swarm.work.own

        def noted(round: int, shards: Collection[int], keep: Callable[[bytes], int]) -> bool:
            by_hub.append(len(shards) == 4)
            return own(round, shards, keep)

        swarm.work.own = noted  # type: ignore[method-assign]
        swarm.start("ann", "bob", "cat")
        swarm.finish()
        swarm.audit()

        assert ["hub" if hub_does else "peers" for hub_does, _ in groupby(by_hub)] == aggregators
        truth = swarm.folded().view(torch.int32)
        for member in swarm.members.values():
            assert torch.equal(member.common.view(torch.int32), truth)
        told = [e.message for e in swarm.all(hub.Warned) if "aggregate" in e.message]
        assert len(told) == len(aggregators) - 1
        assert "peers try to aggregate" in told[0]
        assert "the hub aggregates, not peers" in told[-1] or len(told) == 1
