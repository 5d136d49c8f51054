from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recipes.config.loader import recipe_from_json
from recipes.config.schema import Recipe
from recipes.planning.step_cost import LinkSpeed, StepCost, cost_of_step

PACKET = 10**6


def recipe(**compression: object) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "costs",
            "model": {"model_name_or_path": "builtin:tiny-gpt-neox"},
            "datasets": [{"path": "builtin:python-docs"}],
            "compression": compression,
        }
    )


def cost(asked: Recipe, compute: float, rate: float) -> StepCost:
    return cost_of_step(asked, PACKET, compute, LinkSpeed(rate, rate))


@given(st.floats(0.001, 1000), st.floats(1e3, 1e8), st.floats(1, 100))
def test_chosen_local_steps_are_the_fewest_that_hide_the_sparsest_packets(
    compute: float, rate: float, faster: float
) -> None:
    chosen, sparse = recipe(local_steps="auto", auto=False), recipe(local_steps="auto")
    every = cost(chosen, compute, rate).every
    taken = 2 * PACKET / rate

    assert every in (1, 2, 4, 8)
    assert every == 8 or taken <= every * compute * (1 + 1e-9)
    assert every == 1 or taken > every / 2 * compute * (1 - 1e-9)
    assert cost(sparse, compute, rate).every <= every
    assert cost(chosen, compute, faster * rate).every <= every


def test_a_number_of_local_steps_is_taken_whatever_the_line_carries() -> None:
    for rate in (1e3, 1e9):
        assert cost(recipe(local_steps=3), 1.0, rate).every == 3


def test_a_recipe_that_chooses_its_local_steps_reads_itself_again() -> None:
    asked = recipe(local_steps="auto")

    assert recipe_from_json(asked.to_json()) == asked
    assert asked.recipe_hash != recipe().recipe_hash == recipe(local_steps=1).recipe_hash
