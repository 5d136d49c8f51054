"""Signed proofs: what the run has counted of each peer, as a receipt that its holder can show to anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocktail_cli.assembly import Extension, HostParts, PeerExtension, PeerParts

from .receipts import open_receipt

if TYPE_CHECKING:
    from transport.hub import Extend


class Proofs(Extension):
    """A hub that has a signing key issues receipts, and each peer keeps its newest."""

    def hub(self, host: HostParts) -> Extend | None:
        from .hub import ReceiptWriter

        return (lambda _: ReceiptWriter(host.keys, host.ledger)) if host.keys.signing else None

    def peer(self, peer: PeerParts) -> PeerExtension:
        from .peer import ReceiptFile

        return ReceiptFile(peer.url, peer.key, peer.warn)


extension = Proofs()
