"""Recipe keys of trust."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config import Conflict, ExtensionSection, Recipe, Whole, key


class Keys(ExtensionSection):
    probe_batch_size: Whole = key(8, "samples on which the hub scores each peer's contribution")

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what the probe cannot do: it needs whole packets, and rows at random."""
        if not recipe.hub_sums:
            text = "a probe (probe_batch_size) needs the packets at the hub: owners: hub"
            yield Conflict("trust.probe_batch_size", text)
        if recipe.data.streaming:
            text = "excluded by data.streaming: the probe draws from all rows"
            yield Conflict("trust.probe_batch_size", text)
