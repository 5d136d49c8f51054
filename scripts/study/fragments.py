"""Fragments that are whole layers, as Streaming DiLoCo has them (Douillard et al., 2025).

The recipes' fragments (`sample_kind: fragment`) are equal shares of the vector in the order of its layers. So
a border may fall inside a layer, and every packet is as long as the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from itertools import groupby
from math import gcd

from compress import Cocktail
from compress.sampling import Schedule
from recipes.weight_files.parameter_layout import Layout


@dataclass(frozen=True)
class ByLayers(Cocktail):
    """A compressor whose rounds visit one fragment after the other."""

    ends: tuple[int, ...] = ()  # coordinate behind each fragment, ascending; the last is P

    def schedule(self, n: int, seed: int, round: int) -> Schedule:
        """Schedule a round: one fragment. All ends are multiples of a block."""
        block = gcd(*self.ends) & -gcd(*self.ends)  # the largest power of two
        at = round % len(self.ends)
        first, last = (0, *self.ends)[at], self.ends[at]
        return Schedule(n, block, first // block, last // block, ())


def by_layers(compressor: Cocktail, layout: Layout) -> ByLayers:
    """Cut the vector into one fragment a layer, one before the first and one behind the last."""
    number = [re.search(r"\.layers\.\d+\.", name) for name in layout.names]
    layers = [found[0] if found else "" for found in number]
    sizes = [len(list(members)) for _, members in groupby(layers)]
    ends = [layout.offsets[sum(sizes[: i + 1])] for i in range(len(sizes))]
    values = {field.name: getattr(compressor, field.name) for field in fields(Cocktail)}
    return ByLayers(**values, ends=tuple(ends))
