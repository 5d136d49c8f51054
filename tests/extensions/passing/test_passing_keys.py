"""Its section of a recipe, which may be absent; and what follows from it before a run."""

from pathlib import Path

from test_join_prompt import asked, bullet

from cocktail_cli.assembly import crossing, recipe_type, used
from cocktail_cli.extensions.passing import extension
from cocktail_cli.extensions.passing.keys import mode_of
from recipes.config import Recipe, load_resolved, source_of


def load(*overrides: str, name: str = "smoke") -> Recipe:
    return load_resolved(name, overrides, extend=recipe_type).recipe


def test_a_run_passes_on_unless_its_recipe_says_off_or_peers_aggregate() -> None:
    assert mode_of(load()) == "auto"
    assert mode_of(load("passing=always")) == "always"
    assert mode_of(load("passing=off")) == "off"
    assert mode_of(load("owners=peers", "compression.shards=8", "passing=always")) == "off"
    assert extension in used(load(), half=""), "a recipe needs no section of it"


def test_off_is_a_word_though_yaml_reads_it_as_false(tmp_path: Path) -> None:
    text = source_of("smoke").text
    recipes = list[Recipe]()
    for word in ("off", "'off'"):
        (tmp_path / "mine.yaml").write_text(f"{text}\npassing: {{passing: {word}}}\n")
        recipes.append(load(name=str(tmp_path / "mine.yaml")))
    recipes.append(load("passing.passing=off"))

    assert len({one.recipe_hash for one in recipes}) == 1
    assert mode_of(recipes[0]) == "off"


def test_where_it_is_off_nothing_is_said_of_other_peers() -> None:
    assert crossing(load(), 1, 2) is not None
    assert crossing(load("passing=off"), 4, 8) is None
    assert crossing(load(), 0, 8) is None, "nobody can be reached"
    way = crossing(load("passing=always"), 4, 8)
    assert way is not None
    assert way.always
    assert way.hub < 2


def test_the_question_says_who_sees_the_address_of_this_machine() -> None:
    """Peers that listen are dialled by members, and whoever listens is named to all of them."""
    assert "and to peers that listen" in bullet(asked(), "shows")
    assert "and to all peers" in bullet(asked(listen="0.0.0.0:29401"), "shows")
