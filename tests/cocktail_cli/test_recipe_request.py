"""A command line asks for a recipe by name, or for the neutral one with a model and data of one's own."""

import shlex
from pathlib import Path

import pytest
from in_this_process import Run

from cocktail_cli.errors import Failure
from cocktail_cli.recipe_request import RecipeRequest, room_for


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model folder and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "llama").mkdir(parents=True)
    (tmp_path / "my.jsonl").write_text('{"text": "word"}\n' * 3)
    return tmp_path


def of(*words: str, data: str | None = None, model: str | None = None) -> RecipeRequest:
    return RecipeRequest.of(words[0] if words else None, words[1:], data, model)


@pytest.mark.parametrize(
    ("request_", "recipe", "overrides", "model"),
    [
        (lambda: of("smoke", "seed=1"), "smoke", ("seed=1",), None),
        (lambda: of("my.yaml"), "my.yaml", (), None),
        (lambda: of("seed=1", data="my.jsonl", model="m/llama"), "", ("seed=1",), "m/llama"),
        (lambda: of("m/llama", data="my.jsonl"), "", (), "m/llama"),
        (lambda: of("Qwen/Qwen3-0.6B", "seed=1", data="my.jsonl"), "", ("seed=1",), "Qwen/Qwen3-0.6B"),
        (lambda: of("builtin:tiny-gpt-neox", data="my.jsonl"), "", (), "builtin:tiny-gpt-neox"),
    ],
)
def test_the_first_word_is_a_recipe_a_model_or_a_key(request_, recipe, overrides, model) -> None:
    asked = request_()

    assert (asked.recipe, asked.overrides, asked.model) == (recipe, overrides, model)
    assert asked.is_own == (recipe == "")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: of(), "no recipe is given, and no model with data"),
        (lambda: of("m/llama"), "which data is m/llama trained on?"),
        (lambda: of(data="my.jsonl"), "which model is trained on my.jsonl?"),
        (lambda: of("my.jsonl", model="m/llama"), "my.jsonl is data, not a recipe"),
        (lambda: of("m/llama", model="gpt2", data="my.jsonl"), "two models are given: m/llama and gpt2"),
    ],
)
def test_what_is_missing_is_a_usage_error_with_what_to_type(request_, message: str) -> None:
    with pytest.raises(Failure) as caught:
        request_()

    assert (caught.value.code, caught.value.message) == ("usage", message)
    assert caught.value.hints


def test_the_arguments_are_repeated_as_they_are_typed() -> None:
    asked = of("m/llama", "name=a-b", "description=two words", data="my rows.jsonl")

    assert asked.typed() == "name=a-b 'description=two words' --model m/llama --data 'my rows.jsonl'"
    again = shlex.split(asked.typed())
    assert of(*again[:2], model=again[3], data=again[5]) == asked


def test_four_bits_alone_mean_adapters_on_them() -> None:
    recipe = of("m/llama", "load_in_4bit=true", data="my.jsonl").load()

    assert recipe.lora is not None
    assert recipe.model.load_in_4bit


def test_a_recipe_whose_data_are_replaced_is_described_by_its_data_and_asked_for_by_the_same_hash() -> None:
    asked = of("smoke", data="my.jsonl")

    assert asked.described().description == "builtin:tiny-gpt-neox fine-tuned on my.jsonl."
    assert asked.load().description.startswith("One minute on a CPU.")
    assert of("smoke").described() == of("smoke").load()


def test_peers_on_one_device_share_its_memory_and_without_peers_none_counts() -> None:
    one, two = room_for(["cpu"]), room_for(["cpu", "cpu"])

    assert room_for([]) is None
    assert one is not None
    assert two is not None
    assert 1.9 * two.bytes < one.bytes
    assert not one.gpu


def test_what_comes_next_repeats_the_arguments(cocktail: Run) -> None:
    said = cocktail("validate", "smoke", "seed=3", "--data", "my.jsonl")

    assert said.err.splitlines() == [
        "Next: cocktail plan smoke seed=3 --data my.jsonl",
        "      cocktail launch smoke seed=3 --data my.jsonl",
    ]


def test_a_model_and_data_are_validated_without_a_recipe(cocktail: Run) -> None:
    said = cocktail("validate", "builtin:tiny-gpt-neox", "--data", "my.jsonl", "--learning-rate", "6e-3")

    assert said.exit == 0
    assert "model builtin:tiny-gpt-neox: 1.0 M parameters, all of them are trained (below 1 B" in said.out
    assert "run 3 epochs = 2 steps of 8 samples, learning rate 0.006" in said.out.replace("run    ", "run")
