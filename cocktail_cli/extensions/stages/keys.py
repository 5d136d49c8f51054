"""Recipe keys of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from recipes.config import Conflict, ExtensionSection, Recipe, key


class Keys(ExtensionSection):
    """Volunteers may join as pipeline stages: each layer is a shard, and `launch` writes where each ends."""

    gone_keys: ClassVar[Mapping[str, str]] = {
        "shards_at_layers": "write stages: {}",
        "shard_ends": "there is no such key: `launch` writes where shards end, with stages: {}",
        "activation_gradient_bits": "there is no such key: under activation_bits gradients have 8 bits",
    }
    value_hints: ClassVar[Mapping[tuple[str, str], str]] = {
        ("compression.shards", "layers"): "a section `stages: {}` (stages={}), with shards as they are"
    }

    activation_bits: Literal[2, 3, 4, 32] = key(
        32,
        "bits of an activation between pipeline stages, as a change of what both ends know; its gradient has "
        "8 then",
    )

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield shards that are not layers."""
        if isinstance(shards := recipe.compression.shards, int) and shards > 1:
            text = f"{shards}: under `stages:` each layer is a shard"
            yield Conflict("compression.shards", text, "shards=1")
