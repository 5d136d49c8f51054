"""Recipe keys of aggregators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from recipes.config import ExtensionSection, key


class Keys(ExtensionSection):
    value_hints: ClassVar[Mapping[tuple[str, str], str]] = {
        ("aggregators.owners", "auto"): "`peers` where the line of the hub is thin and peers can be reached"
    }

    owners: Literal["hub", "peers"] = key(
        "hub", "who aggregates the shards; peers: those that accept connections"
    )

    @property
    def hub_sums(self) -> bool:
        return self.owners == "hub"
