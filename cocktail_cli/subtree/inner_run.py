"""InnerRun: a run's model side at an inner hub, built from its recipe for transport's InnerHub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.host import CommittedModel
from transport.protocol import WeightedPacket
from transport.tree import LeasedSample, SentUpdate

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
        from recipes.models import count_trainable

        self.recipe, self._fetch = recipe, fetch
        self.sum = InnerAggregator(inner_aggregator_of(recipe, count_trainable(recipe, base)), run / "inner")
        self._model = CommittedModel(recipe, base, run)

    def recover(self, rounds: int) -> None:
        """Bring d_h to where it was; the ledger has so many rounds. Raises LedgerError."""
        self.sum.recover(rounds)

    def close(self) -> None:
        self.sum.close()

    @property
    def pending(self) -> SentUpdate | None:
        return self.sum.pending

    def unpack(self, lease: bytes) -> list[LeasedSample]:
        from recipes.data import unpack_samples

        weigh = (lambda _: 1.0) if self.recipe.dpo else float
        return [LeasedSample(one, one.count, weigh(one.count)) for one in unpack_samples(lease)]

    def pack(self, samples: Sequence[LeasedSample]) -> bytes:
        from recipes.data import pack_samples

        return pack_samples([sample.data for sample in samples])

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.sum.aggregator.add(round, peer, packet)

    def fits(self, size: int) -> None:
        self.sum.aggregator.set_budget(size)

    def aggregate(self, round: int, updates: Sequence[WeightedPacket], sender: str) -> bytes:
        from recipes.algorithm import equal_weights

        if self.recipe.compression.weighting == "uniform":
            updates = [WeightedPacket(*one) for one in equal_weights(updates)]
        return self.sum.aggregate(round, updates, sender)

    def settle(self, accepted: bool) -> None:
        self.sum.settle(accepted)

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self.sum.inherit(peer, packet, share)

    def committed(self, round: int) -> None:
        self.sum.committed(round)

    def fingerprint(self, round: int) -> int:
        return self._model.load(round).global_model.fingerprint

    def object(self, name: str) -> bytes:
        return self._fetch(name)
