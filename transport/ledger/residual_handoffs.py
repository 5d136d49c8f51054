"""Residual handoffs, on the hub's disk until every shard aggregator has merged them into its error feedback.

    estates/<number>      the packet: a peer's residual, or the error feedback of shards that changed hands
    ledger.db, estates    who handed it over, its share of the mean, the shards whose aggregators lack it

A packet is written before its row, which has its hash. A round and the handoffs merged with it are one
transaction: an aggregator merges a handoff if the round is committed with its packet, and then the hub
marks it as merged.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .book_tables import Change, meta_rows, meta_value, rows_of

NUMBERED = "handoffs"  # key in `meta` of the highest number that was given: none is given twice
HUB = "the hub"  # hands over the error feedback of shards that a peer takes; no peer can have this name

Deliveries = Mapping[int, Collection[int]]  # number -> shards that have merged it


@dataclass(frozen=True)
class PendingHandoff:
    """A residual handoff, and the shards whose aggregators have not merged it yet."""

    peer: str
    share: float
    shards: frozenset[int]


class HandoffStore:
    """The handoffs of one ledger, whose rows `write` makes durable."""

    def __init__(self, db: sqlite3.Connection, folder: Path, write: Callable[..., None]) -> None:
        self._db, self._write, self.folder = db, write, folder / "estates"

    def add(self, handoff: PendingHandoff, packet: bytes) -> int:
        """Store a handoff on the disk and return its number."""
        number = int(meta_value(self._db, NUMBERED, "0")) + 1
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / str(number), "wb") as file:
            file.write(packet)
            file.flush()
            os.fsync(file.fileno())
        self._write(
            Change("estates", [row_of(number, handoff, hashlib.sha256(packet).hexdigest())]),
            meta_rows({NUMBERED: str(number)}),
        )
        return number

    def rows(self) -> dict[int, PendingHandoff]:
        return {
            n: PendingHandoff(peer, share, frozenset(json.loads(shards)))
            for n, peer, share, shards, _ in rows_of(self._db, "estates")
        }

    def packet(self, number: int) -> bytes:
        """Read the packet of a handoff, from any thread. Raises KeyError."""
        try:
            return (self.folder / str(number)).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"there is no handoff {number}") from None

    def changes_merged(self, given: Deliveries) -> list[Change]:
        """Return the changes by which these shards have merged these handoffs."""
        hashes = {row[0]: row[4] for row in rows_of(self._db, "estates")}
        after = after_deliveries(self.rows(), given)
        put = [row_of(number, left, hashes[number]) for number, left in after.items() if left.shards]
        return [Change("estates", put, [[number] for number, left in after.items() if not left.shards])]

    def mark_merged(self, given: Deliveries) -> None:
        """Record that these shards have merged these handoffs."""
        self._write(*self.changes_merged(given))

    def damaged(self) -> dict[Path, tuple[int, str]]:
        """Find the packets that are damaged or gone: path -> number of the handoff, and whose it is."""
        found = dict[Path, tuple[int, str]]()
        for number, peer, _, _, sha256 in rows_of(self._db, "estates"):
            path = self.folder / str(number)
            if not path.is_file() or sha256 not in ("", hashlib.sha256(path.read_bytes()).hexdigest()):
                found[path] = number, peer
        return found

    def drop_damaged(self) -> list[str]:
        """Drop the handoffs whose packets are gone or damaged; return a sentence for each."""
        found = self.damaged()
        if found:
            self._write(Change("estates", drop=[[number] for number, _ in found.values()]))
        lost = "what {} left to the aggregators is lost"
        return [f"{path} is damaged or gone: {lost.format(peer)}" for path, (_, peer) in found.items()]

    def delete_merged(self) -> None:
        """Delete the packets of handoffs that all shards have merged."""
        wanted = {str(number) for number in self.rows()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in wanted:
                path.unlink()


def row_of(number: int, handoff: PendingHandoff, sha256: str) -> list[object]:
    """Return the columns of a handoff's row."""
    return [number, handoff.peer, handoff.share, json.dumps(sorted(handoff.shards)), sha256]


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
