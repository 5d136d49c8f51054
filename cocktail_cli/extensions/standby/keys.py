"""Recipe keys of a standby."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from recipes.config import Conflict, ExtensionSection, Recipe, key


class Keys(ExtensionSection):
    durability: Literal["asynchronous", "replicated"] = key(
        "asynchronous", "replicated: a round is committed once a standby has it on its disk"
    )

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what a standby cannot do."""
        if not recipe.hub_sums and self.durability == "replicated":
            text = "replicated: a standby cannot follow peers that aggregate shards"
            yield Conflict("standby.durability", text, "`asynchronous`, or `owners: hub`")


def lag_of(recipe: Recipe) -> int:
    """Return how many rounds a hub may announce that its standby lacks."""
    section = recipe.extensions.get("standby", Keys())
    assert isinstance(section, Keys)
    return 0 if section.durability == "replicated" else 1
