"""Files that prove something: a peer's receipts, and the seals of folders."""

from .receipt_file import ReceiptFile, open_receipt
from .sealed_folder import SEAL, check_files, check_sealed_model, read_seal, sha256_of, uncovered, write_seal
