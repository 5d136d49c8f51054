"""Leaving, keeping and returning on a GPU whose memory is full: little is taken, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import fake_cuda as fake
import pytest
import torch
from a_peer import Hub, P, peer_on, recipe_of, small_windows, trained

from recipes.training import HandedOver, NotHandedOver, Peer, finetune, peer_checkpoint, read, restore

FEW = 128  # side of a small table
ROOM = 300_000  # bytes of a handoff
HALF_A_BYTE = P // 2  # half a byte for each parameter


def leave(peer: Peer, hub: Hub) -> list[object]:
    hub.leaving.set()
    hub.room = ROOM
    return list(finetune(hub, peer, now=hub.aggregator.assigned and len(hub.aggregates)))


def residual(peer: Peer) -> torch.Tensor:
    return (peer.worker.x - peer.worker.global_model.vector.to(peer.worker.x.device)).cpu()


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_leaving_and_keeping_take_less_than_half_a_byte_a_parameter(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows(monkeypatch, P // 64)
    peer, hub = trained("cuda", wanted=recipe_of(state_device=where))
    before = fake.peak_from_here()
    told = leave(peer, hub)
    peer_checkpoint.keep(peer, tmp_path / "kept", {})

    assert any(isinstance(event, HandedOver) for event in told), told
    assert fake.peak() - before < HALF_A_BYTE


def test_whenever_memory_runs_out_the_residual_is_handed_over_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each allocation of leaving, in turn: what the aggregator has and what is kept is what there was."""
    small_windows(monkeypatch, FEW**2 // 2)
    failed = 0
    for n in range(1, 60, 2):
        peer, hub = trained("cuda", rounds=1, side=FEW)
        before = residual(peer)
        fake.fail_at(n)
        told = leave(peer, hub)
        fake.fail_at(0)
        failed += any(isinstance(event, NotHandedOver) for event in told)
        peer_checkpoint.keep(peer, tmp_path / "kept", {})
        other = peer_on("cuda", hub.recipe, FEW)
        read(tmp_path / "kept")
        restore(other, tmp_path / "kept")
        handed = torch.zeros(FEW**2)
        if hub.handoffs:
            hub.aggregator.assigned[0].error.zero_()
            hub.aggregator.merge_handoff("ann", hub.handoffs[0], 1.0)
            handed = hub.aggregator.assigned[0].error

        torch.testing.assert_close(residual(other) + handed, before, rtol=0, atol=1e-6)
        assert ("leave", "left on request") in hub.said
    assert failed > 3
