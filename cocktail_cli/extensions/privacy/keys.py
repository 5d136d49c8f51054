"""Recipe keys of differential privacy for the rows of each peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from recipes.config import Conflict, ExtensionSection, Real, Recipe, key

Positive = Annotated[Real, Field(gt=0)]


class Keys(ExtensionSection):
    """The promise of all peers of a run for each record of their own rows; each adds its own noise."""

    epsilon: Positive = key(8.0, "budget of each record in this run; a peer stops once it is spent")
    delta: Annotated[Real, Field(gt=0, lt=1)] = key(1e-5, "of the budget; below 1 / rows of each peer")
    max_grad_norm: Positive = key(1.0, "norm to which the gradient of each row is clipped")

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield where rows are not the peers' own."""
        if "own_loop" not in recipe.extensions:
            text = "protects rows that peers have of their own: what a hub leases it knows already"
            yield Conflict("privacy", text, "own_loop={}")
