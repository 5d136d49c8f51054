"""Residual handoffs, on the hub's disk until every shard aggregator has merged them into its error feedback.

    estates/<number>      the packet: a peer's residual, or the error feedback of shards that changed hands
    ledger.db, estates    who handed it over, its share of the mean, the shards whose aggregators lack it

A packet is written before its row. A round and the handoffs merged with it are one transaction: an aggregator
merges a handoff if the round is committed with its packet, and then the hub marks it as merged.
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
HUB = "the hub"  # hands over the error feedback of shards that a peer takes; no peer can have this name

Deliveries = Mapping[int, Collection[int]]  # number -> shards that have merged it


@dataclass(frozen=True)
class PendingHandoff:
    """A residual handoff, and the shards whose aggregators have not merged it yet."""

    peer: str
    share: float
    shards: frozenset[int]


class HandoffStore:
    """The handoffs of one ledger, whose database connection it shares."""

    def __init__(self, db: sqlite3.Connection, folder: Path) -> None:
        self._db, self.folder = db, folder / "estates"

    def add(self, handoff: PendingHandoff, packet: bytes) -> int:
        """Store a handoff on the disk and return its number."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            row = handoff.peer, handoff.share, json.dumps(sorted(handoff.shards))
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
        """Read the packet of a handoff, from any thread. Raises KeyError."""
        try:
            return (self.folder / str(number)).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"there is no handoff {number}") from None

    def mark_merged(self, given: Deliveries) -> None:
        """Record that these shards have merged these handoffs, usually in a transaction of the caller."""
        for number, left in after_deliveries(self.rows(), given).items():
            row = json.dumps(sorted(left.shards)), number
            self._db.execute("UPDATE estates SET shards=? WHERE number=?", row)
        self._db.execute("DELETE FROM estates WHERE shards='[]'")

    def delete_merged(self) -> None:
        """Delete the packets of handoffs that all shards have merged."""
        wanted = {str(number) for number in self.rows()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in wanted:
                path.unlink()


def after_deliveries(rows: Mapping[int, PendingHandoff], given: Deliveries) -> dict[int, PendingHandoff]:
    """Return the rows that `given` changes, as they are afterwards."""
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
    """Select the handoffs that the aggregator of these shards must merge."""
    wanted = set(shards)
    return {number: left for number, left in rows.items() if left.shards & wanted}
