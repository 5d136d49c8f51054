import pytest

from cocktail_cli.assembly import recipe_type
from recipes.config import load_resolved
from recipes.errors import RecipeError


def test_peers_that_aggregate_shards_have_no_standby() -> None:
    assert load_resolved("smoke", ["durability=replicated"], extend=recipe_type).recipe.extensions
    with pytest.raises(RecipeError) as refused:
        load_resolved("smoke", ["durability=replicated", "owners=peers", "shards=8"], extend=recipe_type)

    assert "standby.durability" in {problem.key for problem in refused.value.problems}
