"""The opening of a run's books: the journal is read, and the tables that follow from it are compared with
those in ledger.db.

SQLite's `user_version` is the number of the journal's record that its tables lack first. A process that was
killed leaves one at most: it is carried out. Whatever else differs is damage. The one that is whole and has
more makes the other anew, and `Books.mended` says so; what is replaced is moved to aside/<n> before. Where
neither is whole nothing is changed, and LedgerError says what is left.

The journal has every change in the order in which they were made, as records of packet_log.py, with the
number of the record in place of a round. A payload is msgpack: the changes of one transaction. A journal that
was made anew begins with the number that it was made at.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from transport.protocol import LedgerDamaged, LedgerError

from .books import (
    CLOSED,
    DATABASE,
    JOURNAL,
    MALFORMED,
    Books,
    Change,
    Changes,
    create_tables,
    dump,
    first_difference,
    meta_value,
    post,
    rows_of,
    sha256_of,
    verify_chain,
    verify_rows,
    void_leases,
)
from .packet_log import MAGIC, PACKETS, WINDOW, Record, count_records, pack_header, record_at

ASIDE = "aside"
BESIDE = ("-wal", "-shm", "-journal")  # SQLite's files beside a database
BOTH = f"{DATABASE} and {JOURNAL}"
UNCHANGED = "nothing was changed here"
UNDAMAGED = ("locked", "unable to open", "readonly")  # SQLite's words where the file itself is fine


@dataclass
class JournalReading:
    """The content of a journal: whole records, up to the first that is torn or damaged."""

    path: Path
    first: int = 0  # the number of the first record
    begins: array[int] = field(default_factory=lambda: array("Q"))  # byte at which each record begins
    end: int = 0  # byte at which they end
    fault: str = ""  # what lies behind them, where that is no torn append
    later: list[tuple[int, list[Change]]] = field(default_factory=list)  # whole records behind the fault

    @property
    def next(self) -> int:
        """Return the number that would follow."""
        return self.first + len(self.begins)

    def changes_from(self, number: int) -> Iterator[list[Change]]:
        """Read the changes of this record and the later ones again."""
        place = max(0, number - self.first)
        if place < len(self.begins):
            with self.path.open("rb") as file:
                for record, changes in records_in(file, self.begins[place]):
                    if record.offset >= self.end:
                        return
                    yield changes


def read_journal(path: Path, take: Callable[[int, Changes], object]) -> JournalReading:
    """Read a journal; `take` the number and the changes of each record. Raises LedgerError where a record
    is of another version."""
    found = JournalReading(path)
    if not path.exists():
        return found
    with path.open("rb") as file:
        for record, changes in records_in(file):
            if not found.begins:
                found.first = record.round
            elif record.round != found.next:
                break
            take(record.round, changes)
            found.begins.append(record.offset)
            found.end = record.end
        found.later = [(record.round, changes) for record, changes in records_behind(file, found.end)]
    if found.later:
        found.fault = f"has no record {found.next} at byte {found.end}, and later ones behind it"
    return found


def changes_left(path: Path, number: int) -> list[Changes]:
    """Return the changes of the whole records from this number on; of those before only the header is
    read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        at = 0
        while (record := record_at(file, at)) is not None and record.round < number:
            at = record.end
        return [changes for _, changes in records_in(file, at)]


def records_in(file: BinaryIO, at: int = 0) -> Iterator[tuple[Record, list[Change]]]:
    """Yield whole records from byte `at` on, up to the first that is torn or damaged."""
    while (found := changes_at(file, at)) is not None:
        yield found
        at = found[0].end


def changes_at(file: BinaryIO, at: int) -> tuple[Record, list[Change]] | None:
    """Read the record at byte `at`; None where there is no whole one. Raises LedgerError where it is of a
    newer version."""
    end, record = file.seek(0, os.SEEK_END), record_at(file, at)
    if record is None or record.end > end:
        return None
    payload = file.read(record.length)
    if hashlib.sha256(payload).digest() != record.sha256:
        return None
    try:
        return record, msgspec.msgpack.decode(payload, type=list[Change])
    except msgspec.MsgspecError as error:
        raise of_another_version(error) from None


def of_another_version(error: Exception) -> LedgerError:
    """Make the error of a whole record that cannot be carried out."""
    return LedgerError(f"{JOURNAL} was written by another version of cocktail: {error}")


