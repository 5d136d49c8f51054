"""Receipts: what a run has counted of one peer, signed by the run's key, sent with each round that counts.

A receipt proves to anybody that the holder of the run's key counted so many samples of this peer, in a ledger
that had this head. It does not prove that they were trained well, or that the hub counted rightly: the peer
has to compare. A hub that later shows a ledger with another head, or fewer samples, is contradicted by it. It
names the hub by 16 digits of its key, as who has the whole key can dial it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transport.protocol import NotGenuine, messages, short_key

from .signed_documents import SignedDocument

NAME, KIND = "proofs", "receipt"  # of the body, and of the document
FIELDS = {"run": str, "hub": str, "peer": str, "committed": int, "rounds": int, "samples": int, "head": str}


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a Committed: samples of one peer that its run has counted, signed."""

    rounds: messages.Count  # that counted them
    samples: messages.Count
    head: messages.Digest  # of the ledger's chain, after this round
    signer: Annotated[bytes, Meta(max_length=32)]  # public Ed25519 key of the run
    signature: Annotated[bytes, Meta(max_length=64)]
    hub: Annotated[str, Meta(max_length=16)] = ""  # digits of the first hub's key, where it is another's now


def statement_of(run: str, hub: str, peer: str, round: int, receipt: Receipt) -> dict[str, Any]:
    """Spell out what a receipt of `round` says; `hub` and `peer` are public keys."""
    return {
        "run": run,
        "hub": receipt.hub or short_key(hub),
        "peer": peer,
        "committed": round + 1,
        "rounds": receipt.rounds,
        "samples": receipt.samples,
        "head": receipt.head.hex(),
        "signer": receipt.signer.hex(),
    }


def receipt_document(run: str, hub: str, peer: str, round: int, receipt: Receipt) -> SignedDocument:
    """Complete a receipt of `round` by what its peer knows itself. Raises NotGenuine."""
    document = SignedDocument(KIND, statement_of(run, hub, peer, round, receipt), receipt.signature.hex())
    document.check()
    return document


def read_receipt(text: str) -> SignedDocument:
    """Read a receipt's file and check its signature. Raises NotGenuine."""
    receipt = SignedDocument.parse(text, KIND)
    if any(not isinstance(receipt.statement.get(name), of) for name, of in FIELDS.items()):
        raise NotGenuine(f"it lacks one of {', '.join(FIELDS)}")
    return receipt


def open_receipt(path: Path) -> SignedDocument:
    """Read a receipt's file and check its signature. Raises NotGenuine, OSError."""
    try:
        return read_receipt(path.read_bytes().decode())
    except (NotGenuine, UnicodeDecodeError) as error:
        raise NotGenuine(f"{path}: {error}") from None
