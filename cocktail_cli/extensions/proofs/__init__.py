"""Signed proofs: receipts of what a run has counted of each peer, and seals of the files that it has made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.assembly import Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from cocktail_cli.host import CommittedModel
    from transport.hub import Extend, HubParts
    from transport.protocol import RunKeys
    from transport.scheduling import HubExtension


class Proofs(Extension):
    """A hub with a signing key issues receipts, each peer keeps its newest, and what is written is sealed."""

    files = ("seal.json",)

    def hub(self, host: HostParts) -> Extend | None:
        from .receipts import ReceiptWriter

        def writer(hub: HubParts) -> HubExtension:
            said = lambda peer: (one.attests(peer) for one in hub.rounds.extensions)  # noqa: E731
            return ReceiptWriter(host.keys, host.ledger, said)

        return writer if host.keys.signing else None

    def peer(self, peer: PeerParts) -> PeerExtension:
        from .receipts import ReceiptFile

        return ReceiptFile(peer.url, peer.key, peer.warn)

    def origin(self, keys: RunKeys) -> Mapping[str, str]:
        """Name the signer in the ledger's origin."""
        from .signed_documents import signer_of

        return {"signer": signer_of(keys.signing) if keys.signing else ""}

    def wrote_model(self, model: CommittedModel, folder: Path, rounds: int, merged: bool) -> None:
        """Seal a model's folder."""
        from .seals import seal_model

        seal_model(model, folder, rounds, merged)

    def wrote_run(self, model: CommittedModel, rounds: int) -> None:
        """Seal the run's folder."""
        from .seals import seal_run

        seal_run(model, rounds)


extension = Proofs()
