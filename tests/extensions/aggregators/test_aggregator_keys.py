"""Its section of a recipe, and what follows from it before a run."""

import pytest

from cocktail_cli.assembly import dialled, recipe_type, used
from cocktail_cli.extensions.aggregators import extension
from recipes.config import Recipe, load_resolved
from recipes.errors import RecipeError


def load(*overrides: str) -> Recipe:
    return load_resolved("smoke", overrides, extend=recipe_type).recipe


def test_the_hub_sums_unless_a_recipe_names_peers_which_are_dialled_then() -> None:
    star, named, sharded = load(), load("owners=hub"), load("owners=peers", "compression.shards=8")

    assert extension not in used(star)
    assert [recipe.hub_sums for recipe in (star, named, sharded)] == [True, True, False]
    assert [dialled(recipe) for recipe in (star, named, sharded)] == [False, False, True]


def test_who_writes_what_is_gone_is_told_what_to_write() -> None:
    with pytest.raises(RecipeError) as told:
        load("owners=auto")

    [problem] = told.value.problems
    assert problem.message == "must be 'hub' or 'peers', not 'auto'"
    assert problem.hint == "`peers` where the line of the hub is thin and peers can be reached"
