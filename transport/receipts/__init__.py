"""Signed proofs: of each peer's contribution, and of the files that a run has made."""

from .contribution_receipts import ReceiptWriter, read_receipt, receipt_document
from .signed_documents import SignedDocument, signer_of
