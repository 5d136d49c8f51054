"""A peer that is spread over two processes: to itself what one process would be, to the run one peer."""

import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Member, Swarm, recipe_of, save_tiny, write_rows
from torch import Tensor

from cocktail_cli.extensions.multi_gpu import GpuProcesses
from cocktail_cli.extensions.multi_gpu.fsdp_peer import FsdpTrainer, build_fsdp_peer
from recipes.config import Recipe
from recipes.data import Sample
from recipes.models import load_model, load_trained
from recipes.training import HandedOver, Peer, StepDone, build_peer, peer_checkpoint, read, restore
from recipes.training.loop import apply, compute, shrink_to_fit
from recipes.training.micro_batch import tried

pytestmark = pytest.mark.slow
MANY, LONG = 32, 512  # sequences and tokens of a micro-batch whose logits alone take 20 MB
ROOM = 24 << 20  # bytes
LEASE = 5  # samples; in micro-batches of 2 that leaves one of two ranks without any at the end


@pytest.fixture(scope="module")
def ranks(fast_starts: None) -> Iterator[GpuProcesses]:
    with closing(GpuProcesses(["cpu", "cpu"], lambda: None)) as started:
        yield started
    assert [process.returncode for process in started.processes] == [-9, -9]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path, 54)


def lease() -> list[list[Sample]]:
    """A lease in micro-batches of different lengths."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 300, 6 + i).astype(np.int32) for i in range(LEASE)]
    samples = [Sample(t, np.arange(len(t)) > i % 2) for i, t in enumerate(tokens)]
    return [samples[i : i + 2] for i in range(0, LEASE, 2)]


def step(peer: Peer, limit: float) -> tuple[float, float]:
    """One step on the lease: the sum of its losses, the norm of its gradient."""
    local, parts, norm = peer.trainer, lease(), None
    tokens = sum(sample.count for part in parts for sample in part)
    while norm is None:
        local.zero()
        groups = [parts[i : i + local.at_once] for i in range(0, len(parts), local.at_once)]
        loss = sum(local.backward(group, tokens).loss_sum for group in groups)
        norm = local.clip(limit)
    local.step(1e-2)
    return loss, norm


def x_of(peer: Peer) -> Tensor:
    return peer.trainer.tensors()["x"]


def agree(one: Peer, other: Peer) -> None:
    """Their weights differ by a hundredth of a step at most: Adam divides a gradient by its size, so where
    it is nearly 0 the order of a sum shows, which is another on each processor."""
    torch.testing.assert_close(x_of(one), x_of(other), rtol=1e-4, atol=1e-4)
    apart, length = (x_of(one) - x_of(other)).norm(), x_of(other).norm()
    assert apart < 1e-4 * length


def one_peer(base: Path, recipe: Recipe) -> Peer:
    return build_peer(load_model(base), recipe, 2)


def limit(process: int, room: int) -> None:
    """Limit a process to so many bytes more than it has now."""
    held = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(process, resource.RLIMIT_AS, (held + room, resource.RLIM_INFINITY))


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2_tied", "qwen3"])
def test_two_ranks_compute_what_one_computes(
    ranks: GpuProcesses, tmp_path: Path, data: Path, family: str
) -> None:
    """Gradient, clipping, step, evaluation, and what is sent of x_i; also where weights are tied."""
    recipe = recipe_of(
        save_tiny(family, tmp_path / "model"), data, compression={"random_ratio": 0.3, "shards": 2}
    )
    alone = build_peer(load_model(tmp_path / "model"), recipe, 2)
    two = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2)
    held_out = [sample for part in lease() for sample in part]
    common = alone.worker.global_model.vector.clone()
    assert torch.equal(two.worker.global_model.vector, common)
    assert two.worker.global_model.fingerprint == alone.worker.global_model.fingerprint

    for limit in (0.0, 0.1):  # the second step is clipped
        torch.testing.assert_close(step(two, limit), step(alone, limit), rtol=1e-4, atol=1e-5)
    agree(two, alone)
    for shard, sample in two.worker.global_model.samples():
        mine = two.worker.local_model.difference(shard, sample, two.worker.global_model.vector)
        assert torch.equal(mine, sample.difference(shard.of(x_of(two)), shard.of(common)))
    before = x_of(two)
    found, want = (p.trainer.evaluate(p.worker.global_model.vector, held_out, 2) for p in (two, alone))
    assert found.terms == want.terms
    assert found.loss_sum == pytest.approx(want.loss_sum, rel=1e-5)
    assert torch.equal(x_of(two), before)
    sent = two.worker.start()
    two.worker.subtract(sent)
    for piece in sent.shard_updates:
        piece.add_(before, alpha=-1)
    assert torch.equal(x_of(two), before)
    assert two.worker.residual_norm() == pytest.approx(float(torch.dist(before, common)), rel=1e-5)


def test_two_ranks_measure_the_noise_that_one_measures_and_step_as_far(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    """Of a peer with a quarter of a step's samples; each rank has some of the values that are looked at."""
    recipe = recipe_of(save_tiny("gpt_neox", tmp_path / "model"), data, training={"optim": "adamw_torch"})
    alone = build_peer(load_model(tmp_path / "model"), recipe, 2)
    two = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2)
    for _ in range(5):
        norms = [quarter_step(peer, 0.1) for peer in (two, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    found, want = (peer.trainer.tensors()["noise"] for peer in (two, alone))

    torch.testing.assert_close(found[:128], want[:128], rtol=0.05, atol=0.01 * float(want[:128].max()))
    assert alone.trainer.noise.sums.factor > 1.2
    apart = torch.dist(x_of(two), x_of(alone))
    assert apart < 0.05 * alone.worker.residual_norm()


def quarter_step(peer: Peer, limit: float) -> float:
    """Step with a quarter of the samples that all peers have, whose halves are compared; the norm."""
    local, parts = peer.trainer, lease()
    tokens = [sum(sample.count for sample in part) for part in parts]
    local.zero(0.25)
    for groups in (
        ([parts[:1], parts[1:2]], [parts[2:]]) if local.at_once == 1 else ([parts[:2]], [parts[2:]])
    ):
        for group in groups:
            local.backward(group, sum(tokens))
        if groups[-1] is not parts[2:]:
            local.partly(sum(tokens[:2]) / sum(tokens))
    norm = local.clip(limit)
    assert norm is not None
    local.step(1e-3)
    return norm


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "adapters": ({"lora_r": 4, "lora_dropout": 0.0, "lora_modules_to_save": ["lm_head"]}, "auto"),
    "adapters of a bfloat16 base": ({"lora_dropout": 0.0}, "bfloat16"),
    "bfloat16 with masters": ({}, "bfloat16"),
    "adapters of a float16 base, with a loss scale": ({"lora_dropout": 0.0}, "float16"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_trained_two_ranks_step_as_one_does(
    ranks: GpuProcesses, tmp_path: Path, data: Path, kind: str
) -> None:
    base = save_tiny("llama", tmp_path / "model")
    lora, dtype = KINDS[kind]
    training = {"optim": "sgd", "activation_checkpointing": True}
    plain = recipe_of(base, data, training=training, **({"lora": lora} if lora else {}))
    recipe = plain.model_copy(update={"model": plain.model.model_copy(update={"dtype": dtype})})
    alone = build_peer(load_trained(recipe, base), recipe, 2)
    two = build_fsdp_peer(ranks, base, None, recipe, 2)
    assert two.trainer.layout == alone.trainer.layout
    assert torch.equal(two.worker.global_model.vector, alone.worker.global_model.vector)

    losses, norms = zip(step(two, 0.0), step(alone, 0.0), strict=True)
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    apart = torch.dist(x_of(two), x_of(alone))
    assert apart < 0.05 * alone.worker.residual_norm()


def test_each_rank_holds_half_of_model_gradient_and_optimizer(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    peer = build_fsdp_peer(
        ranks, save_tiny("llama", tmp_path / "model"), None, recipe_of(tmp_path / "model", data), 2
    )
    step(peer, 0.0)
    model, long = peer.worker.global_model, Sample(np.arange(LONG, dtype=np.int32) % 300, np.arange(LONG) > 0)
    with ThreadPoolExecutor(1) as compute_thread:  # while both compute, what an exchange asks is answered
        at_work = compute_thread.submit(peer.trainer.backward, [[long] * (MANY // 4)] * 2, LONG)
        for shard, sample in model.samples():
            peer.worker.local_model.difference(shard, sample, model.vector)
        assert not at_work.done()
        at_work.result()
    held = ranks.all("bytes")

    whole = 4 * peer.trainer.layout.size
    for what, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        each = [rank[what] for rank in held]
        assert sum(each) == pytest.approx(times * whole, rel=0.001)
        assert max(each) == pytest.approx(times * whole / 2, rel=0.01)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_what_it_kept_is_taken_up_by_one_process_or_two(
    ranks: GpuProcesses, tmp_path: Path, data: Path, optim: str
) -> None:
    recipe = recipe_of(save_tiny("gpt_neox", tmp_path / "model"), data, training={"optim": optim})
    two = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2)
    step(two, 0.0)
    peer_checkpoint.keep(two, tmp_path / "kept", {})
    states = {name: tensor.clone() for name, tensor in two.trainer.tensors().items()}
    alone = build_peer(load_model(tmp_path / "model"), recipe, 2)
    restore(alone, tmp_path / "kept")
    again = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2)
    assert not again.trainer.stepped
    restore(again, tmp_path / "kept")

    assert len(states) > 3
    for peer in (alone, again):
        found = peer.trainer.tensors()
        assert found.keys() == states.keys()
        assert all(torch.equal(found[name], states[name]) for name in states)
    torch.testing.assert_close(step(again, 0.0), step(alone, 0.0), rtol=1e-4, atol=1e-5)
    agree(again, alone)


def test_what_8_bits_keep_is_taken_up_to_the_bit_by_as_many_ranks_and_begins_anew_in_one(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    recipe = recipe_of(save_tiny("llama", tmp_path / "model"), data, training={"optim": "adamw_8bit"})
    two, alone = (
        build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2),
        one_peer(tmp_path / "model", recipe),
    )
    for peer, name in ((two, "two"), (alone, "one")):
        for _ in range(2):
            step(peer, 0.0)
        peer_checkpoint.keep(peer, tmp_path / name, {})
        read(tmp_path / name)
    states = {name: tensor.clone() for name, tensor in two.trainer.tensors().items()}
    ahead = step(two, 0.0), x_of(two)
    again = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 2)
    restore(again, tmp_path / "two")

    assert any("uint8" in name for name in states)
    found = again.trainer.tensors()
    assert found.keys() == states.keys()
    assert all(torch.equal(found[name].view(torch.int32), states[name].view(torch.int32)) for name in states)
    losses = step(again, 0.0)
    assert losses == ahead[0]
    assert torch.equal(x_of(again), ahead[1])
    other = one_peer(tmp_path / "model", recipe)
    restore(other, tmp_path / "two")
    restore(again, tmp_path / "one")
    for peer, x in ((other, states["x"]), (again, None)):
        assert not peer.trainer.stepped
        assert x is None or torch.equal(x_of(peer), x)
        step(peer, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of another process")
def test_the_micro_batch_that_is_found_is_one_for_which_every_rank_has_memory(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    """Found as on accelerators, in two processes of which one may take little."""
    short = recipe_of(save_tiny("llama", tmp_path / "model"), data)
    recipe = short.model_copy(update={"data": short.data.model_copy(update={"max_length": LONG})})
    two = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, 1)
    step(two, 0.0)
    x, before = x_of(two), [process.pid for process in ranks.processes]
    limit(before[1], ROOM)

    found = tried(two.trainer, recipe)

    assert 1 <= found < MANY
    assert not {process.pid for process in ranks.processes} & set(before)
    assert torch.equal(x_of(two), x)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of another process")
def test_memory_that_runs_out_in_one_rank_halves_the_micro_batch_and_the_step_is_the_same(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    """The other waits in the middle of a layer. What both held is there again, of 8 bits where it can be."""
    optim = "adamw_8bit" if find_spec("bitsandbytes") else "adamw_torch"
    recipe = recipe_of(save_tiny("llama", tmp_path / "model"), data, training={"optim": optim})
    alone = build_peer(load_model(tmp_path / "model"), recipe, 4)
    two = build_fsdp_peer(ranks, tmp_path / "model", None, recipe, MANY)
    samples = [Sample(np.arange(LONG, dtype=np.int32) % 300, np.arange(LONG) > i) for i in range(2 * MANY)]
    link: Any = SimpleNamespace(leaving=threading.Event())
    round: Any = SimpleNamespace(step=0, steps=10, peers=1)
    for peer in (two, alone):
        step(peer, 0.0)
    before = [process.pid for process in ranks.processes]
    limit(before[1], ROOM)

    lowered = []
    for peer in (two, alone):
        work = shrink_to_fit(peer, partial(compute, link, peer, 0, 0, samples))
        while True:
            try:
                lowered.append(next(work))
            except StopIteration as done:
                apply(peer, round, done.value)
                break

    assert [event.micro_batch for event in lowered] == [MANY // 2]
    assert "rank 1 of 2 (cpu): " in lowered[0].why
    assert not {process.pid for process in ranks.processes} & set(before)
    agree(two, alone)


def spread_member(swarm: Swarm, ranks: GpuProcesses, name: str) -> Member:
    """A peer of the run that is spread over the ranks."""
    return swarm.enrol(name, build_fsdp_peer(ranks, swarm.base.folder, None, swarm.recipe, 2))


def test_beside_a_peer_of_one_process_it_holds_the_same_model_and_the_loss_falls(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    recipe = recipe_of(save_tiny("gpt_neox", tmp_path / "model"), data, training={"num_train_epochs": 2})
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:
        two, bob = spread_member(swarm, ranks, "ann"), swarm.prepare("bob")
        swarm.go(two)
        swarm.go(bob)
        swarm.finish()

        assert torch.equal(two.common, bob.common)
        assert torch.equal(two.common, swarm.folded())
        told = [{s.round: s.fingerprint for s in peer.steps} for peer in (two, bob)]
        assert told[0] == told[1]
        assert sum(step.accepted for step in two.steps) > 1
        losses = [step.loss for step in two.steps if step.loss is not None]
        assert losses[-1] < 0.8 * losses[0]
        swarm.audit()


def test_alone_it_learns_as_one_process_does(ranks: GpuProcesses, tmp_path: Path, data: Path) -> None:
    """The same loss in every step, where nothing is rounded on the way."""
    plain = {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32}
    recipe = recipe_of(save_tiny("qwen3", tmp_path / "model"), data, compression=plain)
    curves: list[list[StepDone]] = []
    for spread in (True, False):
        with Swarm(recipe, tmp_path / f"run-{spread}") as swarm:
            member = spread_member(swarm, ranks, "ann") if spread else swarm.prepare("ann")
            swarm.go(member)
            swarm.finish()
            assert isinstance(member.peer.trainer, FsdpTrainer) == spread
            curves.append(member.steps)

    two, one = ([step.loss for step in steps if step.loss is not None] for steps in curves)
    assert len(two) == len(one) > 5
    assert two == pytest.approx(one, rel=1e-4)


def test_asked_to_leave_it_hands_over_and_comes_back_with_what_it_kept(
    ranks: GpuProcesses, tmp_path: Path, data: Path
) -> None:
    lossy = {"random_ratio": 0.5, "topk_ratio": 0.2}
    recipe = recipe_of(save_tiny("llama", tmp_path / "model"), data, compression=lossy)
    with Swarm(recipe, tmp_path / "run") as swarm:
        two = spread_member(swarm, ranks, "ann")
        swarm.go(two, lambda member, _: member.leave() if len(member.steps) == 3 else None)
        two.join()
        peer_checkpoint.keep(two.peer, tmp_path / "kept", {})
        left = two.peer.worker.residual_norm()
        back = spread_member(swarm, ranks, "ann")
        restore(back.peer, tmp_path / "kept")
        assert back.peer.worker.residual_norm() == left > 0
        swarm.go(back)
        swarm.finish()

        (handed_over,) = [event for event in two.events if isinstance(event, HandedOver)]
        assert handed_over.taken
        assert handed_over.smaller > 0.3
        assert len(back.steps) > 3
        assert torch.equal(back.common, swarm.folded())
        swarm.audit()
