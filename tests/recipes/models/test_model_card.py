"""The model card says what a model is made of, and nothing of the machine it was made on."""

from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from recipes.config import Model, Recipe, recipe_from_json
from recipes.downloads import Licence
from recipes.models import RunSummary, render_card

RECIPE = Recipe.model_validate(
    {
        "version": 1,
        "name": "otters",
        "description": "A model of otters.",
        "model": {"model_name_or_path": "/home/dana/secret project/llama"},
        "lora": {"lora_r": 4},
        "datasets": [{"path": "/home/dana/letters.jsonl"}, {"path": "me/otters"}],
        "training": {"seed": 7},
    }
)


def test_a_card_has_recipe_data_contributors_and_versions() -> None:
    samples = {"dana": 1200, "attic|3090 [x](http://y)": 30, "ömer-3090": 5}

    text = render_card(RECIPE, RunSummary("amber-otter-42", 12, "a" * 40, samples, 1.25))

    _, head, body = text.split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "peft"
    assert about["datasets"] == ["me/otters"]
    assert "| dana | 1,200 |" in body
    assert "| attic?3090 ?x??http???y? | 30 |" in body
    assert "| ömer-3090 | 5 |" in body
    assert f"`{'a' * 40}`" in body
    assert RECIPE.recipe_hash in body
    assert "- torch " in body
    assert "1.2500" in body
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe["lora"] == {"lora_r": 4}
    assert recipe["training"] == {"seed": 7}
    assert [one["path"] for one in recipe["datasets"]] == ["letters.jsonl", "me/otters"]


def test_the_metadata_of_a_card_are_those_that_the_hub_reads() -> None:
    """Licence, base and evaluation results, read back by huggingface_hub itself."""
    recipe = RECIPE.model_copy(update={"model": Model(model_name_or_path="meta/otter")})
    made = RunSummary(
        "amber-otter-42", 12, "a" * 40, {}, 1.25, licence=Licence("other", "otter-1", "https://o")
    )
    card = ModelCard(render_card(recipe, made)).data
    results = {result.metric_type: result for result in card.eval_results}

    assert (card.license, card.license_name, card.license_link) == ("other", "otter-1", "https://o")
    assert (card.base_model, card.model_name) == ("meta/otter", "amber-otter-42")
    assert results["loss"].metric_value == 1.25
    assert results["perplexity"].metric_value == pytest.approx(exp(1.25), abs=1e-3)
    assert results["loss"].task_type == "text-generation"
    assert results["loss"].dataset_name == "letters.jsonl, me/otters, rows held out of training"
    assert "eval_results" not in ModelCard(render_card(recipe, RunSummary("r", 1, None, {}))).content


def test_a_card_describes_its_run_and_not_the_recipe_that_it_began_from() -> None:
    made = RunSummary("amber-otter-42", 13, None, {"a": 700, "b": 68}, dtype="bfloat16")
    text = render_card(RECIPE, made)

    assert "# llama fine-tuned on letters.jsonl, me/otters\n" in text
    told = "LoRA adapters of `llama` on `letters.jsonl`, `me/otters`, by 2 peers with "
    assert told in text  # who were all on one machine
    assert "by 2 peers over the internet with " in render_card(RECIPE, replace(made, met="the internet"))
    assert "- weights in bfloat16\n" in text
    assert "run amber-otter-42, 12 steps, 13 rounds." in text
    assert "- LoRA: rank 4, alpha 32, dropout 0.05\n" in text
    assert "- 768 samples of at most 1,024 tokens, 64 a step\n" in text
    assert "- learning rate 2e-05, cosine; adamw_torch_fused\n" in text
    assert "A model of otters" not in text


def test_merged_adapters_need_no_peft_and_the_card_says_so() -> None:
    text = render_card(RECIPE, RunSummary("r", 1, None, {}, merged=True))

    assert yaml.safe_load(text.split("---\n", 2)[1])["library_name"] == "transformers"
    assert "LoRA adapters, merged into their base, of " in text


def test_a_card_says_nothing_of_the_owners_folders() -> None:
    text = render_card(RECIPE, RunSummary("amber-otter-42", 12, None, {}))

    assert "/home" not in text
    assert "dana" not in text


def test_many_contributors_are_summed_up() -> None:
    text = render_card(RECIPE, RunSummary("r", 1, None, {f"peer-{i:03}": 1 for i in range(250)}))

    assert "| and 150 more | 150 |" in text


def test_a_folder_of_this_machine_is_no_hub_id(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "rows").mkdir(parents=True)
    recipe = recipe_from_json(RECIPE.to_json().replace('me/otters"', 'data/rows"'))

    assert (
        yaml.safe_load(render_card(recipe, RunSummary("r", 1, None, {})).split("---\n", 2)[1]).get("datasets")
        is None
    )
