"""What is chosen for a model of one's own follows from its size, the data and the memory, and is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_configs import REAL
from tiny_models import BUILTIN

from recipes.config import Recipe, load_resolved
from recipes.planning import DataSurvey, Machine, MethodChoice, choose_method
from recipes.planning.method_choice import batch_of, epochs_of, length_keys

GIB = 1 << 30


@pytest.fixture
def chosen(tmp_path: Path):
    """Choose for a model by name and rows -> the choice, and the recipe with it."""

    def choose(
        model: str, machine: Machine | None, *overrides: str, rows: int = 50, text: str = "word"
    ) -> tuple[MethodChoice, Recipe]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in BUILTIN.glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(REAL[model]))
        data = tmp_path / "my.jsonl"
        data.write_text((json.dumps({"text": text}) + "\n") * rows)

        def load(keys: Any) -> Any:
            return load_resolved("finetune", list(overrides), str(data), str(folder), keys)

        found = choose_method(load, machine)
        return found, load(found.keys).recipe

    return choose


def method(recipe: Recipe) -> str:
    if recipe.lora is None:
        return "full"
    return "qlora" if recipe.model.load_in_4bit else "lora"


@pytest.mark.slow  # models of up to 8 B parameters, without memory
@pytest.mark.parametrize(
    ("model", "memory", "wanted"),
    [
        ("Qwen/Qwen3-0.6B", 24, "full"),
        ("Qwen/Qwen3-0.6B", 8, "lora"),
        ("Qwen/Qwen3-1.7B", 80, "lora"),
        ("Qwen/Qwen3-8B", 12, "qlora"),
    ],
)
def test_a_model_below_a_billion_is_trained_whole_larger_ones_by_adapters_and_in_4_bits_where_memory_asks(
    chosen, model: str, memory: int, wanted: str
) -> None:
    choice, recipe = chosen(model, Machine(memory * GIB, gpu=True))

    assert method(recipe) == wanted
    assert recipe.training.learning_rate == (2e-5 if wanted == "full" else 2e-4)
    assert recipe.compression.preset == ("cocktail" if wanted == "full" else "lora-cocktail")
    assert len(choice.lines) == 3
    assert recipe.swarm.requires is None


@pytest.mark.parametrize("memory", [1, 100])
def test_without_a_peer_here_no_memory_counts_and_a_typed_method_stays(chosen, memory: int) -> None:
    assert method(chosen("EleutherAI/pythia-70m", None)[1]) == "full"
    small = Machine(memory * GIB)

    _, recipe = chosen("EleutherAI/pythia-70m", small, "lora_r=4", "learning_rate=1e-3", "max_steps=7")
    assert recipe.lora is not None
    assert (recipe.lora.lora_r, recipe.training.learning_rate, recipe.training.max_steps) == (4, 1e-3, 7)
    _, recipe = chosen("EleutherAI/pythia-70m", small, "lora=null", "max_length=128", "global_batch_size=3")
    assert recipe.lora is None
    assert (recipe.data.max_length, recipe.training.global_batch_size) == (128, 3)


def test_the_three_lines_name_model_method_data_and_run(chosen) -> None:
    choice, recipe = chosen("EleutherAI/pythia-70m", Machine(64 * GIB))
    model, data, run = choice.lines

    assert model.startswith("model   model: 70.4 M parameters, all of them are trained (below 1 B, ")
    held = "samples of 64 tokens at most, none of the first 50 are longer"
    assert data == f"data    my.jsonl: 50 rows, text; {held}"
    assert run.startswith("run     3 epochs = 19 steps of 8 samples, learning rate 2e-05 ")
    assert recipe.training.total_steps(50) == 19


@pytest.mark.parametrize(
    ("lengths", "kinds", "context", "wanted"),
    [
        ((10, 20, 30), ("chat",), 40960, {"data.max_length": 64}),
        ((10, 20, 300), ("chat",), 128, {"data.max_length": 128}),
        ((700,) * 10, ("alpaca",), None, {"data.max_length": 704}),
        ((9000,) * 10, ("chat",), 40960, {"data.max_length": 2048}),
        ((), (), 512, {"data.max_length": 512}),
        (
            (9000,) * 10,
            ("text",),
            40960,
            {"data.max_length": 2048, "data.packing": True, "data.packing_strategy": "wrapped"},
        ),
    ],
)
def test_the_length_of_a_sample_holds_nearly_all_rows_within_the_models_context(
    lengths: tuple[int, ...], kinds: tuple[str, ...], context: int | None, wanted: dict[str, Any]
) -> None:
    assert length_keys(DataSurvey(len(lengths), lengths, kinds), context, running=False) == wanted


def test_the_paragraphs_of_a_text_file_are_joined_and_rows_without_tokens_still_have_a_length() -> None:
    joined = length_keys(DataSurvey(9, (40,) * 9, ("text",)), 40960, running=True)

    assert joined == {"data.max_length": 1024, "data.packing": True, "data.packing_strategy": "wrapped"}
    assert length_keys(DataSurvey(2, (0, 0), ("text",)), None, running=False) == {"data.max_length": 64}


@pytest.mark.parametrize(
    ("rows", "epochs", "batch"),
    [(3, 3, 8), (50, 3, 8), (1_000, 3, 16), (5_000, 3, 64), (20_000, 2, 64), (10**6, 1, 64), (None, 1, 64)],
)
def test_few_rows_are_seen_more_often_in_smaller_batches(rows: int | None, epochs: int, batch: int) -> None:
    recipe = load_resolved("finetune", [f"num_train_epochs={epochs}"]).recipe

    assert epochs_of(rows) == epochs
    assert batch_of(recipe, DataSurvey(rows, (10,))) == batch


def test_of_a_hundred_rows_and_more_some_are_held_out_unless_the_user_says_how_many(chosen: Any) -> None:
    few, _ = chosen("Qwen/Qwen3-0.6B", None, rows=99)
    some, recipe = chosen("Qwen/Qwen3-0.6B", None, rows=200)

    assert "data.val_set_size" not in few.keys
    assert recipe.data.val_set_size == 10
    assert "200 rows, 10 held out, text" in some.lines[1]
    assert chosen("Qwen/Qwen3-0.6B", None, rows=9_000)[1].data.val_set_size == 100
    assert chosen("Qwen/Qwen3-0.6B", None, "val_set_size=0", rows=200)[1].data.val_set_size == 0


def test_fewer_steps_leave_the_batch_as_it_was(chosen: Any) -> None:
    _, all_steps = chosen("Qwen/Qwen3-0.6B", None, rows=200)
    short, few_steps = chosen("Qwen/Qwen3-0.6B", None, "max_steps=20", rows=200)

    assert few_steps.training.global_batch_size == all_steps.training.global_batch_size == 8
    assert "20 steps of 8 samples" in short.lines[2]
    assert "200 rows" in short.lines[1]
