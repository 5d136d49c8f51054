"""Recipes of older versions keep their hash, whatever keys the schema gains."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Strict

from recipes.config.loader import load_recipe, recipe_from_json
from recipes.config.schema import Recipe, Seconds, Section, Whole, drop_newer_defaults, key

EVERY_SECTION = """\
version: 1
name: every-section
description: Every section of version 0.1 is written.
model: {model_name_or_path: ./model, load_in_4bit: true}
lora: {lora_r: 8}
datasets: [{path: my.jsonl, type: chat, weight: 2.0}, {path: yours.jsonl, weight: 1.0}]
eval_datasets: [{path: held-out.jsonl, max_samples: 10}]
data: {max_length: 512, packing: true}
training: {max_steps: 100, learning_rate: 1.0e-4}
compression: {preset: sparseloco}
swarm: {min_peers: 2, step_timeout: 5m, requires: {vram: 24GB}}
checkpoint: {save_steps: 5, eval_steps: 5}
logging: {report_to: trackio, logging_steps: 5}
"""


class NewerDataset(Section):
    path: str
    shuffle_files: bool = key(False, "a key of a later version", since="0.2")


class NewerSection(Section):
    turns: Whole | None = key(None, "a key of a section of a later version")


class NewerRecipe(Recipe):
    """The schema of a later version: it gained a key in a list, a key of a duration, and a section."""

    sources: Annotated[tuple[NewerDataset, ...], Strict(False)] = key((), "a list", since="0.2")
    grace: Seconds = key(5.0, "a key of a later version", since="0.2")
    chat: NewerSection = key(NewerSection(), "a section of a later version", since="0.2")


def test_a_key_of_a_later_version_is_in_the_hash_only_where_it_is_set() -> None:
    bare = load_recipe("smoke")
    values = bare.model_dump()

    assert NewerRecipe(**values).to_json() == bare.to_json()
    assert NewerRecipe(**values, grace="5s").recipe_hash == bare.recipe_hash
    for later in ({"grace": "6s"}, {"chat": {"turns": 3}}, {"sources": [{"path": "x"}]}):
        assert NewerRecipe(**values, **later).recipe_hash != bare.recipe_hash


def test_a_later_key_inside_a_list_is_left_out_at_its_default() -> None:
    newer = NewerRecipe(
        **load_recipe("smoke").model_dump(),
        sources=[{"path": "a"}, {"path": "b", "shuffle_files": True}],
    )

    assert json.loads(newer.to_json())["sources"] == [{"path": "a"}, {"path": "b", "shuffle_files": True}]


def test_a_recipe_is_read_back_from_its_canonical_text(write) -> None:
    recipe = load_recipe(write(EVERY_SECTION))

    assert recipe_from_json(recipe.to_json()) == recipe
    newer = NewerRecipe(**recipe.model_dump(), grace=6.0)
    assert NewerRecipe.model_validate_json(newer.to_json()) == newer


def test_only_the_dump_loses_keys_never_the_recipe() -> None:
    section = NewerDataset(path="a")
    dump = section.model_dump()

    drop_newer_defaults(section, dump)

    assert dump == {"path": "a"}
    assert section.shuffle_files is False
