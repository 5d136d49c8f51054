"""Issues receipts with the rounds that count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from transport.ledger import Counted, Ledger
from transport.protocol import RunKeys, count_samples, short_key
from transport.scheduling import CommitSeconds, HubExtension

from .receipts import KIND, NAME, Receipt, statement_of
from .signed_documents import SignedDocument, signer_of


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
