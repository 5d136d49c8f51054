"""Whole runs of adapters and of models in half precision: what is exchanged, written, held is one model."""

from pathlib import Path

import pytest
import torch
from in_process import Swarm, recipe_of
from peft import AutoPeftModelForCausalLM

from recipes.data import collate
from recipes.models import load_model
from transport.protocol import events as hub
from transport.transfer import BandwidthBudget

pytestmark = pytest.mark.slow


def test_a_short_run_with_adapters_trains_nothing_else_sends_all_of_it_and_exports_what_its_peers_hold(
    neox: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two peers, 48 steps, no setting, and lines that carry the dense rung: it is never left, and each peer's
    own K has risen to it after a few packets. The folders load in peft, and merged in transformers alone."""
    # made up, as a busy machine is no line
    monkeypatch.setattr("transport.transfer.bandwidth_budget.fits", lambda *_: 100_000)
    monkeypatch.setattr(BandwidthBudget, "needs", lambda budget, size: 1e-5 * size)
    sections = {"lora": {"lora_r": 4}, "compression": {"auto": True}, "checkpoint": {"eval_steps": 24}}
    recipe = recipe_of(neox, data, training={"max_steps": 48, "global_batch_size": 2}, **sections)
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:
        swarm.tokenizer.save_pretrained(tmp_path / "run" / "tokenizer")
        ann, bob = swarm.start("ann", "bob")
        swarm.finish()
        model = swarm.work.model
        rounds = model.write_model(tmp_path / "adapter")
        model.write_merged(tmp_path / "merged")

    batch = collate([swarm.corpus.sample(0)])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        plain, merged = (load_model(folder)(**inputs).logits for folder in (neox, tmp_path / "merged"))
        adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(**inputs).logits
        with ann.peer.trainer.flat.use(ann.common) as model:
            held = model.eval()(**inputs).logits

    commits = swarm.all(hub.RoundCommitted)
    assert {(event.rung, event.local_steps) for event in commits} == {("p 1, K 1, 4 bits", 1)}
    whole = swarm.work.parameters / 2  # bytes
    assert all(step.sent_bytes > 0.9 * whole for step in (*ann.steps[8:], *bob.steps[8:]))
    assert rounds == len(commits) >= 48
    assert torch.equal(ann.common, bob.common)
    assert torch.equal(ann.common, swarm.folded())
    assert swarm.work.parameters == ann.common.numel() < 20_000
    assert (plain - adapted).abs().max() > 1e-3
    torch.testing.assert_close(adapted, held, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged, held, rtol=0, atol=1e-5)
    losses = [event.loss for event in swarm.all(hub.EvaluationDone)]
    assert losses[-1] < losses[0]
