"""The chain of a run's decisions: each is a link, and its head covers all that was decided before it.

    head <- sha256(head, entry),  entry = sha256(JSON of the rows that the link covers)

The first head is a hash of what the run began with. A link is written with its rows, so who knows a head
knows that nothing before it was changed since. A fingerprint that is known later, and an evaluation that
was repeated, have a newer link, which is the one that counts.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from typing import Any, Literal

from transport.protocol import LedgerError

FORMAT = "1"
Kind = Literal["round", "fingerprint", "evaluation"]
ENTRIES: dict[Kind, tuple[str, ...]] = {  # the rows that a link covers
    "round": (
        "SELECT round, step, opened, committed, members, accepted, loss, tokens, counted, offset, length, "
        "hex(sha256) FROM rounds WHERE round=?",
        "SELECT lease, peer, session, round, hex(ids), key FROM counted WHERE round=? "
        "ORDER BY lease, session",
    ),
    "fingerprint": ("SELECT round, fingerprint FROM rounds WHERE round=?",),  # known later, where stale
    "evaluation": ("SELECT round, step, loss, tokens, final, rewards FROM evaluations WHERE round=?",),
}
COVERED = (  # the links that there must be
    "SELECT 'round', round FROM rounds UNION ALL "
    "SELECT 'fingerprint', round FROM rounds WHERE fingerprint != '0' UNION ALL "
    "SELECT 'evaluation', round FROM evaluations"
)


def first_head(run: str, samples: int, origin: Mapping[str, str]) -> bytes:
    """Hash what a run begins with: the head of a chain without links."""
    begins = {"format": FORMAT, "run": run, "samples": samples, "origin": origin}
    return hashlib.sha256(json.dumps(begins, sort_keys=True).encode()).digest()


def first_head_of(db: sqlite3.Connection) -> bytes:
    """Compute the first head of the run in these books."""
    meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    return first_head(meta["run"], int(meta["samples"]), json.loads(meta.get("origin", "{}")))


def entry_of(db: sqlite3.Connection, kind: Kind, round: int) -> bytes:
    """Hash the rows that a link covers, as they are in the tables now."""
    rows = [db.execute(query, (round,)).fetchall() for query in ENTRIES[kind]]
    return hashlib.sha256(json.dumps([kind, rows]).encode()).digest()


def linked(head: bytes, entry: bytes) -> bytes:
    """Return the head after one more link."""
    return hashlib.sha256(head + entry).digest()


def newest_head(db: sqlite3.Connection) -> bytes:
    """Return the newest head, or the first."""
    found = db.execute("SELECT head FROM chain ORDER BY link DESC LIMIT 1").fetchone()
    return bytes(found[0]) if found else first_head_of(db)


def next_link(db: sqlite3.Connection, kind: Kind, round: int) -> list[Any]:
    """Return the row of the next link, over rows that are in the tables by now."""
    (number,) = db.execute("SELECT coalesce(max(link), 0) + 1 FROM chain").fetchone()
    entry = entry_of(db, kind, round)
    return [number, kind, round, entry, linked(newest_head(db), entry)]


def verify_chain(db: sqlite3.Connection) -> str:
    """Recompute every head from the rows; return the newest, hex. Raises LedgerError, which names the
    round."""
    query = "SELECT kind, round, hex(entry), lower(hex(head)) FROM chain ORDER BY link"
    head, newest = first_head_of(db), dict[tuple[Kind, int], str]()
    for kind, round, entry, stored in db.execute(query).fetchall():
        head = linked(head, bytes.fromhex(entry))
        if head.hex() != stored:
            raise LedgerError(
                f"the chain breaks at {kind} {round}: its head is {stored}, expected {head.hex()}"
            )
        newest[kind, round] = entry.lower()
    for kind, round in dict.fromkeys([*db.execute(COVERED).fetchall(), *newest]):
        if newest.get((kind, round)) != entry_of(db, kind, round).hex():
            raise LedgerError(f"the rows of {kind} {round} are not those that the chain covers")
    return head.hex()
