"""Whole runs on preference pairs: what is averaged, what ranks compute, what a plan counts."""

import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import Swarm, recipe_of, rows, save_tiny

from cocktail_cli.assembly import recipe_type
from recipes.config import Recipe, load_recipe
from recipes.data import Sample
from recipes.models import load_trained
from recipes.objectives import Measured
from recipes.planning import Machine, plan_memory
from recipes.training import build_peer
from transport.protocol import events as hub

CPU = Machine(1 << 40)


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("neox"))


def loaded(*overrides: str) -> Recipe:
    return load_recipe("smoke", ["data.max_length=32", *overrides], extend=recipe_type)


@pytest.mark.slow
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
    assert first.figures == pytest.approx((0, 0, 0), abs=1e-5)
    assert last.loss < 0.6
    assert last.tokens == 6
    assert last.figures[0] > last.figures[1]
    assert last.figures[2] > 0.9
    assert [len(one.figures) for one in swarm.all(hub.RoundCommitted) if one.loss is not None][-1] == 3
    swarm.audit()


@pytest.mark.slow
def test_two_ranks_learn_from_preference_pairs_as_one_does(ranks: Any, tmp_path: Path, data: Path) -> None:
    """The reference has adapters off in every rank; one without a pair computes one that does not count."""
    base = save_tiny("qwen3", tmp_path / "model")
    recipe = recipe_of(base, data, lora={"lora_r": 4}, dpo={"beta": 0.5})
    alone = build_peer(load_trained(recipe, base), recipe, 2)
    two = ranks.build(recipe, base, None, 2)
    answers = np.arange(6) > 2
    pair = [Sample(np.arange(n, n + 12, dtype=np.int32), np.tile(answers, 2), (6, 6)) for n in range(3)]

    for _ in range(2):
        told = []
        for local in (two.trainer, alone.trainer):
            local.zero()
            parts = [pair[:1], pair[1:2], pair[2:]]
            groups = [parts[i : i + local.at_once] for i in range(0, len(parts), local.at_once)]
            found = sum((local.backward(group, 3) for group in groups), Measured())
            told.append((found.loss_sum, found.terms, *found.figures, local.clip(0.0)))
            local.step(1e-2)
        assert told[0] == pytest.approx(told[1], rel=1e-3, abs=1e-4)
    assert told[0][2] > told[0][3], "the second step has rewards"


def test_a_pair_of_answers_takes_two_sequences_and_one_more_forward_pass(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    transformers.LlamaConfig(vocab_size=500, num_key_value_heads=2, **small).save_pretrained(tmp_path)
    lora = ("lora.lora_r=4", "lora_dropout=0", "datasets.0.type=auto", "packing=false")
    two, pair = (
        plan_memory(loaded(*lora), tmp_path, 2, CPU),
        plan_memory(loaded(*lora, "dpo={}"), tmp_path, 1, CPU),
    )

    assert pair.part("activations") == two.part("activations")
    assert 1.2 < pair.flops / two.flops < 1.5
