"""Recipe keys of audits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from recipes.config import Conflict, ExtensionSection, Real, Recipe, key

MOST_SKETCHED = 1024  # samples of a round: a report has room for sketches of three such leases


class Keys(ExtensionSection):
    one_machine: ClassVar[bool] = True

    audit_share: Annotated[Real, Field(gt=0, le=0.5)] = key(
        0.02, "at most so much of the compute for audits: another peer computes a sample's gradient too"
    )

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what audits cannot do: their sketches go with a report, their samples are leased again."""
        most = recipe.training.global_batch_size * max(one.local_steps for one in recipe.compression.rungs)
        if most > MOST_SKETCHED:
            text = f"a round has {most:,} samples; audits take {MOST_SKETCHED:,} at most"
            yield Conflict("audits", text, "no `audits:`, a smaller batch, or compression.local_steps=1")
        if not recipe.hub_sums:
            yield Conflict("audits", "needs the packets at the hub: owners: hub")
        if recipe.training.torch_compile:
            yield Conflict("audits", "excluded by training.torch_compile", "torch_compile=false")
        if recipe.data.streaming:
            yield Conflict("audits", "excluded by data.streaming: an audited row was read before")
