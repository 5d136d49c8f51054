"""Receipts: what a run has counted of one peer, signed by the run's key, sent with each round that counts.

A receipt proves to anybody that the holder of the run's key counted so many samples of this peer, in a ledger
that had this head. It does not prove that they were trained well, or that the hub counted rightly: the peer
has to compare. A hub that later shows a ledger with another head, or fewer samples, is contradicted by it. It
names the hub by 16 digits of its key, as who has the whole key can dial it.

A peer stores the newest one of a run: COCKTAIL_HOME/receipts/<run>-<8 digits of its key>.json. Peers of one
machine have one key, so one receipt is for all of them. It may be deleted or shown to anybody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cocktail_cli.assembly import PeerExtension
from cocktail_cli.machine import home, write_private
from cocktail_cli.ui import counted
from transport import RunURL
from transport.ledger import Counted, Ledger
from transport.protocol import ProtocolError, RunKeys, count_samples, messages, read_msgpack, short_key
from transport.scheduling import CommitSeconds, HubExtension

from .signed_documents import NotGenuine, SignedDocument, signer_of

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
    said: Annotated[str, Meta(max_length=1024)] = ""  # what extensions know of the peer


def statement_of(run: str, hub: str, peer: str, round: int, receipt: Receipt) -> dict[str, Any]:
    """Spell out what a receipt of `round` says; `hub` and `peer` are public keys."""
    said = {"said": receipt.said} if receipt.said else {}
    return {
        "run": run,
        "hub": receipt.hub or short_key(hub),
        "peer": peer,
        "committed": round + 1,
        "rounds": receipt.rounds,
        "samples": receipt.samples,
        "head": receipt.head.hex(),
        "signer": receipt.signer.hex(),
        **said,
    }


def receipt_document(run: str, hub: str, peer: str, round: int, receipt: Receipt) -> SignedDocument:
    """Complete a receipt of `round` by what its peer knows itself. Raises NotGenuine."""
    document = SignedDocument(KIND, statement_of(run, hub, peer, round, receipt), receipt.signature.hex())
    document.check()
    return document


def open_receipt(path: Path) -> SignedDocument:
    """Read a receipt's file and check its signature. Raises NotGenuine, OSError."""
    try:
        receipt = SignedDocument.parse(path.read_bytes().decode(), KIND)
        if any(not isinstance(receipt.statement.get(name), of) for name, of in FIELDS.items()):
            raise NotGenuine(f"it lacks one of {', '.join(FIELDS)}")
        return receipt
    except (NotGenuine, UnicodeDecodeError) as error:
        raise NotGenuine.of(path, error) from None


class ReceiptFile(PeerExtension):
    """Checks and stores the receipts of one session.

    Args:
        peer: public key of this machine.
        warn: called once, where a receipt is not genuine or cannot be written; training goes on.
    """

    name = NAME

    def __init__(self, url: RunURL, peer: str, warn: Callable[[str], None]) -> None:
        self.url, self.peer, self.warn = url, peer, warn
        self.path: Path | None = None  # of the newest receipt, once there is one
        self.signer, self.samples = b"", 0
        self.failed = False

    def committed(self, message: messages.Committed) -> None:
        """Store the receipt of a round, if it brought one."""
        if not (body := message.extra.get(NAME)):
            return
        try:
            receipt = read_msgpack(body, Receipt, "it")
            document = receipt_document(self.url.run, self.url.key, self.peer, message.round, receipt)
            if self.signer not in (b"", receipt.signer):
                raise NotGenuine("it is signed by another key than the one before")
            if receipt.samples < self.samples:
                raise NotGenuine(f"it counts {receipt.samples} samples, the one before {self.samples}")
            path = home() / "receipts" / f"{self.url.run}-{receipt.signer.hex()[:8]}.json"
            write_private(path, document.text())
        except (ProtocolError, NotGenuine, OSError) as error:
            if not self.failed:
                self.failed = True
                self.warn(f"no receipt of round {message.round}: {error}")
            return
        self.path, self.signer, self.samples = path, receipt.signer, receipt.samples

    def farewell(self) -> str:
        """Say where the newest receipt is."""
        if self.path is None:
            return ""
        return f"the run's receipt for {counted(self.samples, 'sample')} of this machine: {self.path}"


class ReceiptWriter(HubExtension):
    """Issues the receipts of one hub."""

    name = NAME

    def __init__(
        self, keys: RunKeys, ledger: Ledger, said: Callable[[str], Iterable[str]] = lambda _: ()
    ) -> None:
        self._keys, self._ledger, self._said = keys, ledger, said
        first = ledger.origin.get("hub", "")
        self._hub = "" if first == short_key(keys.public) else first
        known = ledger.contributions()
        self._samples = Counter({key: samples for key, (samples, _) in known.items()})
        self._rounds = Counter({key: rounds for key, (_, rounds) in known.items()})

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> dict[str, bytes]:
        """Issue a receipt to each peer whose samples the round has counted."""
        sessions = defaultdict[str, set[str]](set)  # by key: a machine may have several
        said = defaultdict[str, set[str]](set)
        for c in counted:
            said[c.key] |= {f"{c.peer}: {words}" for words in self._said(c.peer) if words}
            self._samples[c.key] += count_samples(c.ids)
            sessions[c.key].add(c.session)
        self._rounds.update(sessions.keys())
        head, bodies = self._ledger.head(), dict[str, bytes]()
        for key in sessions.keys() - {""}:
            receipt = Receipt(
                rounds=self._rounds[key],
                samples=self._samples[key],
                head=bytes.fromhex(head),
                signer=bytes.fromhex(signer_of(self._keys.signing)),
                signature=b"",
                hub=self._hub,
                said="; ".join(sorted(said[key])),
            )
            statement = statement_of(self._ledger.run, self._keys.public, key, round, receipt)
            signed = SignedDocument.sign(KIND, statement, self._keys.signing)
            receipt = msgspec.structs.replace(receipt, signature=bytes.fromhex(signed.signature))
            bodies |= dict.fromkeys(sessions[key], msgspec.msgpack.encode(receipt))
        return bodies
