"""Whole runs of adapters and of models in half precision: what is exchanged, written, held is one model."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
import torch
from in_process import Swarm, recipe_of, rows
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


def test_a_run_learns_preferences_and_pairs_are_what_is_averaged(neox: Path, tmp_path: Path) -> None:
    """Two peers: the loss begins at log 2 with no rewards; then the chosen answers have more."""
    words = rows(24)
    pairs = [
        {"prompt": f"{word[:9]} is", "chosen": " good, as we know.", "rejected": " bad."} for word in words
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = recipe_of(
        neox,
        tmp_path / "pairs.jsonl",
        lora={"lora_r": 4},
        dpo={"beta": 0.5},
        compression={"random_ratio": 1.0, "topk_ratio": 1.0},
    )
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:
        ann, bob = swarm.start("ann", "bob")
        swarm.finish()
        assert swarm.work.weight([0, 1, 2]) == 3 < swarm.work.tokens([0, 1, 2])

    first, *_, last = swarm.all(hub.EvaluationDone)
    assert torch.equal(ann.common, bob.common)
    assert torch.equal(ann.common, swarm.folded())
    assert first.loss == pytest.approx(log(2), abs=1e-5)
    assert first.rewards == pytest.approx((0, 0, 0), abs=1e-5)
    assert last.loss < 0.6
    assert last.tokens == 6
    assert last.rewards[0] > last.rewards[1]
    assert last.rewards[2] > 0.9
    assert [len(one.rewards) for one in swarm.all(hub.RoundCommitted) if one.loss is not None][-1] == 3
    swarm.audit()
