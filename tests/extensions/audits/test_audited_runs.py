"""Peers that audit each other's gradients, in whole runs with real models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Swarm, recipe_of, rows, save_tiny

from recipes.config import Recipe
from recipes.training import SingleDeviceTrainer
from transport.protocol import events as hub

pytestmark = pytest.mark.slow
NAMES = ("eve", "ann", "bob", "cat", "dan")


def audited_recipe(folder: Path, steps: int, rate: float = 3e-4, share: float = 0.1) -> Recipe:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(206)))
    return recipe_of(
        save_tiny("gpt_neox", folder / "neox"),
        data,
        training={"max_steps": steps, "global_batch_size": 20, "learning_rate": rate},
        audits={"audit_share": share},
        checkpoint={"eval_steps": None},
    )


class Lazy(SingleDeviceTrainer):
    """Computes nothing: its gradient is zero, and it says of each sample what it said of one long ago."""

    def backward(self, parts: Any, terms: int, lease: int | None = None) -> Any:
        found = super().backward(parts, terms, None if lease is None else -1)
        self.flat.grad.zero_()
        return found


def finish(swarm: Swarm, lazy: str = "") -> list[hub.Event]:
    """Run to the end. Bob computes in bfloat16, as on other hardware."""
    for member in [swarm.prepare(name) for name in NAMES]:
        trainer = member.peer.trainer
        assert isinstance(trainer, SingleDeviceTrainer)
        member.peer.micro_batch = 4  # its share of a round
        if member.name == "bob":
            trainer.half = torch.bfloat16
        if member.name == lazy:
            trainer.__class__ = Lazy
        swarm.go(member)
    return swarm.wait()


def status(swarm: Swarm) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(swarm.memory.hub._state.status(0.0))["audits"]
    return figures


def warnings(events: list[hub.Event]) -> list[tuple[str | None, str]]:
    return [(event.peer, event.message) for event in events if isinstance(event, hub.Warned)]


def test_honest_peers_are_audited_within_the_budget_and_never_accused(tmp_path: Path) -> None:
    with Swarm(audited_recipe(tmp_path, 28), tmp_path / "run", min_peers=5) as swarm:
        events = finish(swarm)
        figures = status(swarm)
        swarm.audit()

    assert figures["audited"] >= 20
    assert 0.05 < figures["share"] <= 0.1
    assert figures["usual_bits"] <= 20
    assert (figures["disagreements"], figures["undecided"], figures["suspects"]) == (0, 0, [])
    assert [said for said in warnings(events) if "audit" in said[1]] == []
    for member in swarm.members.values():
        member.join()
        assert all(step.accepted for step in member.steps)


def test_where_gradients_turn_too_fast_for_audits_the_host_is_told_and_nobody_is_accused(
    tmp_path: Path,
) -> None:
    with Swarm(audited_recipe(tmp_path, 30, rate=1e-2), tmp_path / "run", min_peers=5) as swarm:
        events = finish(swarm)

    [(_, told)] = [warning for warning in warnings(events) if "audit" in warning[1]]
    assert "audits find nobody while" in told
    assert not any(step.refused for member in swarm.members.values() for step in member.steps)


def test_a_lazy_peer_is_found_and_put_out_with_the_reason(tmp_path: Path) -> None:
    with Swarm(audited_recipe(tmp_path, 40), tmp_path / "run", min_peers=4) as swarm:
        events = finish(swarm, "eve")
        swarm.audit()

    found = [(peer, message) for peer, message in warnings(events) if "found by audits" in message]
    assert [peer for peer, _ in found] == ["eve"]
    assert "two other peers agree on another gradient" in found[0][1]
    refusals = [step.refused for step in swarm.members["eve"].steps if step.refused]
    assert refusals
    assert all("(audits)" in why for why in refusals)
    left = {event.peer: event.reason for event in events if isinstance(event, hub.PeerLeft)}
    assert "3 unusable packets" in left["eve"]
    for name in NAMES[1:]:
        swarm.members[name].join()
        assert not any(step.refused for step in swarm.members[name].steps)
