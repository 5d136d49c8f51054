from pathlib import Path

import pytest

from cocktail_cli.assembly import recipe_type
from recipes.config import Recipe, load_resolved, recipe_from_json
from recipes.errors import RecipeError


def load(*overrides: str) -> Recipe:
    return load_resolved("smoke", overrides, extend=recipe_type).recipe


@pytest.mark.parametrize(
    "overrides",
    [
        ("owners=peers",),
        ("data.streaming=true", "max_steps=9"),
        ("global_batch_size=1025",),
        ("global_batch_size=129",),
        ("torch_compile=true",),
    ],
)
def test_what_audits_cannot_do_is_refused_by_their_section(overrides: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as refused:
        load("audits={}", *overrides)

    assert "audits" in {problem.key for problem in refused.value.problems}


def test_a_section_turns_audits_on_and_its_keys_have_bare_names() -> None:
    assert load().extensions == {}
    assert load("audits={}").extensions["audits"].audit_share == 0.02  # type: ignore[attr-defined]
    assert load("audit_share=0.1").recipe_hash == load("audits.audit_share=0.1").recipe_hash
    assert load("audit_share=0.1").recipe_hash != load().recipe_hash
    assert load("audits={}", "audits=null").recipe_hash == load().recipe_hash


def test_the_former_place_of_its_key_is_answered_with_the_place_of_now(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="it belongs under `audits:`"):
        load("swarm.audit_share=0.1")


def test_its_section_goes_to_peers_with_the_recipe() -> None:
    recipe = load("audit_share=0.1")

    assert recipe_from_json(recipe.to_json(), recipe_type) == recipe
    assert recipe_from_json(recipe.to_json(), None).extensions == {}
    with pytest.raises(RecipeError):
        recipe_from_json(recipe.to_json())


def test_a_machine_that_has_a_part_of_the_layers_cannot_audit() -> None:
    assert load("audits={}").extensions["audits"].one_machine
