"""Recipe keys of turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from recipes.config import Conflict, ExtensionSection, Recipe, Whole


class Keys(ExtensionSection):
    members_per_round: Annotated[
        Whole, Field(description="of more peers a round takes so many, in long turns; the others wait")
    ]

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what turns cannot do."""
        members, fewest, name = self.members_per_round, recipe.swarm.min_peers, "turns.members_per_round"
        if members < fewest:
            yield Conflict(name, f"{members} is below swarm.min_peers={fewest}")
        if not recipe.hub_sums:
            yield Conflict(name, "peers that aggregate shards are members of every round", "owners: hub")
