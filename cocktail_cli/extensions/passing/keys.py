"""Recipe keys of passing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from recipes.config import ExtensionSection, Recipe, key


def parse_off(value: Any) -> Any:
    """Convert false, as which YAML reads the word, to `off`."""
    return "off" if value is False else value


Mode = Literal["auto", "always", "off"]


class Keys(ExtensionSection):
    passing: Annotated[Mode, BeforeValidator(parse_off)] = key(
        "auto",
        "with owners hub: peers that accept connections pass on files to newcomers, and packets (auto: where "
        "that is faster)",
    )


def mode_of(recipe: Recipe) -> Mode:
    """Return whether peers of a run pass things on: never where they aggregate shards themselves."""
    section = recipe.extensions.get("passing", Keys())
    assert isinstance(section, Keys)
    return section.passing if recipe.hub_sums else "off"
