"""A peer on two GPUs is to itself what a peer on one is."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from cocktail_cli.volunteer.gpu_processes import GpuProcesses
from recipes.config import load_recipe
from recipes.data import Sample
from recipes.models import load_trained, prepare_base
from recipes.multi_gpu import build_fsdp_peer
from recipes.training import Peer, build_peer

HERE = Path(__file__).parent
LENGTH = 24


def step(peer: Peer, parts: list[list[Sample]]) -> tuple[float, float]:
    """Take a step on these micro-batches: the sum of its losses, the norm of its gradient."""
    local, tokens = peer.trainer, sum(sample.count for part in parts for sample in part)
    local.zero()
    groups = [parts[i : i + local.at_once] for i in range(0, len(parts), local.at_once)]
    loss = sum(local.backward(group, tokens).loss_sum for group in groups)
    norm = local.clip(1.0)
    assert norm is not None
    local.step(1e-3)
    return loss, norm


def test_two_gpus_step_and_send_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes have fake devices of their own."""
    (tmp_path / "sitecustomize.py").write_text("import fake_cuda, fake_nccl\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE), os.environ["PYTHONPATH"]]))
    recipe = load_recipe("smoke")
    base = prepare_base(recipe, tmp_path / "base", lambda *_: None).folder
    samples = [Sample(np.arange(i, i + LENGTH, dtype=np.int32), np.arange(LENGTH) > i % 3) for i in range(6)]
    parts = [samples[i : i + 2] for i in range(0, 6, 2)]
    alone = build_peer(load_trained(recipe, base, "cuda"), recipe, 2, device="cuda")
    with closing(GpuProcesses(["cuda:0", "cuda:1"], lambda: None)) as ranks:
        two = build_fsdp_peer(ranks, base, None, recipe, 2)
        told = [step(peer, parts) for peer in (two, alone)]
        x = [peer.trainer.tensors()["x"].cpu() for peer in (two, alone)]
        sent = two.worker.start()

    assert two.trainer.kind == "cuda"
    torch.testing.assert_close(*told, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*x, rtol=1e-4, atol=1e-5)
    assert sent.shard_updates[0].update.count