def records_behind(file: BinaryIO, at: int) -> Iterator[tuple[Record, list[Change]]]:
    """Yield the whole records that begin at byte `at` or behind it, wherever they do."""
    end = file.seek(0, os.SEEK_END)
    while at < end:
        file.seek(at)
        window = file.read(WINDOW)
        begins = window.find(MAGIC)
        if begins < 0:
            at += max(1, len(window) - len(MAGIC) + 1)
        elif (found := changes_at(file, at + begins)) is None:
            at += begins + 1
        else:
            yield found
            at = found[0].end


def write_journal(path: Path, number: int, records: Iterable[Changes]) -> int:
    """Write a journal whose first record has this number, and wait until it is on the disk; return the number
    that follows."""
    with path.open("wb") as file:
        for changes in records:
            payload = msgspec.msgpack.encode(changes)
            file.write(pack_header(number, payload) + payload)
            number += 1
        file.flush()
        os.fsync(file.fileno())
    return number


def is_as_closed(folder: Path) -> bool:
    """Tell whether ledger.db is what it was when it was closed; True where that is not known."""
    wal, closed = folder / (DATABASE + "-wal"), folder / CLOSED
    if not closed.exists() or (wal.exists() and wal.stat().st_size):
        return True
    return closed.read_bytes() == f"{sha256_of(folder / DATABASE)}\n".encode()


@dataclass(frozen=True)
class NoTables:
    """A ledger.db that cannot be used."""

    fault: str
    written: bool = True  # False: nothing was ever written there


@dataclass
class StoredTables:
    """The tables in ledger.db, as they were found."""

    db: sqlite3.Connection
    number: int  # of the first record that they lack

    def verified(self) -> str:
        """Return "" where their chain holds, or else why they cannot be believed."""
        try:
            if not rows_of(self.db, "meta") and not count_links(self.db):
                return ""  # a copy that has not followed yet
            verify_chain(self.db)
            verify_rows(self.db)
        except (*MALFORMED, LedgerError) as error:
            return f"is not readable: {error}"
        return ""


Check = Callable[[sqlite3.Connection], object]


def open_books(folder: Path, first: Changes | None, check: Check, wal: bool = True) -> Books:
    """Open the books in a folder whose lock the caller holds, and mend them where that can be done.

    Args:
        first: the changes that new books begin with; None: there must be books.
        check: raises LedgerError where tables do not fit the logs beside them. Nothing is changed before.
        wal: False on a network file system, where SQLite's write-ahead log does not work.

    Raises LedgerDamaged where the books cannot be mended, LedgerError, OSError.
    """
    with closing(new_tables()) as replica:
        try:
            with transaction(replica):
                reading = read_journal(folder / JOURNAL, lambda _, changes: post(replica, changes))
        except MALFORMED as error:
            raise of_another_version(error) from None
        return Opening(folder, reading, replica, check, wal).books(first)


