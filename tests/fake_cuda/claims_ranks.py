"""A peer on two GPUs is to itself what a peer on one is."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cocktail_cli.machine.devices import CONTEXT
from recipes.config import load_recipe
from recipes.data import Sample, batches
from recipes.models import load_trained, prepare_base
from recipes.planning import Machine, plan_memory
from recipes.training import Lowered, Peer, build_peer, shrink_to_fit

LENGTH = 128
multi_gpu = pytest.importorskip("cocktail_cli.extensions.multi_gpu")  # a project may be without it


def step(peer: Peer, samples: list[Sample]) -> tuple[float, float]:
    """Take a step on these samples: the sum of its losses, the norm of its gradient."""
    local, terms = peer.trainer, sum(sample.count for sample in samples)
    parts = list(batches(samples, peer.micro_batch))
    local.zero()
    groups = [parts[i : i + local.at_once] for i in range(0, len(parts), local.at_once)]
    loss = sum(local.backward(group, terms).loss_sum for group in groups)
    norm = local.clip(1.0)
    assert norm is not None
    local.step(1e-3)
    return loss, norm


def test_two_gpus_step_and_send_like_one_and_where_memory_runs_out_with_smaller_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes have fake devices of their own, with memory between what is planned for two sequences
    and for four. The step that needs more is taken again, by new processes with what the old ones had. They
    are given an update beside the compute, and once more where those that had it are gone."""
    recipe = load_recipe("smoke", ["attn_implementation=eager", "adam_epsilon=0.001"])
    base = prepare_base(recipe, tmp_path / "base", lambda *_: None).folder
    samples = [Sample(np.arange(i, i + LENGTH, dtype=np.int32), np.arange(LENGTH) > i % 3) for i in range(8)]
    machine = Machine(1 << 40, gpu=True, count=2)
    room = sum(plan_memory(recipe, base, size, machine).bytes for size in (2, 4)) // 2
    alone = build_peer(load_trained(recipe, base, "cuda"), recipe, 2, device="cuda")
    with closing(multi_gpu.GpuProcesses(["cuda:0", "cuda:1"], lambda: None, CONTEXT + room)) as ranks:
        two = ranks.build(recipe, base, None, 4)

        def rounds() -> Iterator[Lowered]:
            for some in (samples[:2], samples, samples[2:4]):
                sent = two.worker.start()
                aggregate = two.worker.global_model.apply(sent.packet)
                two.worker.bring(aggregate, None)
                told = yield from shrink_to_fit(two, partial(step, two, some))
                torch.testing.assert_close(told, step(alone, some), rtol=1e-4, atol=1e-5)
                asked.clear()
                two.worker.follow(aggregate, None)
                alone.worker.catch_up(sent.packet)

        lowered, asked, ask = list[Lowered](), list[str](), ranks.all
        monkeypatch.setattr(
            ranks, "all", lambda do, *parts, **more: asked.append(do) or ask(do, *parts, **more)
        )
        lowered += rounds()
        assert asked == ["add"], "at the join nothing is asked but to add what ranks have"
        x = [peer.trainer.tensors()["x"].cpu() for peer in (two, alone)]

    assert [event.micro_batch for event in lowered] == [2]
    assert "out of memory" in lowered[0].why
    assert two.trainer.kind == "cuda"
    torch.testing.assert_close(*x, rtol=1e-4, atol=1e-4)
