"""Residual handoffs, on the hub's disk until every shard aggregator has merged them into its error feedback.

    handoffs/<number>     the packet: a peer's residual, or the error feedback of shards that changed hands
    ledger.db, a note     who handed it over, its share of the mean, the shards whose aggregators lack it

A packet is written before its row, which has its hash. A round and the handoffs merged with it are one
transaction: an aggregator merges a handoff if the round is committed with its packet, and then the hub
marks it as merged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from transport import Ledger
from transport.protocol import LedgerError, ProtocolError, read_json

from .bodies import NAME

HUB = "the hub"  # hands over the error feedback of shards that a peer takes; no peer can have this name

Deliveries = Mapping[int, Collection[int]]  # number -> shards that have merged it


class PendingHandoff(msgspec.Struct, frozen=True):
    """A residual handoff, and the shards whose aggregators have not merged it yet."""

    peer: str
    share: float
    shards: frozenset[int]
    sha256: str = ""  # of the packet, hex


class Note(msgspec.Struct, frozen=True):
    """The handoffs in a ledger."""

    rows: dict[int, PendingHandoff] = {}
    newest: int = 0  # the highest number that was given: none is given twice
    given: int = 0  # the newest of the hub that is not in its own error feedback on the disk any more


class HandoffStore:
    """The handoffs of one ledger. Raises LedgerError where their rows cannot be read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.folder = ledger, ledger.folder / "handoffs"
        try:
            self._note = read_json(ledger.noted(NAME) or "{}", Note, "the handoffs in the ledger")
        except ProtocolError as error:
            raise LedgerError(str(error)) from None
        self._after = self._note  # once the round that is being committed is durable

    @property
    def rows(self) -> dict[int, PendingHandoff]:
        """Return the pending handoffs, by number."""
        return self._note.rows

    @property
    def not_given(self) -> frozenset[int]:
        """Return the shards whose error feedback the hub has stored for others, and not dropped itself: it
        was killed between the two."""
        twice = (one for n, one in self.rows.items() if one.peer == HUB and n > self._note.given)
        return frozenset().union(*(one.shards for one in twice))

    def add(self, handoff: PendingHandoff, packet: bytes) -> int:
        """Store a handoff on the disk and return its number."""
        number = self._note.newest + 1
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / str(number), "wb") as file:
            file.write(packet)
            file.flush()
            os.fsync(file.fileno())
        row = msgspec.structs.replace(handoff, sha256=hashlib.sha256(packet).hexdigest())
        self._write(self._note.given, {**self.rows, number: row}, number)
        return number

    def packet(self, number: int) -> bytes:
        """Read the packet of a handoff, from any thread. Raises KeyError."""
        try:
            return (self.folder / str(number)).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"there is no handoff {number}") from None

    def after(self, given: Deliveries) -> str:
        """Return the text to be noted with a round in which these shards merge these handoffs."""
        rows = self.rows | after_deliveries(self.rows, given)
        left = {number: one for number, one in rows.items() if one.shards}
        self._after = msgspec.structs.replace(self._note, rows=left)
        return msgspec.json.encode(self._after).decode()

    def settle(self) -> None:
        """Note that the round is durable; delete the packets of handoffs that all shards have merged."""
        self._note = self._after
        wanted = {str(number) for number in self.rows}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in wanted:
                path.unlink()

    def mark_merged(self, given: Deliveries) -> None:
        """Record that these shards have merged these handoffs, and that the hub's error feedback on the disk
        is without what it has handed over."""
        self.after(given)
        self._write(self._note.newest, self._after.rows, self._note.newest)

    def _write(self, given: int, rows: dict[int, PendingHandoff], newest: int) -> None:
        self._note = self._after = Note(rows, newest, given)
        self._ledger.note(NAME, msgspec.json.encode(self._note).decode())

    def damaged(self) -> dict[Path, tuple[int, str]]:
        """Find the packets that are damaged or gone: path -> number of the handoff, and whose it is."""
        found = dict[Path, tuple[int, str]]()
        for number, one in self.rows.items():
            path = self.folder / str(number)
            if not path.is_file() or one.sha256 != hashlib.sha256(path.read_bytes()).hexdigest():
                found[path] = number, one.peer
        return found

    def drop_damaged(self) -> list[str]:
        """Drop the handoffs whose packets are gone or damaged; return a sentence for each."""
        found = self.damaged()
        if found:
            gone = {number for number, _ in found.values()}
            rows = {number: one for number, one in self.rows.items() if number not in gone}
            self._write(self._note.given, rows, self._note.newest)
        lost = "what {} left to the aggregators is lost"
        return [f"{path} is damaged or gone: {lost.format(peer)}" for path, (_, peer) in found.items()]


def after_deliveries(rows: Mapping[int, PendingHandoff], given: Deliveries) -> dict[int, PendingHandoff]:
    """Return the rows that `given` changes, as they are afterwards."""
    return {
        number: msgspec.structs.replace(rows[number], shards=rows[number].shards - frozenset(shards))
        for number, shards in given.items()
        if number in rows
    }


def merge_deliveries(*several: Deliveries) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for given in several:
        for number, shards in given.items():
            found.setdefault(number, set()).update(shards)
    return found
