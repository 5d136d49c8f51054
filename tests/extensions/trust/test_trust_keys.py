"""The section of trust in a recipe."""

import pytest

from cocktail_cli.assembly import recipe_type
from recipes.config import load_recipe
from recipes.errors import RecipeError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["owners=peers"], "a probe (probe_batch_size) needs the packets at the hub: owners: hub"),
        (["streaming=true", "max_steps=9", "val_set_size=0"], "excluded by data.streaming: the probe draws"),
        (["swarm.probe_batch_size=8"], "it belongs under `trust:`"),
    ],
)
def test_a_probe_needs_whole_packets_and_all_rows(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("smoke", ["probe_batch_size=4", *overrides], extend=recipe_type)

    assert any(message in problem.message for problem in error.value.problems)
