"""Signed statements: receipts of a peer's contribution, and seals of the files that a run has made."""

from .signed_documents import SignedDocument, signer_of
