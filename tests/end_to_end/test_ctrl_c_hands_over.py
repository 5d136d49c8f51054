"""A peer leaves a run that goes on, and comes back: nothing of its work is lost, nothing counts twice."""

import json
import threading
from pathlib import Path

import torch
from in_process import Member, Swarm, recipe_of, rows, save_tiny
from torch import Tensor

from recipes.training import CaughtUp, Event, HandedOver, StepDone, peer_checkpoint, read, restore
from transport.protocol import events

STEPS, LEAVES, PAUSE = 20, 7, 12  # rounds: ann leaves in LEAVES, bob waits for her in PAUSE


def residual(member: Member) -> Tensor:
    return member.peer.worker.x - member.common


def test_a_peer_that_comes_back_has_its_residual_and_moments_and_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(6 * STEPS + 6)))
    recipe = recipe_of(
        save_tiny("llama", tmp_path / "model"), data, compression={"random_ratio": 0.25, "topk_ratio": 0.1}
    )
    caught_up: list[Tensor] = []
    alone, back = threading.Event(), threading.Event()

    def look(member: Member, event: Event) -> None:
        if member.name == "bob" and isinstance(event, StepDone) and event.round == PAUSE:
            alone.set()
            assert back.wait(120)
        elif member.name == "ann" and isinstance(event, CaughtUp):  # bob may, where he is late
            caught_up.append(residual(member))
            back.set()

    with Swarm(recipe, tmp_path / "run") as swarm:
        ann, bob = swarm.prepare("ann"), swarm.prepare("bob")
        ann.peer.trainer.model.register_forward_hook(
            lambda model, *_: ann.leave() if model.training and len(ann.steps) == LEAVES else None
        )
        swarm.go(bob, look)
        swarm.go(ann)
        ann.join()
        peer_checkpoint.keep(ann.peer, tmp_path / "kept", {})
        kept, old = residual(ann), ann.peer.trainer.optimizer.state_dict()["state"]
        assert alone.wait(120)
        again = swarm.prepare("ann")
        restore(again.peer, tmp_path / "kept")
        moments = again.peer.trainer.optimizer.state_dict()["state"]
        assert all(torch.equal(moments[n][what], old[n][what]) for n in old for what in old[n])
        swarm.go(again, look)
        swarm.finish()

        (handed_over,) = [event for event in ann.events if isinstance(event, HandedOver)]
        assert handed_over.taken
        assert handed_over.smaller > 0.5
        assert ann.peer.undelivered == []
        assert {int(old[n]["step"]) for n in old} == {LEAVES}, "the gradient it was at is dropped"
        assert read(tmp_path / "kept").round <= PAUSE < again.steps[0].round
        torch.testing.assert_close(caught_up[0], kept, rtol=0, atol=1e-6)
        left = next(event for event in swarm.all(events.PeerLeft) if event.peer == "ann")
        assert (left.reason, left.legacy) == ("left: left on request", handed_over.size)
        assert len(again.steps) > 3
        assert torch.equal(again.common, bob.common)
        swarm.audit()
