"""Overrides of a recipe, the hash of a recipe, and values derived from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_loader import SMALL, problems

from recipes.config import load_recipe, load_resolved, recipe_from_json
from recipes.config.loader import RecipeError
from recipes.config.schema import Checkpoint

# ---- overrides -----------------------------------------------------------------------------------


def test_an_override_wins_over_the_recipe_by_path_or_by_leaf(write) -> None:
    path = write(SMALL + "training: {learning_rate: 0.5}\n")

    assert load_recipe(path, ["training.learning_rate=1e-5"]).training.learning_rate == 1e-5
    assert load_recipe(path, ["learning_rate=1e-5"]).training.learning_rate == 1e-5
    assert load_recipe(path, ["seed=1", "seed=2"]).training.seed == 2


def test_null_resets_a_key_to_its_default(write) -> None:
    path = write(SMALL + "training: {learning_rate: 0.5}\n")

    assert load_recipe(path, ["learning_rate=null"]).training.learning_rate == 2e-5
    assert load_recipe(path, ["training=null"]).recipe_hash == load_recipe(write(SMALL)).recipe_hash


def test_items_of_lists_are_named_by_index_and_one_past_the_end_is_added(write) -> None:
    recipe = load_recipe(write(SMALL), ["datasets.0.path=a=b.jsonl", "datasets.1.path=c.jsonl"])

    assert [d.path for d in recipe.datasets] == ["a=b.jsonl", "c.jsonl"]
    assert len(load_recipe(write(SMALL), ["datasets.1.path=x", "datasets.1=null"]).datasets) == 1


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("learing_rate=1", "learing_rate", "did you mean `training.learning_rate`?"),
        ("training.learing_rate=1", "training.learing_rate", "did you mean `learning_rate`?"),
        ("lr=1", "lr", "cocktail calls this training.learning_rate"),
        ("datasets.5.path=x", "datasets.5.path", "`datasets` is a list of 1; give an index up to that"),
        ("name.x=1", "name.x", "`name` holds a value, not keys"),
        ("seed", "seed", "an override is written key=value"),
        ("seed={", "seed", "'{' is not a YAML value"),
        ("seed=*a", "seed", "YAML aliases (`*name`) have no place in a recipe"),
        ("K=0.1", "K", "cocktail calls this compression.topk_ratio"),
        ("H=4", "H", "cocktail calls this compression.local_steps"),
        ("training=true", "training", "must be a section, a mapping of keys to values, not True"),
        ("max_length=yes", "data.max_length", "must be a whole number, not True"),
    ],
)
def test_a_wrong_override_is_reported_as_one(write, override: str, key: str, message: str) -> None:
    [problem] = problems(write(SMALL), [override])

    assert (problem.file, problem.line, problem.key, problem.message) == ("override", None, key, message)


def test_an_optional_section_may_be_switched_on_and_off(write) -> None:
    path = write(SMALL)
    assert load_recipe(path, ["lora=true"]) == load_recipe(path, ["lora={}"])
    assert load_recipe(path, ["lora_r=3", "lora=true"]) == load_recipe(path, ["lora=true", "lora_r=3"])
    path = write(SMALL + "lora: {lora_r: 3}\n")
    assert load_recipe(path, ["lora=true"]) == load_recipe(path)
    assert load_recipe(path, ["lora=false"]).lora is None


def test_a_key_that_a_preset_has_set_is_blamed_on_who_named_the_preset(write) -> None:
    by_hand = problems(write(SMALL), ["preset=diloco", "max_steps=40"])
    in_file = problems(write(SMALL + "compression: {preset: diloco}\n"), ["max_steps=40"])

    for [problem], file, line in ((by_hand, "override", None), (in_file, in_file[0].file, 7)):
        assert (problem.file, problem.line) == (file, line)
        assert problem.message.startswith("by preset diloco, 500: a run of 40 steps")
        assert (problem.key, problem.hint) == ("compression.local_steps", "local_steps=4")


@pytest.mark.parametrize(("given", "meant"), [("paper", "cocktail-paper"), ("difoco", "diloco")])
def test_a_value_that_is_none_of_several_is_compared_with_them(write, given: str, meant: str) -> None:
    [problem] = problems(write(SMALL), [f"preset={given}"])

    assert problem.hint == f"did you mean {meant}?"


def test_data_and_model_of_the_command_line_replace_those_of_the_recipe() -> None:
    recipe = load_recipe("smoke", [], data="./my.jsonl", model="./gpt2")

    assert [d.path for d in recipe.datasets] == ["./my.jsonl"]
    assert recipe.datasets[0].type == "auto"
    assert recipe.model.model_name_or_path == "./gpt2"


def test_another_model_does_not_keep_the_first_ones_revision(write) -> None:
    path = write(SMALL.replace("./model", "a/b\n  model_revision: main\n  pad_token: x"))

    assert load_recipe(path, model="c/d").model.model_revision is None


def test_a_key_of_data_sets_is_that_of_the_only_one_and_asks_which_of_several(write) -> None:
    assert load_recipe(write(SMALL), ["max_samples=9"]).datasets[0].max_samples == 9
    [problem] = problems(write(SMALL), ["datasets.1.path=x", "type=text"])
    assert problem.message == "which data set? write datasets.0.type=..."


# ---- what is typed wins --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "typed", "left_out"),
    [
        ("training: {max_steps: 100}", "num_train_epochs=2", "training.max_steps"),
        ("eval_datasets: [{path: x.jsonl}]", "val_set_size=0.1", "eval_datasets"),
        ("data: {val_set_size: 0.1}", "eval_datasets=[{path: x}]", "data.val_set_size"),
        ("training: {bf16: true}", "fp16=true", "training.bf16"),
        ("lora: {lora_r: 4}\ncompression: {preset: lora-cocktail}", "lora=null", "compression.preset"),
    ],
)
def test_a_typed_key_beats_a_key_of_the_recipe_that_excludes_it_and_says_so(
    write, written: str, typed: str, left_out: str
) -> None:
    resolved = load_resolved(write(SMALL + written), [typed])
    without = load_recipe(write(SMALL + ("lora: {lora_r: 4}" if typed == "lora=null" else "")), [typed])

    assert resolved.recipe == without
    [note] = resolved.document.notes
    assert note.startswith(f"{typed} is typed: {left_out} in line ")


def test_a_typed_key_does_not_beat_another_typed_one(write) -> None:
    resolved = load_resolved(write(SMALL), ["max_steps=7", "num_train_epochs=2"])

    assert (resolved.recipe.training.max_steps, resolved.document.notes) == (7, [])


def test_typed_steps_leave_the_epochs_of_a_recipe_alone(write) -> None:
    resolved = load_resolved(write(SMALL + "training: {num_train_epochs: 3}"), ["max_steps=7"])

    assert (resolved.recipe.training.total_samples(10), resolved.document.notes) == (7 * 64, [])


# ---- identity ------------------------------------------------------------------------------------


def test_two_spellings_of_one_recipe_have_one_hash(write) -> None:
    terse = load_recipe(write(SMALL)).recipe_hash
    spelt = load_recipe(
        write(SMALL + "training: {learning_rate: 2e-5, seed: 42}\nswarm: {step_timeout: 600s}\n")
    )

    assert spelt.recipe_hash == terse
    assert load_recipe(write(SMALL), ["seed=43"]).recipe_hash != terse


SMOKE = load_recipe("smoke")


@given(st.integers(0, 2**32 - 1), st.floats(1e-9, 0.99), st.text(max_size=20).filter(str.isprintable))
def test_a_recipe_comes_out_of_its_json_as_it_went_in(seed: int, rate: float, text: str) -> None:
    training = SMOKE.training.model_copy(update={"seed": seed, "learning_rate": rate})
    changed = SMOKE.model_copy(update={"training": training, "description": text})
    again = recipe_from_json(changed.to_json())

    assert again == changed
    assert again.recipe_hash == changed.recipe_hash


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1, "evil": true}', "\x00"])
def test_a_recipe_from_a_stranger_is_checked(text: str) -> None:
    with pytest.raises(RecipeError):
        recipe_from_json(text)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_steps_win_over_epochs_and_the_last_step_may_be_smaller() -> None:
    epochs = load_recipe("smoke", ["max_steps=-1", "num_train_epochs=1.5", "global_batch_size=8"]).training
    steps = load_recipe("smoke", ["max_steps=5", "num_train_epochs=1.5", "global_batch_size=8"]).training

    assert (epochs.total_samples(11), epochs.total_steps(11)) == (17, 3)
    assert (steps.total_samples(11), steps.total_steps(11)) == (40, 5)


def test_shares_of_steps_are_rounded_up_and_whole_numbers_are_kept() -> None:
    recipe = load_recipe("smoke", ["warmup_steps=0.03", "eval_steps=0.5"])

    assert recipe.training.warmup(100) == 3
    assert recipe.training.warmup(10) == 1
    assert recipe.training.warmup(1) == 0, "a run of one step trains"
    assert recipe.checkpoint.eval_every(5) == 3
    assert load_recipe("smoke", ["warmup_steps=7"]).training.warmup(100) == 7
    assert load_recipe("smoke", ["eval_steps=null"]).checkpoint.eval_every(100) == 0


def test_snapshots_are_every_so_many_steps_a_share_of_them_or_never() -> None:
    every = [Checkpoint(save_steps=steps).save_every(50) for steps in (7, 0.1, None)]

    assert every == [7, 5, 0]
    assert load_recipe("smoke").checkpoint.save_every(50) == 100
    with pytest.raises(RecipeError, match=r"checkpoint\.save_steps *must be above 0"):
        load_recipe("smoke", ["save_steps=0"])
    with pytest.raises(RecipeError, match="save_total_limit"):
        load_recipe("smoke", ["save_total_limit=0"])


def test_the_output_folder_bears_the_recipes_name() -> None:
    assert load_recipe("smoke").output_dir == "outputs/smoke"
