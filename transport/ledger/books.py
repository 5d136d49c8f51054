"""The books of a run: a journal, which is the truth, tables in SQLite, the index by which it is read, and the
chain of the decisions in them.

    write    rows change in a transaction; the journal gets the changes, fsynced; the transaction is committed
    open     book_opening.py

A `Change` names whole rows, so whoever carries changes out in their order, once or twice, has the same books.

Each decision is a link of the chain, whose head covers all that was decided before it:

    head <- sha256(head, entry),  entry = sha256(JSON of the rows that the link covers)

The first head is a hash of what the run began with. A link is written with its rows, so who knows a head
knows that nothing before it was changed since. A fingerprint that is known later, and an evaluation that
was repeated, have a newer link, which is the one that counts.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import msgspec

from transport.protocol import LedgerError, SamplePool, SampleRanges, count_samples, minus, unpack_ranges

from .packet_log import HEADER_SIZE, PacketLog

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, step INTEGER, opened REAL, committed REAL, fingerprint TEXT, members TEXT,
    accepted TEXT, loss REAL, tokens INTEGER, counted INTEGER, offset INTEGER, length INTEGER, sha256 BLOB);
CREATE TABLE counted (
    lease INTEGER, peer TEXT, session TEXT, round INTEGER, ids BLOB, key TEXT DEFAULT '',
    PRIMARY KEY (lease, session)) WITHOUT ROWID;
CREATE TABLE leased (
    lease INTEGER, session TEXT, ids BLOB, PRIMARY KEY (lease, session)) WITHOUT ROWID;
CREATE TABLE sessions (session TEXT PRIMARY KEY, name TEXT, hardware TEXT, key TEXT) WITHOUT ROWID;
CREATE TABLE peers (
    key TEXT PRIMARY KEY, name TEXT, standing TEXT, reason TEXT, strikes INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE TABLE evaluations (
    round INTEGER PRIMARY KEY, step INTEGER, loss REAL, tokens INTEGER, final INTEGER,
    rewards TEXT DEFAULT '[]');
CREATE TABLE chain (link INTEGER PRIMARY KEY, kind TEXT, round INTEGER, entry BLOB, head BLOB);
CREATE INDEX counted_by_round ON counted (round)
"""
COLUMNS = {
    "meta": "key, value",
    "rounds": "round, step, opened, committed, fingerprint, members, accepted, loss, tokens, counted, "
    "offset, length, sha256",
    "counted": "lease, peer, session, round, ids, key",
    "leased": "lease, session, ids",
    "sessions": "session, name, hardware, key",
    "peers": "key, name, standing, reason, strikes",
    "evaluations": "round, step, loss, tokens, final, rewards",
    "chain": "link, kind, round, entry, head",
}
KEYS = {
    "meta": ("key",),
    "rounds": ("round",),
    "counted": ("lease", "session"),
    "leased": ("lease", "session"),
    "sessions": ("session",),
    "peers": ("key",),
    "evaluations": ("round",),
    "chain": ("link",),
}
PUT = {
    table: f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({','.join('?' * len(columns.split()))})"
    for table, columns in COLUMNS.items()
}
DROP = {
    table: f"DELETE FROM {table} WHERE {' AND '.join(f'{key}=?' for key in keys)}"
    for table, keys in KEYS.items()
}
# Exceptions of damaged rows: SQLite's own, and those of values that have another type or form than ours.
MALFORMED = (
    sqlite3.DatabaseError,
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
STANDINGS = ("member", "banned", "waiting")  # of a key (admission.Standing)
AT_ONCE = 4096  # rows in memory
Rows = list[list[Any]]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one table that come, or replace those with the same key, and keys of rows that go before."""

    table: str
    put: Rows = []
    drop: Rows = []


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables, within the transaction of the caller if there is one."""
    for statement in SCHEMA.split(";"):
        db.execute(statement)


def post(db: sqlite3.Connection, changes: Iterable[Change]) -> None:
    """Carry changes out, in a transaction of the caller."""
    for one in changes:
        if one.drop:
            db.executemany(DROP[one.table], one.drop)
        if one.put:
            db.executemany(PUT[one.table], one.put)


def rows_of(db: sqlite3.Connection, table: str, where: str = "1") -> Rows:
    """Read rows of a table, by their key."""
    return [list(row) for row in select(db, table, where)]


def select(db: sqlite3.Connection, table: str, where: str = "1") -> sqlite3.Cursor:
    order = ", ".join(KEYS[table])
    return db.execute(f"SELECT {COLUMNS[table]} FROM {table} WHERE {where} ORDER BY {order}")


def key_of(table: str, row: list[Any]) -> list[Any]:
    """Return the key of a whole row."""
    columns = COLUMNS[table].split(", ")
    return [row[columns.index(name)] for name in KEYS[table]]


def dump(db: sqlite3.Connection) -> Iterator[list[Change]]:
    """Yield the changes that make these books of empty ones."""
    for table in COLUMNS:
        cursor = select(db, table)
        while rows := cursor.fetchmany(AT_ONCE):
            yield [Change(table, [list(row) for row in rows])]


def first_difference(db: sqlite3.Connection, other: sqlite3.Connection) -> str:
    """Name the first table, and the key in it, in which two books differ; "" where they are equal."""
    tables = ", ".join(f"'{table}'" for table in COLUMNS)  # an older version had one more
    schema = f"SELECT name, sql FROM sqlite_master WHERE tbl_name IN ({tables}) ORDER BY name"
    if db.execute(schema).fetchall() != other.execute(schema).fetchall():
        return "the tables themselves"
    for table in COLUMNS:
        for one, two in zip_longest(select(db, table), select(other, table)):
            if one != two:
                row = list(one if two is None else two)
                return f"{table}, {', '.join(map(str, key_of(table, row)))}"
    return ""


# ---- what the rows say -------------------------------------------------------------------------------------


def meta_rows(values: Mapping[str, str]) -> Change:
    """Return the change that sets values of the table `meta`."""
    return Change("meta", [[key, value] for key, value in values.items()])


def meta_value(db: sqlite3.Connection, key: str, default: str) -> str:
    """Read one value of the table `meta`."""
    found = db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    return str(found[0]) if found else default


RUNG = "rung "  # and the round: a key of the table `meta`


def rungs_of(db: sqlite3.Connection) -> Iterator[tuple[int, int, float, int]]:
    """Yield round, rung, need and members of the rounds that had several rungs to choose from."""
    for key, value in db.execute("SELECT key, value FROM meta WHERE key GLOB ?", (f"{RUNG}[0-9]*",)):
        rung, need, members = value.split()
        yield int(key.removeprefix(RUNG)), int(rung), float(need), int(members)


def count_rounds(db: sqlite3.Connection) -> int:
    """Count the committed rounds."""
    (found,) = db.execute("SELECT coalesce(max(round) + 1, 0) FROM rounds").fetchone()
    return int(found)


def packets_end(db: sqlite3.Connection) -> int:
    """Return the offset at which the committed packets end in their log, in bytes."""
    (end,) = db.execute("SELECT max(offset + length) FROM rounds").fetchone()
    return 0 if end is None else int(end) + HEADER_SIZE


def counted_ids(db: sqlite3.Connection) -> SampleRanges:
    """Return all samples that were counted. Raises LedgerError if one was counted twice."""
    pool = SamplePool()
    for lease, peer, ids in db.execute("SELECT lease, peer, ids FROM counted ORDER BY round, peer, lease"):
        try:
            pool.put(unpack_ranges(ids))
        except ValueError as error:
            raise LedgerError(f"a sample of {peer}, lease {lease}, was counted twice: {error}") from None
    return pool.ranges


def verify_rows(db: sqlite3.Connection) -> SampleRanges:
    """Check that each counted sample exists, was counted once, and is in the sum of a round, and that the
    rows which no chain covers can be read; return the counted samples. Raises LedgerError and MALFORMED."""
    ids, samples = counted_ids(db), int(meta_value(db, "samples", "0"))
    if ids and (ids[0][0] < 0 or ids[-1][1] > samples):
        raise LedgerError(f"samples {ids[0][0]}..{ids[-1][1]} counted, the run has 0..{samples}")
    (total,) = db.execute("SELECT coalesce(sum(counted), 0) FROM rounds").fetchone()
    if count_samples(ids) != total:
        raise LedgerError("the rounds and the leases disagree about how many samples were counted")
    int(meta_value(db, "term", "0"))
    for _ in rungs_of(db):
        pass
    for standing, strikes in db.execute("SELECT standing, strikes FROM peers"):
        if standing not in STANDINGS or not isinstance(strikes, int):
            raise ValueError(f"a peer's standing is {standing!r}, with {strikes!r} strikes")
    return ids


def void_leases(db: sqlite3.Connection) -> Change:
    """Return the change that drops leases of samples that are counted, leased otherwise, or do not exist."""
    pool, void = (
        SamplePool(minus((0, int(meta_value(db, "samples", "0"))), counted_ids(db))),
        list[list[Any]](),
    )
    for lease, session, ids in rows_of(db, "leased"):
        try:
            pool.remove(unpack_ranges(ids))
        except (ValueError, msgspec.MsgspecError):
            void.append([lease, session])
    return Change("leased", drop=void)


# ---- the chain ---------------------------------------------------------------------------------------------

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


def first_head_of(db: sqlite3.Connection) -> bytes:
    """Hash what the run in these books began with: the head of a chain without links."""
    meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    begins: dict[str, Any] = {"format": FORMAT, "run": meta["run"], "samples": int(meta["samples"])}
    begins["origin"] = json.loads(meta.get("origin", "{}"))
    return hashlib.sha256(json.dumps(begins, sort_keys=True).encode()).digest()


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


# ---- open to write -----------------------------------------------------------------------------------------

JOURNAL, DATABASE = "journal.log", "ledger.db"
CLOSED = DATABASE + ".sha256"  # of ledger.db as it was closed: gone while it is open, and after a kill
Changes = Sequence[Change]


class Books:
    """The journal and the tables, written together by the one process that may.

    Args:
        end: where the last record of the journal that counts ends; what lies behind is cut off.
        next: the number of the next record.
        mended: a sentence for each repair at the opening.
    """

    def __init__(
        self, folder: Path, db: sqlite3.Connection, end: int, next: int, mended: Sequence[str]
    ) -> None:
        self.folder, self.db, self.mended = folder, db, tuple(mended)
        self._journal: PacketLog | None = PacketLog(folder / JOURNAL, end)  # None: a write has failed
        self._next = next
        (folder / CLOSED).unlink(missing_ok=True)

    def write(self, changes: Iterable[Change], then: Callable[[], Changes] = tuple) -> None:
        """Make changes durable: all of them, or none.

        Args:
            then: called once the tables have them; returns further changes, or raises to have none at all.

        After an error of the disk nothing is written any more: only reopening tells whether they are there.
        """
        if self._journal is None:
            raise LedgerError("this ledger is not open to write (it was opened to read, or a write failed)")
        written = [one for one in changes if one.put or one.drop]
        self.db.execute("BEGIN IMMEDIATE")
        try:
            post(self.db, written)
            more = then()
            post(self.db, more)
        except BaseException:
            self._roll_back()
            raise
        try:
            self._journal.append(self._next, msgspec.msgpack.encode([*written, *more]))
            self._next += 1
            self.db.execute(f"PRAGMA user_version={self._next}")
            self.db.execute("COMMIT")
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """Write nothing any more."""
        if self._journal is not None:
            self._journal.close()
        self._journal = None
        self._roll_back()

    def _roll_back(self) -> None:
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")

    def close(self) -> None:
        """Close both; note the hash of ledger.db, unless a write has failed or others have it open."""
        if self._journal is None:
            self.db.close()
            return
        self._journal.close()
        self.db.close()
        path = self.folder / DATABASE
        if not path.with_name(DATABASE + "-wal").exists():
            with suppress(OSError):  # of a full disk: it is a proof more, which nothing needs
                (self.folder / CLOSED).write_text(sha256_of(path) + "\n", encoding="utf-8")
        self._journal = None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
