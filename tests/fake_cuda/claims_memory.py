"""Loading, stepping, evaluating, leaving, keeping, returning on a GPU: little memory is taken, and nothing is
lost."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda as fake
import numpy as np
import pytest
import torch
from a_peer import PRECISIONS, Hub, P, peer_on, recipe_of, small_windows, trained
from transformers import AutoModelForCausalLM, LlamaConfig

from compress import fingerprint
from recipes.config import Recipe
from recipes.data import Sample, unpack_samples
from recipes.models import load_trained, trained_dtype
from recipes.planning import Machine, plan_memory
from recipes.planning.memory_plan import step_bytes
from recipes.training import (
    HandedOver,
    NotHandedOver,
    Peer,
    build_peer,
    finetune,
    peer_checkpoint,
    read,
    restore,
    restore_residual,
)

FEW = 128  # side of a small table
ROOM = 300_000  # bytes of a handoff
HALF_A_BYTE = P // 2  # half a byte for each parameter


def leave(peer: Peer, hub: Hub) -> list[object]:
    hub.leaving.set()
    hub.room = ROOM
    return list(finetune(hub, peer, now=hub.aggregator.assigned and len(hub.aggregates)))


def taken_by(work: Callable[[], object]) -> int:
    """Bytes that a device has at most during some work, above what it had before."""
    gc.collect()
    held = fake.peak_from_here()
    work()
    return fake.peak() - held


def residual(peer: Peer) -> torch.Tensor:
    return peer.trainer.tensors()["x"].cpu() - peer.worker.global_model.vector.cpu()


@pytest.mark.parametrize("changes", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_a_device_is_never_given_more_at_load_than_what_stays_there(
    where: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows(monkeypatch, P // 64)
    before = fake.peak_from_here()
    peer = peer_on("cuda", recipe_of(state_device=where, **changes))

    assert peer.worker.global_model.vector.is_cuda == (where == "accelerator")
    assert fake.peak() - fake.held() < 0.1 * 4 * P
    assert fake.held() > before


@pytest.mark.parametrize("changes", PRECISIONS.values(), ids=PRECISIONS)
def test_the_global_model_lies_beside_the_local_one_where_a_sequence_and_the_optimizer_leave_room_for_it(
    changes: dict[str, Any],
) -> None:
    """`state_device: auto`, with a little more and a little less than that, and where memory runs out."""
    wanted = recipe_of(**changes, state_device="auto", random_ratio=0.1)
    fake.peak_from_here()
    before = fake.held()
    peer = peer_on("cuda", wanted)
    assert peer.worker.global_model.vector.is_cuda, "there is room for anything"
    most = fake.peak() - before
    del peer
    gc.collect()
    for room, beside in ((most / 0.89, True), (most / 0.91, False)):
        fake.machine.total = int(before + room)
        assert peer_on("cuda", wanted).worker.global_model.vector.is_cuda == beside
        gc.collect()
    fake.machine.total = 80 << 30
    fake.limit(before + most - 4 * P)

    assert not peer_on("cuda", wanted).worker.global_model.vector.is_cuda


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose micro-batch takes more than its parameters."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = LlamaConfig(vocab_size=1000, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("changes", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_takes_what_is_planned(
    optim: str, changes: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says what is held, the micro-batch, and the optimizer's temporaries. Attention is eager: the
    fused one is of a kernel that the fake device lacks."""
    small_windows(monkeypatch, 1 << 12)
    plain = recipe_of(state_device="accelerator", **changes).model_dump(exclude_unset=True)
    plain["training"]["optim"] = optim
    plain["model"] |= {"model_name_or_path": str(llama), "attn_implementation": "eager"}
    wanted = Recipe.model_validate({**plain, "data": {"max_length": 64}})
    plan = plan_memory(wanted, llama, 4, Machine(1 << 40, gpu=True))
    fingerprint(torch.zeros(1, device="cuda"))  # whose table stays there
    before = fake.held()
    peer = build_peer(load_trained(wanted, llama, "cuda"), wanted, 4, device="cuda")
    trainer = peer.trainer
    part = [Sample(np.arange(64, dtype=np.int32), np.arange(64) > 0)] * 4
    for _ in range(2):  # the first makes the optimizer's state
        trainer.zero()
        micro_batch = taken_by(lambda: trainer.backward([part], 4 * 63))
        trainer.clip(1.0)
        step = taken_by(lambda: trainer.step(1e-3))
    gc.collect()
    kept = ("base", "weights", "copy", "common", "gradient", "optimizer")

    assert fake.held() - before == pytest.approx(sum(map(plan.part, kept)), rel=0.1)
    assert micro_batch == pytest.approx(plan.part("activations") + plan.part("logits"), rel=0.1)
    planned = step_bytes(wanted, trainer.layout, trained_dtype(wanted))
    assert step == pytest.approx(planned, rel=0.1, abs=1 << 12)


@pytest.mark.parametrize(
    ("where", "precision"),
    [("accelerator", "float32"), ("cpu", "float32"), ("cpu", "without masters")],
)
def test_evaluating_leaving_keeping_and_returning_take_less_than_half_a_byte_a_parameter(
    where: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows(monkeypatch, P // 64)
    wanted = recipe_of(state_device=where, random_ratio=0.2, **PRECISIONS[precision])
    peer, hub = trained("cuda", wanted=wanted)
    samples = unpack_samples(hub.fetch("eval"))
    before, x, taken = fake.peak_from_here(), peer.trainer.tensors()["x"].cpu(), {}
    peer.trainer.evaluate(peer.worker.global_model.vector, samples, 4)
    taken["evaluating"] = fake.peak() - before
    assert torch.equal(peer.trainer.tensors()["x"].cpu(), x)
    told = leave(peer, hub)
    taken["leaving"] = fake.peak() - before
    peer_checkpoint.keep(peer, tmp_path / "kept", {})
    taken["keeping"] = fake.peak() - before
    kept = residual(peer)
    del peer
    for way in (restore, restore_residual):
        other = peer_on("cuda", hub.recipe)
        fake.peak_from_here()
        read(tmp_path / "kept")
        way(other, tmp_path / "kept")
        taken[way.__name__] = fake.peak() - fake.held()

        torch.testing.assert_close(residual(other), kept, rtol=0.01, atol=1e-5)
        del other
    assert any(isinstance(event, HandedOver) for event in told), told
    assert max(taken.values()) < HALF_A_BYTE, {name: size / P for name, size in taken.items()}


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