class Opening:
    """One opening of the books in a folder.

    Args:
        replica: the tables that follow from the journal.
    """

    def __init__(
        self, folder: Path, journal: JournalReading, replica: sqlite3.Connection, check: Check, wal: bool
    ) -> None:
        self.folder, self.journal, self.replica, self.check, self.wal = folder, journal, replica, check, wal
        self.path, self.packets = folder / DATABASE, folder / PACKETS
        self.mended: list[str] = []

    def books(self, first: Changes | None) -> Books:
        """Open the books by the journal, by the tables, or by both."""
        if not self.journal.begins or self.journal.fault:
            return self._by_a_copy(first)
        stored = open_tables(self.path, self.wal)
        if isinstance(stored, NoTables):
            return self._by_journal(stored.fault)
        try:
            if self._is_ahead(stored):
                return self._by_tables(stored, "lacked what ledger.db has")
            fault = self._roll_forward(stored)
        except BaseException:
            stored.db.close()
            raise
        if fault:
            stored.db.close()
            return self._by_journal(fault)
        return Books(self.folder, stored.db, self.journal.end, self.journal.next, self.mended)

    def _by_a_copy(self, first: Changes | None) -> Books:
        """Open the books without a whole journal, of which the tables must be the proof. They are looked at
        in a copy: SQLite would clear a write-ahead log that it cannot read."""
        lost = self.journal.fault or "is gone or empty"
        with copied(self.path) as path:
            stored = open_tables(path, self.wal)
            if isinstance(stored, NoTables):
                if stored.written or self.journal.fault:
                    raise self._damaged(lost, stored.fault)
                return self._begin(first)
            with closing(stored.db):
                try:
                    fault = self._carried_on(stored)
                except MALFORMED as error:
                    fault = f"is not readable: {error}"
                if fault := fault or stored.verified():
                    raise self._damaged(lost, fault)
                return self._by_tables(stored, lost)

    # ---- the four ways -------------------------------------------------------------------------------------

    def _begin(self, first: Changes | None) -> Books:
        """Begin new books."""
        if first is None:
            raise damaged(self.path, f"it is gone or empty, and so is {JOURNAL}", BOTH)
        if self.packets.exists() and self.packets.stat().st_size:
            raise self._damaged("is gone or empty", "is gone or empty")
        with transaction(self.replica):
            post(self.replica, first)
        self._write_anew(self.replica, 0, [first])
        return self._reopened(None)

    def _by_journal(self, fault: str) -> Books:
        """Make the tables anew, which are not what the journal says."""
        self.check(self.replica)
        if meta_value(self.replica, "term", ""):  # else the process that began the ledger was killed
            kept = set_aside(self.folder, DATABASE, *(DATABASE + end for end in BESIDE))
            self._tell(f"{DATABASE} {fault}: it was made anew from {JOURNAL}", kept)
        self._write_anew(self.replica, self.journal.next)
        return self._reopened(self.journal.end)

    def _by_tables(self, stored: StoredTables, lost: str) -> Books:
        """Make the journal anew, which lacks what the tables have. `lost`: why it is not whole."""
        self.check(stored.db)
        with closing(new_tables()) as tables:
            with transaction(tables):
                for changes in dump(stored.db):
                    post(tables, changes)
                if (void := void_leases(tables)).drop:
                    post(tables, [void])
                    many = f"{len(void.drop)} leases"
                    self._tell(f"{many} had samples that are counted or do not exist: dropped", None)
            stored.db.close()
            kept = set_aside(self.folder, JOURNAL, DATABASE, *(DATABASE + end for end in BESIDE))
            self._tell(f"{JOURNAL} {lost}: it was made anew from {DATABASE}, whose chain holds", kept)
            self._write_anew(tables, max(stored.number, self.journal.next), dump(tables))
        return self._reopened(None)

    def _roll_forward(self, stored: StoredTables) -> str:
        """Carry out the newest changes, which the tables lack. Returns why the tables are wrong, or ""."""
        db, behind = stored.db, self.journal.next - stored.number
        try:
            with transaction(db) as undo:
                for changes in self.journal.changes_from(stored.number):
                    post(db, changes)
                if place := first_difference(db, self.replica):
                    undo()
                    return f"has other rows than {JOURNAL} ({place})"
                self.check(db)
                db.execute(f"PRAGMA user_version={self.journal.next}")
        except MALFORMED as error:
            if is_full(error):
                raise
            return f"is not readable: {error}"
        if behind > 1:  # a process that was killed leaves one
            many = f"the newest {behind} changes"
            self._tell(f"{DATABASE} lacked {many}: they were carried out from {JOURNAL}", None)
        return ""

    # ---- parts of them -------------------------------------------------------------------------------------

    def _is_ahead(self, stored: StoredTables) -> bool:
        """Tell whether the tables say that they have what the journal has not, and can be believed."""
        try:
            more = count_links(stored.db) > count_links(self.replica)
        except MALFORMED:
            return False
        return (more or stored.number > self.journal.next) and not stored.verified()

    def _carried_on(self, stored: StoredTables) -> str:
        """Carry out the records behind the journal's fault that the tables lack; return why not, or ""."""
        for number, changes in self.journal.later:
            if number > stored.number:
                return f"lacks record {stored.number} of {JOURNAL}, which is damaged"
            if number == stored.number:
                with transaction(stored.db):
                    post(stored.db, changes)
                stored.number += 1
        return ""

    def _write_anew(
        self, tables: sqlite3.Connection, number: int, records: Iterable[Changes] | None = None
    ) -> None:
        """Write ledger.db from these tables, and the journal with these records, if any, the first of which
        has this number. Killed at any instant, there is a journal from which the next process can go on."""
        database, journal = self.path.with_name(DATABASE + ".part"), self.folder / (JOURNAL + ".part")
        database.unlink(missing_ok=True)
        if records is not None:
            number = write_journal(journal, number, records)
        with closing(connect(database)) as new:
            tables.backup(new)
            new.execute(f"PRAGMA user_version={number}")
        if records is not None:
            os.replace(journal, self.folder / JOURNAL)
        for end in BESIDE:
            self.path.with_name(DATABASE + end).unlink(missing_ok=True)
        os.replace(database, self.path)

    def _reopened(self, end: int | None) -> Books:
        """Open what was written anew. `end`: of the journal's last record; None: that of its file."""
        stored = open_tables(self.path, self.wal)
        if isinstance(stored, NoTables):
            raise damaged(self.path, f"it {stored.fault}, and was written just now")
        end = (self.folder / JOURNAL).stat().st_size if end is None else end
        return Books(self.folder, stored.db, end, stored.number, self.mended)

    def _tell(self, what: str, kept: Path | None) -> None:
        kept_there = f"; what was there is in {kept}" if kept else ""
        self.mended.append(f"{self.folder}: {what}{kept_there}")

    def _damaged(self, journal: str, tables: str) -> LedgerDamaged:
        """Make the error of books that cannot be mended."""
        said = [f"it {tables}", f"{JOURNAL} {journal}"]
        said.append(f"{PACKETS} has {count_records(self.packets)} whole rounds")
        return damaged(self.path, "; ".join(said), BOTH)


