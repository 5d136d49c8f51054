"""`cocktail validate`: what is wrong is told before a run, with the exit status a launch would have."""

import json
from pathlib import Path

import pytest
from in_this_process import Run

from cocktail_cli.assembly import recipe_type
from recipes.config import list_recipes, load_recipe
from recipes.planning import unusual_settings

RECIPE = """\
version: 1
name: mine
model: {model_name_or_path: 'builtin:tiny-gpt-neox'}
datasets: [{path: rows.jsonl}]
data: {max_length: 64}
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    return path


def rows(folder: Path, *texts: object) -> None:
    lines = (text if isinstance(text, str) else json.dumps(text) for text in texts)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_a_valid_recipe_is_exit_0_with_a_line_for_each_check(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, *[{"prompt": "Two and two is", "completion": " four."}] * 20)

    said = cocktail("validate", "my.yaml")

    assert said.exit == 0
    recipe, model, data = said.out.splitlines()
    assert recipe.startswith("ok    recipe    schema 1, 5 keys set, sha256 ")
    assert "GPTNeoXForCausalLM, 1.0 M parameters" in model
    assert data == "ok    data      rows.jsonl: 20 rows, detected prompt_completion, 0 bad"
    assert "cocktail launch my.yaml" in said.err


def test_an_unusual_learning_rate_is_a_warning_and_no_shipped_recipe_has_one() -> None:
    def levels(name: str, *overrides: str) -> list[str]:
        return [finding.level for finding in unusual_settings(load_recipe(name, list(overrides)))]

    assert (
        levels("opt-1.3b", "learning_rate=3e-4") == levels("gptj-6b-lora", "learning_rate=2e-3") == ["warn"]
    )
    assert levels("opt-1.3b", "learning_rate=3e-4", "optim=sgd") == []
    assert [found for recipe in list_recipes(recipe_type) for found in unusual_settings(recipe)] == []


@pytest.mark.parametrize(
    ("keys", "levels"),
    [
        (["max_steps=9", "warmup_steps=9"], ["warn"]),
        (["num_train_epochs=1", "warmup_steps=3"], ["warn"]),  # 20 rows are 3 steps of 8
        (["num_train_epochs=2", "warmup_steps=3"], []),
        (["num_train_epochs=1", "warmup_steps=0.5"], []),
    ],
)
def test_a_warmup_that_the_run_never_ends_is_a_warning(
    tmp_path: Path, recipe: Path, keys: list[str], levels: list[str]
) -> None:
    rows(tmp_path, *[{"text": "a"}] * 20)
    loaded = load_recipe(recipe, [*keys, "global_batch_size=8"], data=str(tmp_path / "rows.jsonl"))

    assert [finding.level for finding in unusual_settings(loaded)] == levels


def test_each_row_of_the_wrong_format_is_an_error_with_its_line(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, {"text": "good"}, {"test": "misspelt"}, {"text": 3}, {"text": "good"})

    said = cocktail("validate", "my.yaml")

    assert said.exit == 3
    assert "fail  data      rows.jsonl:2: no field `text`; there is test" in said.out
    assert "rows.jsonl:3: field `text` must be text, not int" in said.out
    assert "4 rows, detected text (not used: test), 2 bad" in said.out


def test_what_a_conversation_would_lose_is_an_error_with_its_line(cocktail: Run, tmp_path: Path) -> None:
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    rows(
        tmp_path,
        {"messages": [ask, answer], "source": "me"},
        {"messages": [ask, answer | {"tool_calls": [call]}]},
        {"messages": [ask, answer | {"role": "asistant"}]},
        {"messages": [ask, answer | {"content": [{"type": "image_url", "image_url": "x.png"}]}]},
    )

    said = cocktail("validate", "my.yaml")

    assert said.exit == 3
    assert "rows.jsonl:2: message 1: the chat template leaves out `tool_calls` of role assistant" in said.out
    assert "rows.jsonl:3: message 1: unknown role `asistant`: did you mean `assistant`?" in said.out
    assert "rows.jsonl:4: message 1: part 0 is `image_url`: cocktail trains on text only" in said.out
    assert "4 rows, detected chat (not used: source), 3 bad" in said.out


def test_a_line_that_is_not_json_is_an_error_with_its_line(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, {"text": "good"}, '{"text": ')

    said = cocktail("validate", "my.yaml")

    assert (said.exit, "rows.jsonl:2: not valid JSON" in said.out) == (3, True)


def test_rows_that_are_too_long_are_a_warning_and_with_strict_a_failure(
    cocktail: Run, tmp_path: Path
) -> None:
    rows(tmp_path, *[{"text": "short"}] * 9, {"text": "long " * 100})

    said = cocktail("validate", "my.yaml")
    strict = cocktail("validate", "my.yaml", "--strict", "--quiet")

    assert said.exit == 0
    assert (
        "1 rows (10.0 %) are longer than max_length 64 and will be cut   hint: data.max_length=" in said.out
    )
    assert strict.exit == 3
    assert strict.out.startswith("warn")


def test_data_without_a_trained_token_are_a_failure(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, *[{"prompt": "word " * 80, "completion": "never seen"}] * 2)

    said = cocktail("validate", "my.yaml")

    assert (said.exit, "not one of 2 rows has a token to train on" in said.out) == (3, True)


def test_the_data_are_checked_although_the_model_is_wrong(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, {"text": "good"})

    said = cocktail("validate", "my.yaml", "--model", "./nowhere")

    assert said.exit == 3
    assert "fail  model     no such model folder: ./nowhere" in said.out
    assert "rows.jsonl: text" in said.out


def test_a_hub_model_is_not_checked_offline(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, {"text": "good"})

    asked = cocktail("validate", "my.yaml", "--model", "some/model")
    offline = cocktail("validate", "my.yaml", "--model", "some/model", "--offline")

    assert asked.exit == 5
    assert offline.exit == 0
    assert "warn  model     not checked: " in offline.out


def test_three_rows_are_a_warning_before_a_run_and_at_its_launch(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, *[{"text": "good"}] * 3)

    said = cocktail("validate", "my.yaml")

    assert said.exit == 0
    assert "warn  data      rows.jsonl: only 3 rows: the model will learn them by heart" in said.out


def test_findings_are_one_json_object(cocktail: Run, tmp_path: Path) -> None:
    rows(tmp_path, *[{"text": "good"}] * 20)

    said = json.loads(cocktail("validate", "my.yaml", "--json").out)

    assert (said["v"], said["recipe"]) == (1, "mine")
    assert [finding["level"] for finding in said["findings"]] == ["ok", "ok", "ok"]


def test_print_shows_the_source_of_each_value(cocktail: Run) -> None:
    lines = cocktail("validate", "my.yaml", "learning_rate=1e-4", "--print").out.splitlines()
    origins = {line.partition("#")[0].strip(): line.partition("#")[2].strip() for line in lines}

    assert origins["learning_rate: 0.0001"] == "learning_rate=1e-4"
    assert origins["max_length: 64"] == "my.yaml:5"
    assert origins["- path: rows.jsonl"] == "my.yaml:4"
    assert origins["seed: 42"] == "default"


def test_the_output_of_print_is_the_same_recipe(cocktail: Run, tmp_path: Path) -> None:
    whole = cocktail("validate", "smoke", "max_steps=7", "--print").out
    (tmp_path / "whole.yaml").write_text(whole)

    hashes = {
        json.loads(cocktail("validate", *arguments, "--print", "--json").out)["hash"]
        for arguments in (("smoke", "max_steps=7"), ("whole.yaml",))
    }

    assert len(hashes) == 1
