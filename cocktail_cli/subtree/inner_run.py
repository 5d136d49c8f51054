"""InnerRun: a run's model side at an inner hub, built from its recipe for transport's InnerHub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.host import CommittedModel
from transport.tree import LeasedSample

from .inner_aggregator import InnerAggregator

if TYPE_CHECKING:
    from recipes.config import Recipe


class InnerRun:
    """The residual d_h of a run, and its samples (transport.tree.InnerWork).

    `recover` comes first, `close` last.

    Args:
        base: folder of the base model.
        run: folder of this hub, with its ledger in "ledger".
        fetch: fetches an object from the parent: what children ask for and this hub does not make.
    """

    def __init__(self, recipe: Recipe, base: Path, run: Path, fetch: Callable[[str], bytes]) -> None:
        from recipes.algorithm import inner_aggregator_of
        from recipes.errors import ModelError
        from recipes.models import count_trainable

        if recipe.swarm.audit_share:
            raise ModelError("swarm.audit_share: the peers below an inner hub cannot be audited")
        self.recipe, self._fetch = recipe, fetch
        aggregator = inner_aggregator_of(recipe, count_trainable(recipe, base))
        self.residual = InnerAggregator(aggregator, run / "inner")
        self._model = CommittedModel(recipe, base, run)

    def recover(self, rounds: int) -> None:
        """Bring d_h to where it was; the ledger has so many rounds. Raises LedgerError."""
        self.residual.recover(rounds)

    def close(self) -> None:
        self.residual.close()

    def unpack(self, lease: bytes) -> list[LeasedSample]:
        from recipes.data import unpack_samples

        weigh = (lambda _: 1.0) if self.recipe.dpo else float
        return [LeasedSample(one, one.count, weigh(one.count)) for one in unpack_samples(lease)]

    def pack(self, samples: Sequence[LeasedSample]) -> bytes:
        from recipes.data import pack_samples

        return pack_samples([sample.data for sample in samples])

    def fingerprint(self, round: int) -> int:
        return self._model.load(round).global_model.fingerprint

    def object(self, name: str) -> bytes:
        return self._fetch(name)
