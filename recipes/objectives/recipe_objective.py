"""The choice of an objective."""

from __future__ import annotations

from recipes.config import Recipe

from .next_tokens import NextTokens
from .objective import Objective


def objective_of(recipe: Recipe) -> Objective:
    """Return what this recipe minimizes."""
    if recipe.dpo is None:
        return NextTokens()
    from .preferences import Preferences  # no other run reads it

    return Preferences(recipe.dpo)
