"""Statements in JSON, each with an Ed25519 signature by the key that it names as its `signer`.

    {"v": 1, "kind": "receipt" | "seal", "statement": {..., "signer": hex}, "signature": hex}

The signature is of the kind and the statement, in one spelling. A document has one spelling too, so that no
byte of it can be altered unseen, not even a blank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cocktail_cli.errors import Failure
from transport.protocol import to_bytes


class NotGenuine(Failure):
    """A document's signature does not belong to what it says."""

    def __init__(self, why: str) -> None:
        hint = "copy it again, or ask the run's host"
        super().__init__("altered", f"it is not genuine: {why}", hints=(hint,))
        self.why = why

    @classmethod
    def of(cls, path: Path, error: Exception) -> NotGenuine:
        """Name the file of an error."""
        return cls(f"{path}: {getattr(error, 'why', error)}")


@lru_cache(maxsize=4)
def private_key(secret: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(to_bytes(secret))


@lru_cache(maxsize=4)  # deriving it takes longer than signing
def signer_of(secret: str) -> str:
    """Return the public key, hex, that belongs to RunKeys.signing."""
    return private_key(secret).public_key().public_bytes_raw().hex()


@dataclass(frozen=True)
class SignedDocument:
    """One statement and its signature. `check` says whether they belong together."""

    kind: str
    statement: dict[str, Any]
    signature: str = ""  # hex

    @classmethod
    def sign(cls, kind: str, statement: dict[str, Any], secret: str) -> SignedDocument:
        """Sign a statement with RunKeys.signing; its `signer` is added."""
        unsigned = cls(kind, statement | {"signer": signer_of(secret)})
        return cls(kind, unsigned.statement, private_key(secret).sign(unsigned._signed_bytes()).hex())

    @classmethod
    def parse(cls, text: str, kind: str) -> SignedDocument:
        """Read a document of this kind and check its signature. Raises NotGenuine."""
        try:
            fields = json.loads(text)
            found = cls(fields["kind"], fields["statement"], fields["signature"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise NotGenuine(f"it is no {kind}: {type(error).__name__}: {error}") from None
        if found.kind != kind or not isinstance(found.statement, dict):
            raise NotGenuine(f"it is no {kind}, but {str(found.kind)[:40]!r}")
        found.check()
        if found.text() != text:
            raise NotGenuine("its text is not spelt as it was written")
        return found

    def check(self) -> None:
        """Raise NotGenuine unless the signature is the signer's, of this very statement."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.statement["signer"]))
            signature = bytes.fromhex(self.signature)
            key.verify(signature, self._signed_bytes())
            if signature.hex() != self.signature:
                raise ValueError("capitals, or blanks")
        except (InvalidSignature, LookupError, TypeError, ValueError):
            raise NotGenuine("its signature does not belong to what it says") from None

    def text(self) -> str:
        """Return the file's content."""
        fields = {"v": 1, "kind": self.kind, "statement": self.statement, "signature": self.signature}
        return json.dumps(fields, indent=1) + "\n"

    def _signed_bytes(self) -> bytes:
        return f"cocktail {self.kind} 1\n{json.dumps(self.statement, sort_keys=True)}".encode()