def damaged(path: Path, why: str, lost: str = "") -> LedgerDamaged:
    """Make the error of a file that cannot be mended from what is left. `lost`: the names of the files that
    would have to be there, if it is not that one."""
    hint = f"put {lost or path.name} back from a copy: a backup, or what another machine has"
    return LedgerDamaged(f"{path} is damaged: {why}", (hint, UNCHANGED))


def open_tables(path: Path, wal: bool) -> StoredTables | NoTables:
    """Open ledger.db and look whether SQLite can read it. Raises LedgerError where another program is in the
    way, OSError where the disk is full."""
    if not path.exists():
        return NoTables("is gone", written=False)
    if not path.stat().st_size:
        return NoTables("is empty", written=False)
    db = connect(path)
    try:
        db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'DELETE'}")
        # What SQLite loses when the power fails is in the journal.
        db.execute(f"PRAGMA synchronous={'NORMAL' if wal else 'OFF'}")
        for (found,) in db.execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        (number,) = db.execute("PRAGMA user_version").fetchone()
        there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes damaged names as they are
        db.close()
        if is_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        if any(words in str(error) for words in UNDAMAGED):
            raise LedgerError(f"{path} cannot be opened: {error}") from None
        return NoTables(f"is not readable: {' '.join(str(error).split())}")
    except BaseException:
        db.close()
        raise
    if "meta" not in there:
        db.close()
        return NoTables("has no tables", written=False)
    return StoredTables(db, number)


def read_tables(folder: Path, killed: bool) -> sqlite3.Connection:
    """Open the tables to read them. Where the process that wrote them was `killed`, the change that it may
    have left in the journal alone is carried out, in a copy that vanishes when it is closed."""
    db = connect(folder / DATABASE)
    try:
        (number,) = db.execute("PRAGMA user_version").fetchone()
        if killed and len(left := changes_left(folder / JOURNAL, number)) == 1:
            copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            with closing(db):
                db.backup(copy)
            db = copy
            post(db, left[0])
            db.execute(f"PRAGMA user_version={number + 1}")
        db.execute("PRAGMA query_only=1")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """Copy a database with SQLite's files beside it, for as long as the block lasts."""
    place = path.with_name(path.name + ".copy")
    shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
    place.mkdir()
    try:
        for one in (path, *(path.with_name(path.name + end) for end in BESIDE)):
            if one.exists():
                shutil.copyfile(one, place / one.name)
        yield place / path.name
    finally:
        shutil.rmtree(place, ignore_errors=True)


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)


def new_tables() -> sqlite3.Connection:
    """Make empty tables that vanish when they are closed: on the disk where they are large."""
    db = sqlite3.connect("", isolation_level=None)
    create_tables(db)
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[Callable[[], None]]:
    """Commit at the end of the block; roll back after an error, or where the block has called what it is
    given."""
    undone: list[bool] = []
    db.execute("BEGIN IMMEDIATE")
    try:
        yield lambda: undone.append(True)
    except BaseException:
        undone.append(True)
        raise
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK" if undone else "COMMIT")


def set_aside(folder: Path, *names: str) -> Path | None:
    """Copy files to aside/<n>, and return that folder; None where there are none."""
    there = [name for name in names if (folder / name).exists()]
    if not there:
        return None
    aside = next(place for n in count(1) if not (place := folder / ASIDE / str(n)).exists())
    aside.mkdir(parents=True)
    for name in there:
        shutil.copyfile(folder / name, aside / name)
    return aside


def is_full(error: BaseException) -> bool:
    """Tell whether SQLite means that the disk is full."""
    return "disk is full" in str(error)


def count_links(db: sqlite3.Connection) -> int:
    (found,) = db.execute("SELECT coalesce(max(link), 0) FROM chain").fetchone()
    return int(found)
