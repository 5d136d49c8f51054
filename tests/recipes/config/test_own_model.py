"""The neutral recipe takes name and description from the model and data of its user."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.config import describe, load_recipe, load_resolved, public_name
from recipes.config.loader import run_name


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("Qwen/Qwen3-0.6B", "my.jsonl", "qwen3-0.6b-my"),
        ("m/llama", "/home/ann/rows of today.csv.gz", "llama-rows-of-today"),
        ("builtin:tiny-gpt-neox", "builtin:python-docs", "tiny-gpt-neox-python-docs"),
        ("./Ömer", "databricks/databricks-dolly-15k", "mer-databricks-dolly-15k"),
    ],
)
def test_the_name_of_a_run_is_its_models_and_its_datas(model: str, data: str, name: str) -> None:
    assert run_name(model, data) == name


@given(st.text(min_size=1, max_size=90), st.text(min_size=1, max_size=90))
def test_whatever_a_model_and_data_are_called_their_name_is_a_recipes(model: str, data: str) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,63}", run_name(model, data))


def test_no_folder_of_this_machine_is_described() -> None:
    assert describe("/home/ann/secret/llama", "~/private/my.jsonl") == "llama fine-tuned on my.jsonl."
    assert public_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_what_is_typed_beats_what_is_chosen_and_that_beats_the_recipe() -> None:
    chosen = {"training.learning_rate": 1e-4, "lora.lora_r": 16, "swarm.requires": None}
    resolved = load_resolved("finetune", ["lora_r=4"], "my.jsonl", "a/b", chosen)

    recipe = resolved.recipe
    assert (recipe.name, recipe.training.learning_rate) == ("b-my", 1e-4)
    assert (recipe.lora is not None and recipe.lora.lora_r, recipe.swarm.requires) == (4, None)
    assert resolved.document.origin(("training", "learning_rate")) == "chosen by model, data and memory"
    assert load_recipe("finetune").training.learning_rate == 2e-5
