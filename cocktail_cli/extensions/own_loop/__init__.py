"""Own loops: any trainer, any objective, any data joins a run (`join_with`, `CocktailCallback`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Exchange, Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport.hub import Extend
    from transport.protocol import messages

API = {"join_with": "swarm", "CocktailCallback": "trainer_callback", "save_base": "named_tensors"}


def __getattr__(name: str) -> Any:
    """Import the API at first use: it brings torch."""
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{API[name]}", __name__), name)


class PacedExchange:
    """Reports the seconds that a lease would have taken at a peer's pace: its loop's batches are not as long
    as its leases, and leases follow the pace."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    @property
    def upload_s(self) -> float:
        return self.inner.upload_s

    def exchange(
        self, round: int, packet: bytes, report: messages.Report, beside: Mapping[str, bytes] = {}
    ) -> messages.Committed:
        from msgspec.structs import replace

        if (samples := sum(report.figures)) > 0:
            report = replace(report, compute_s=report.compute_s * report.tokens / samples)
        return self.inner.exchange(round, packet, report, beside)


class Paced(PeerExtension):
    name = "own_loop"

    def exchange_by(self, inner: Exchange) -> Exchange:
        return PacedExchange(inner)


class OwnLoops(Extension):
    """Its section of a recipe has the objective, and opens the model as named tensors."""

    def pin(self, recipe: Recipe, base: Path) -> Recipe:
        from .named_tensors import check_base

        check_base(base)
        return recipe

    def hub(self, host: HostParts) -> Extend:
        from .hub import WeighedClaims

        return WeighedClaims

    def peer(self, peer: PeerParts) -> PeerExtension:
        return Paced()


extension = OwnLoops()
