"""What somebody has left to the owners, on the hub's disk until all of them have it in their errors.

    estates/<number>      the packet: a legacy, or the errors of shards that changed hands
    ledger.db, estates    who left it, its share of the mean, the shards whose owners do not have it yet

A packet is written before its row. A round and what is given with it are one transaction: an owner adds an
estate to its errors if the round is committed with its packet, and the hub strikes it out if it is.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = """CREATE TABLE IF NOT EXISTS estates (
    number INTEGER PRIMARY KEY AUTOINCREMENT, peer TEXT, share REAL, shards TEXT)"""
HUB = "the hub"  # who leaves the errors of shards that become a peer's: no peer can have this name

Deliveries = Mapping[int, Collection[int]]  # number -> shards in whose errors it is


@dataclass(frozen=True)
class PendingHandoff:
    """What somebody has left, and the shards whose owners do not have it yet."""

    peer: str
    share: float
    shards: frozenset[int]


class HandoffStore:
    """Of one ledger, whose connection it shares."""

    def __init__(self, db: sqlite3.Connection, folder: Path) -> None:
        self._db, self.folder = db, folder / "estates"

    def keep(self, left: PendingHandoff, packet: bytes) -> int:
        """Its number. On the disk when this returns."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            row = left.peer, left.share, json.dumps(sorted(left.shards))
            number = self._db.execute(
                "INSERT INTO estates (peer, share, shards) VALUES (?, ?, ?)", row
            ).lastrowid
            assert number is not None
            self.folder.mkdir(exist_ok=True)
            with open(self.folder / str(number), "wb") as file:
                file.write(packet)
                file.flush()
                os.fsync(file.fileno())
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        return number

    def rows(self) -> dict[int, PendingHandoff]:
        rows = self._db.execute("SELECT number, peer, share, shards FROM estates ORDER BY number")
        return {
            n: PendingHandoff(peer, share, frozenset(json.loads(shards))) for n, peer, share, shards in rows
        }

    def packet(self, number: int) -> bytes:
        """From any thread. Raises KeyError."""
        try:
            return (self.folder / str(number)).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"there is no estate {number}") from None

    def strike(self, given: Deliveries) -> None:
        """These are in the errors of these shards. In a transaction of the caller, as a rule."""
        for number, left in after_deliveries(self.rows(), given).items():
            row = json.dumps(sorted(left.shards)), number
            self._db.execute("UPDATE estates SET shards=? WHERE number=?", row)
        self._db.execute("DELETE FROM estates WHERE shards='[]'")

    def sweep(self) -> None:
        """Delete the packets that nobody is to have any more."""
        wanted = {str(number) for number in self.rows()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in wanted:
                path.unlink()


def after_deliveries(rows: Mapping[int, PendingHandoff], given: Deliveries) -> dict[int, PendingHandoff]:
    """The rows that `given` changes, as they are then."""
    return {
        number: PendingHandoff(rows[number].peer, rows[number].share, rows[number].shards - frozenset(shards))
        for number, shards in given.items()
        if number in rows
    }


def merge_deliveries(*several: Deliveries) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for given in several:
        for number, shards in given.items():
            found.setdefault(number, set()).update(shards)
    return found


def handoffs_for(rows: Mapping[int, PendingHandoff], shards: Iterable[int]) -> dict[int, PendingHandoff]:
    """What the owner of these shards is to have."""
    wanted = set(shards)
    return {number: left for number, left in rows.items() if left.shards & wanted}
