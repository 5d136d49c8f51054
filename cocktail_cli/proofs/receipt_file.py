"""The newest receipt of a run on its peer's disk: COCKTAIL_HOME/receipts/<run>-<8 digits of its key>.json

Peers of one machine have one key, so one receipt is for all of them. It may be deleted or shown to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.machine import home, write_private

if TYPE_CHECKING:
    from transport import RunURL
    from transport.protocol import messages
    from transport.receipts import SignedDocument


def open_receipt(path: Path) -> SignedDocument:
    """Read a receipt's file and check its signature. Raises NotGenuine, OSError."""
    from transport.protocol import NotGenuine
    from transport.receipts import read_receipt

    try:
        return read_receipt(path.read_bytes().decode())
    except (NotGenuine, UnicodeDecodeError) as error:
        raise NotGenuine(f"{path}: {error}") from None


class ReceiptFile:
    """Checks and stores the receipts of one session.

    Args:
        peer: public key of this machine.
        warn: called once, where a receipt is not genuine or cannot be written; training goes on.
    """

    def __init__(self, url: RunURL, peer: str, warn: Callable[[str], None]) -> None:
        self.url, self.peer, self.warn = url, peer, warn
        self.path: Path | None = None  # of the newest receipt, once there is one
        self.signer, self.samples = b"", 0
        self.failed = False

    def keep(self, committed: messages.Committed) -> None:
        """Store the receipt of a committed round, if it brought one."""
        from transport.protocol import NotGenuine
        from transport.receipts import receipt_document

        if (receipt := committed.receipt) is None:
            return
        try:
            document = receipt_document(self.url.run, self.url.key, self.peer, committed.round, receipt)
            if self.signer not in (b"", receipt.signer):
                raise NotGenuine("it is signed by another key than the one before")
            if receipt.samples < self.samples:
                raise NotGenuine(f"it counts {receipt.samples} samples, the one before {self.samples}")
            path = home() / "receipts" / f"{self.url.run}-{receipt.signer.hex()[:8]}.json"
            write_private(path, document.text())
        except (NotGenuine, OSError) as error:
            if not self.failed:
                self.failed = True
                self.warn(f"no receipt of round {committed.round}: {error}")
            return
        self.path, self.signer, self.samples = path, receipt.signer, receipt.samples
