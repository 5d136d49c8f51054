"""Whole runs of adapters and of models in half precision: what is exchanged, written, held is one model."""

from pathlib import Path

import pytest
import torch
from in_process import Swarm, recipe_of
from peft import AutoPeftModelForCausalLM

from recipes.data import collate
from recipes.models import load_model
from transport.protocol import events as hub

pytestmark = pytest.mark.slow


def test_a_run_with_adapters_trains_nothing_else_and_its_export_is_the_model_that_peers_hold(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """Two peers, a snapshot midway: the folders load in peft, and merged in transformers alone."""
    recipe = recipe_of(
        neox,
        data,
        lora={"lora_r": 4, "lora_target_modules": "all-linear"},
        compression={"random_ratio": 1.0, "topk_ratio": 1.0},
    )
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

    assert rounds == len(swarm.all(hub.RoundCommitted))
    assert torch.equal(ann.common, bob.common)
    assert torch.equal(ann.common, swarm.folded())
    assert swarm.work.parameters == ann.common.numel() < 20_000
    assert (plain - adapted).abs().max() > 1e-3
    torch.testing.assert_close(adapted, held, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged, held, rtol=0, atol=1e-5)
    losses = [event.loss for event in swarm.all(hub.EvaluationDone)]
    assert losses[-1] < losses[0]
