"""Receipts: what a run has counted of one peer, signed by the run's key, sent with each round that counts.

A receipt proves to anybody that the holder of the run's key counted so many samples of this peer, in a ledger
that had this head. It does not prove that they were trained well, or that the hub counted rightly: the peer
has to compare. A hub that later shows a ledger with another head, or fewer samples, is contradicted by it. It
names the hub by 16 digits of its key, as who has the whole key can dial it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from transport.ledger import Counted, Ledger
from transport.protocol import NotGenuine, RunKeys, count_samples, messages, short_key

from .signed_documents import SignedDocument, signer_of

KIND = "receipt"
FIELDS = {"run": str, "hub": str, "peer": str, "committed": int, "rounds": int, "samples": int, "head": str}


class ReceiptWriter:
    """Issues the receipts of one hub, in its commit thread."""

    def __init__(self, keys: RunKeys, ledger: Ledger) -> None:
        self._keys, self._ledger = keys, ledger
        first = ledger.origin.get("hub", "")
        self._hub = "" if first == short_key(keys.public) else first
        known = ledger.contributions()
        self._samples = Counter({key: samples for key, (samples, _) in known.items()})
        self._rounds = Counter({key: rounds for key, (_, rounds) in known.items()})

    def issue(self, round: int, counted: Iterable[Counted]) -> dict[str, messages.Receipt]:
        """Return session -> receipt for the peers whose samples the round has counted; call once a round."""
        sessions = defaultdict[str, set[str]](set)  # by key: a machine may have several
        for c in counted:
            self._samples[c.key] += count_samples(c.ids)
            sessions[c.key].add(c.session)
        self._rounds.update(sessions.keys())
        head, made = self._ledger.head(), dict[str, messages.Receipt]()
        for key in sessions.keys() - {""}:
            receipt = messages.Receipt(
                rounds=self._rounds[key],
                samples=self._samples[key],
                head=bytes.fromhex(head),
                signer=bytes.fromhex(signer_of(self._keys.signing)),
                signature=b"",
                hub=self._hub,
            )
            statement = statement_of(self._ledger.run, self._keys.public, key, round, receipt)
            signed = SignedDocument.sign(KIND, statement, self._keys.signing)
            receipt = replace(receipt, signature=bytes.fromhex(signed.signature))
            made |= dict.fromkeys(sessions[key], receipt)
        return made


def statement_of(run: str, hub: str, peer: str, round: int, receipt: messages.Receipt) -> dict[str, Any]:
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


def receipt_document(run: str, hub: str, peer: str, round: int, receipt: messages.Receipt) -> SignedDocument:
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
