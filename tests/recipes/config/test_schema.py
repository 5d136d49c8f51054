"""A recipe's canonical text has every key, and the recipe is read back from it."""

import json

from recipes.config import Recipe, load_recipe, recipe_from_json

EVERY_SECTION = """\
version: 1
name: every-section
description: Every section is written.
model: {model_name_or_path: ./model, load_in_4bit: true}
lora: {lora_r: 8}
datasets: [{path: my.jsonl, type: chat, weight: 2.0}, {path: yours.jsonl, weight: 1.0}]
eval_datasets: [{path: held-out.jsonl, max_samples: 10}]
data: {max_length: 512, packing: true}
training: {max_steps: 100, learning_rate: 1.0e-4}
compression: {preset: sparseloco}
swarm: {min_peers: 2, step_timeout: 5m, requires: {vram: 24GB}}
checkpoint: {save_steps: 5, eval_steps: 5}
logging: {logging_steps: 5}
"""


def test_a_recipe_is_read_back_from_its_canonical_text(write) -> None:
    recipe = load_recipe(write(EVERY_SECTION))

    assert recipe_from_json(recipe.to_json()) == recipe
    assert recipe_from_json(recipe.to_json()).recipe_hash == recipe.recipe_hash


def test_every_key_is_in_the_canonical_text_set_or_not(write) -> None:
    """So a recipe means the same wherever it is read, and no default is in two places."""
    values = json.loads(load_recipe(write(EVERY_SECTION)).to_json())

    assert values.keys() == Recipe.model_fields.keys()
    for name, field in Recipe.model_fields.items():
        if isinstance(values[name], dict) and hasattr(field.annotation, "model_fields"):
            assert values[name].keys() == field.annotation.model_fields.keys()
