"""The newest receipt of a run on its peer's disk: COCKTAIL_HOME/receipts/<run>-<8 digits of its key>.json

Peers of one machine have one key, so one receipt is for all of them. It may be deleted or shown to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cocktail_cli.assembly import PeerExtension
from cocktail_cli.machine import home, write_private
from cocktail_cli.ui import counted
from transport import RunURL
from transport.protocol import NotGenuine, ProtocolError, messages, read_msgpack

from .receipts import NAME, Receipt, receipt_document


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
