"""Differential privacy of what a peer sends of its own rows (`join_privately`, `PrivateRows`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport import Ledger
    from transport.hub import Extend

    from .hub import Figures


def __getattr__(name: str) -> Any:
    """Import the API at first use: it brings torch."""
    if name not in ("join_privately", "PrivateRows"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".private_rows", __name__), name)


class Privacy(Extension):
    """Each peer adds its own noise and counts its own budget; the hub is only told what is spent."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import NAME, SpendingBook, noted

        terms: Any = host.recipe.extensions[NAME]
        return lambda _: SpendingBook(terms, noted(host.ledger))

    def peer(self, peer: PeerParts) -> PeerExtension:
        from .private_rows import PrivatePeer

        return PrivatePeer(peer.recipe, peer.url.run)

    def figures(self) -> type[Figures]:
        from .hub import Figures

        return Figures

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        if said := status.get("privacy"):
            spent = ", ".join(f"{peer} {epsilon:.3g}" for peer, epsilon in sorted(said["spent"].items()))
            budget = f"epsilon {said['epsilon']:g} at delta {said['delta']:g}"
            yield f"privacy: {budget} for each row; spent: {spent or 'nothing'}"

    def described(self, recipe: Recipe, ledger: Ledger) -> Iterator[str]:
        from .hub import NAME, noted, words

        terms: Any = recipe.extensions[NAME]
        yield "## Privacy\n"
        yield f"Each row of a peer is protected: at most epsilon {terms.epsilon:g} at delta {terms.delta:g}."
        yield "Peers say that they have spent:\n"
        for peer, epsilon in noted(ledger).items():  # names are the peers' own
            name = re.sub(r"[^\w .-]", "?", peer)
            yield f"- {name}: {words(epsilon, terms)}"
        yield ""


extension = Privacy()
