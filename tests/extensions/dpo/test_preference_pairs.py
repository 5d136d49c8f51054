"""Preference pairs: what is read of a row, what is refused with file and line, what is cut or left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from cocktail_cli.assembly import reader_of, recipe_type
from cocktail_cli.extensions.dpo.preferences import TextPair, conversation_pair, text_pair
from recipes.config import Recipe, load_recipe
from recipes.data import ConversationReader, Row, build_corpus, make_row_tokenizer
from recipes.errors import DataError, RecipeError

PAIRED = ["dpo={}", "lora_r=4", "packing=false", "datasets.0.type=auto"]
ASK = {"role": "user", "content": "Two and two?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Four.", "Five."))


def loaded(*overrides: str) -> Recipe:
    return load_recipe("smoke", [*PAIRED, *overrides], extend=recipe_type)


def read(fields: dict[str, Any], *overrides: str) -> Any:
    """The first row of a file, as a recipe with `dpo:` reads it."""
    recipe = loaded(*overrides)
    row = Row(json.loads(json.dumps(fields)), "my.jsonl:7")
    dataset = recipe.datasets[0]
    if isinstance(fields["chosen"], list):
        chosen, rejected = conversation_pair(ConversationReader(dataset), row)
        return chosen.messages, rejected.messages, chosen.prompt
    return text_pair(dataset, row)


def test_a_prompt_may_be_given_or_be_what_both_answers_begin_with() -> None:
    told = {"prompt": "It is", "chosen": " four.", "rejected": " nine."}
    whole = {"chosen": "It is four.", "rejected": "It is nine."}

    assert read(told) == read(whole) == TextPair("It is", " four.", " nine.")
    assert read(told | whole, "column_map={prompt: -}") == read(whole)
    wanted = [ASK, GOOD], [ASK, BAD], 1
    assert read({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}) == wanted
    assert read({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}) == wanted
    assert read({"prompt": "Two and two?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": "a", "rejected": None}, "my.jsonl:7: field `rejected` must be text, not null"),
        ({"chosen": "a"}, "my.jsonl:7: no field `rejected`; there is chosen"),
        ({"chosen": "a", "rejected": ["b"]}, "my.jsonl:7: field `rejected` must be text, not list"),
        (
            {"prompt": "It is", "chosen": "It is a", "rejected": "It is b"},
            "my.jsonl:7: both answers begin with the `prompt`",
        ),
        (
            {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "my.jsonl:7: both answers begin with the `prompt`",
        ),
        ({"prompt": "Hm?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "`prompt` is text that is in no"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "my.jsonl:7: `rejected` has no message of an assistant"),
        ({"chosen": [ASK, GOOD], "rejected": []}, "my.jsonl:7: `rejected` must be a list of messages"),
        (
            {"prompt": [ASK], "chosen": [{"role": "assistant", "content": ""}], "rejected": [BAD]},
            "my.jsonl:7: chosen message 0: the assistant has neither content nor tool calls",
        ),
    ],
)
def test_a_bad_row_is_told_with_file_line_and_what_is_expected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        read(fields)

    assert message in str(error.value)


def test_equal_answers_are_warned_of_once(tokenizer: Any) -> None:
    recipe = loaded()
    rows = [Row({"prompt": "a", "chosen": " b", "rejected": " b"}, f"my.jsonl:{n}") for n in (1, 2)]
    read = make_row_tokenizer(tokenizer, recipe.data, recipe.datasets[0], rows[0], recipe.objective)

    read.tokenize(rows)

    assert [*read.warnings] == ["my.jsonl:1: chosen and rejected are the same: such pairs teach nothing"]


def test_pairs_without_a_section_dpo_name_what_is_missing(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "my.jsonl").write_text('{"chosen": "a b", "rejected": "a c"}')
    alone = load_recipe("smoke", ["datasets.0.type=auto"], data=str(tmp_path / "my.jsonl"))
    with pytest.raises(DataError, match=r"my.jsonl:1: columns chosen, rejected are no known kind") as error:
        build_corpus(alone, tokenizer)

    assert reader_of(error.value) == "rows with chosen and rejected need a section `dpo:` (dpo={} lora_r=16)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora=null"], "dpo  needs `lora:`: the reference is the base without adapters"),
        (["packing=true"], "data.packing  excluded by `dpo:`"),
        (["assistant_only_loss=true"], "data.assistant_only_loss  excluded by `dpo:`"),
        (["datasets.0.type=chat"], "datasets.0.type  `chat` has no chosen and rejected answers"),
        (["dpo=null", "datasets.0.type=preference"], "datasets.0.type  `preference` needs a section `dpo:`"),
        (["loss_type=dpo"], "dpo.loss_type"),
        (["dpo.gamma=1"], "dpo.gamma"),
        (["beta=0"], "dpo.beta  must be above 0, not 0"),
        (["dpo_beta=1"], "dpo_beta  cocktail calls this dpo.beta"),
        (["label_smoothing=1"], "label_smoothing  there is no such key: loss_type is sigmoid, hinge or ipo"),
        (["dpo.disable_dropout=true"], "dpo.disable_dropout  there is no such key: under `dpo:`"),
        (["dpo=null", "datasets.0.type=prefer"], "datasets.0.type  must be 'auto', 'text', 'prompt_comp"),
    ],
)
def test_keys_that_contradict_preferences_are_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        loaded(*overrides)

    assert " ".join(message.split()) in " ".join(str(error.value).split())
