"""Copies of a ledger, for the standby of a hub: what a copy lacks, as bytes, and the copy that takes it.

Links of the chain number what was decided, so `changes_after(folder, link)` needs no memory of its readers.
It has the rows of every later link, and all of the small tables (leases, sessions, standings). A copy takes
the packets and updates of the new rounds first, then the rows in one transaction, and recomputes the chain
with them: what it holds is the hub's history, or it is refused. The copy opens as any ledger does.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from transport.ledger import (
    DATABASE,
    LOCK,
    MALFORMED,
    PACKETS,
    UPDATES,
    Change,
    PacketLog,
    Rows,
    check_packet_log,
    count_rounds,
    entry_of,
    first_head_of,
    key_of,
    linked,
    lock_exclusively,
    meta_rows,
    meta_value,
    open_books,
    pack_header,
    packet_records,
    packets_end,
    read_headers,
    read_packets,
    retired,
    rows_of,
    scan_rounds,
)
from transport.protocol import LedgerError

MOST_LINKS = 512  # of one message
MOST_BYTES = 8 << 20  # of its rounds' packets and rows; the updates are as many times more as peers
ROW = 200  # bytes of a lease that was counted, about
COPIED_AT_ONCE = 1 << 20  # bytes
VOTING_ROUNDS = 8  # a round that closed with the updates of few must not make these few the majority
TAKEN_OVER = 1 << 20  # added to the term; a hub that is only started again adds 1
SMALL = ("meta", "leased", "sessions", "peers")  # tables that are copied whole
OF_KIND = {  # kind of a link -> the tables with its rows
    "round": ("rounds", "counted"),
    "fingerprint": ("rounds",),
    "evaluation": ("evaluations",),
}
Row = Annotated[list[Any], msgspec.Meta(max_length=16)]
CopiedRows = Annotated[list[Row], msgspec.Meta(max_length=1 << 18)]


class LedgerChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of a ledger that came after link `since` of its chain. Where more rows follow, `small` has what
    the run begins with alone: the other tables are those of the newest row."""

    since: int
    grown: dict[str, CopiedRows]
    small: dict[str, CopiedRows]
    superseded: list[int] = []  # links here whose rows are those of a link that follows later

    @property
    def newest(self) -> bool:
        """True where nothing follows."""
        return len(self.small) == len(SMALL)

    @property
    def link(self) -> int:
        """Return the newest link."""
        return int(self.grown["chain"][-1][0]) if self.grown["chain"] else self.since

    @property
    def rounds(self) -> list[int]:
        """Return the rounds that were committed, in order."""
        return [int(row[2]) for row in self.grown["chain"] if row[1] == "round"]


def open_tables(folder: Path) -> closing[sqlite3.Connection]:
    """Open the tables of a ledger to read; any process may."""
    return closing(sqlite3.connect(folder / DATABASE, isolation_level=None, timeout=10))


def changes_after(folder: Path, since: int, most: int = MOST_LINKS) -> bytes:
    """Read what a copy that has link `since` lacks, as one state of the ledger."""
    with open_tables(folder) as db:
        db.execute("BEGIN")
        chain = rows_of(db, "chain", f"link > {since} AND link <= {since + most}")
        fits = within(db, chain)
        newest, chain = len(chain) < most and fits == len(chain), chain[:fits]
        ends = [at for at, row in enumerate(chain, 1) if row[1] != "fingerprint"]
        if not newest and ends:  # else links of one transaction, which a round ends
            chain = chain[: ends[-1]]
        grown = {"chain": chain}
        for table in ("rounds", "counted", "evaluations"):
            rounds = sorted({row[2] for row in chain if table in OF_KIND[row[1]]})
            grown[table] = rows_of(db, table, f"round IN ({','.join(map(str, rounds))})")
        small = {table: rows_of(db, table) for table in (SMALL if newest else ("meta",))}
        after = "SELECT kind, round FROM chain WHERE link > ?"
        later = set() if newest else set(db.execute(after, (chain[-1][0],)))
        superseded = [row[0] for row in chain if (row[1], row[2]) in later]
        return msgspec.msgpack.encode(LedgerChanges(since, grown, small, superseded))


def within(db: sqlite3.Connection, chain: Rows) -> int:
    """Count the links, from the first on, whose packets and rows fit into one message; with one round at
    least."""
    rounds = [int(row[2]) for row in chain if row[1] == "round"] or [0]
    there = "WHERE round BETWEEN ? AND ?", (min(rounds), max(rounds))
    of_rounds = "SELECT round, length + length(members) + length(accepted) FROM rounds "
    lengths = dict(db.execute(of_rounds + there[0], there[1]))
    for round, count in db.execute(
        f"SELECT round, count(*) FROM counted {there[0]} GROUP BY round", there[1]
    ):
        lengths[round] += ROW * count
    total = 0
    for at, (_, kind, round, *_) in enumerate(chain):
        total += lengths[round] if kind == "round" else 0
        if total > MOST_BYTES:
            return at + int(total == lengths[round])
    return len(chain)


def parts_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Read `size` bytes of a file, a part at a time; fewer where it ends."""
    while size and (part := file.read(min(size, COPIED_AT_ONCE))):
        yield part
        size -= len(part)


def updates_between(folder: Path, start: int, stop: int) -> bytes:
    """Read the records of rounds start .. stop-1 from the update log, or from the one before it.

    Raises KeyError where they are not there: they were cleared, and are in the saved error feedback.
    """
    found: dict[int, bytes] = {}
    for path in (retired(folder / UPDATES), folder / UPDATES):
        with suppress(FileNotFoundError):
            found |= records_between(path, start, stop)
    if lacking := [round for round in range(start, stop) if round not in found]:
        raise KeyError(f"the updates of round {lacking[0]} are not logged any more")
    return b"".join(found[round] for round in range(start, stop))


def records_between(path: Path, start: int, stop: int) -> dict[int, bytes]:
    """Read whole records by round; torn ones are left out."""
    found = dict[int, bytes]()
    with path.open("rb") as file:
        for record in read_headers(file):
            if start <= record.round < stop:
                payload = file.read(record.length)
                found[record.round] = pack_header(record.round, payload) + payload
    return found


def change_to(db: sqlite3.Connection, table: str, rows: Rows) -> Change:
    """Return the change after which a table has these rows and no others."""
    wanted = {tuple(key_of(table, row)): row for row in rows}
    there = {tuple(key_of(table, row)): row for row in rows_of(db, table)}
    put = [row for key, row in wanted.items() if there.get(key) != row]
    return Change(table, put, [list(key) for key in there.keys() - wanted.keys()])


def voters_of(db: sqlite3.Connection) -> frozenset[str]:
    """Return the keys of the peers that may elect a standby.

    They are the members of the newest round that counted samples, if one of the last VOTING_ROUNDS counted
    theirs.
    """
    (newest,) = db.execute("SELECT max(round) FROM counted").fetchone()
    if newest is None:
        return frozenset()
    (members,) = db.execute("SELECT members FROM rounds WHERE round=?", (newest,)).fetchone()
    here, recent = set(json.loads(members)), (newest - VOTING_ROUNDS,)
    rows = db.execute("SELECT DISTINCT key, peer FROM counted WHERE round > ?", recent)
    return frozenset(key for key, peer in rows if peer in here)


class LedgerCopy:
    """The ledger in a standby's folder. One writer, who holds its lock; it becomes a hub's by `take_over`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_exclusively(folder / LOCK)
        try:
            # Packets behind those of the rows have come, and their rows did not: the hub has both.
            self._books = open_books(
                folder, [], lambda db: check_packet_log(folder / PACKETS, packet_records(db))
            )
            self._db = self._books.db
            newest = "SELECT link, head FROM chain ORDER BY link DESC LIMIT 1"
            found: tuple[int, bytes] | None = self._db.execute(newest).fetchone()
            self.link, self.head = found or (0, b"")
            self._packets = PacketLog(folder / PACKETS, packets_end(self._db))
            self._open_updates()
        except MALFORMED as error:
            raise LedgerError(f"{folder / 'ledger.db'} is not the copy of a ledger: {error}") from None

    def _open_updates(self) -> None:
        """Open the update log, cut where its rounds or its bytes end."""
        path, rounds = self.folder / UPDATES, self.rounds
        end, last = scan_rounds(path, rounds)
        self._updates = PacketLog(path, end)
        self.next_update = rounds if last is None else last + 1

    @property
    def rounds(self) -> int:
        """Return the number of committed rounds."""
        return count_rounds(self._db)

    @property
    def term(self) -> int:
        return int(meta_value(self._db, "term", "0"))

    @property
    def voters(self) -> frozenset[str]:
        return voters_of(self._db)

    @property
    def updates_size(self) -> int:
        """Return the bytes of the update log."""
        return self._updates.end

    # ---- following -----------------------------------------------------------------------------------------

    def apply(
        self,
        changes: bytes,
        packets: BinaryIO,
        updates: Sequence[BinaryIO],
        longest: Callable[[int], int] | None = None,
    ) -> None:
        """Take what came after this copy: durable when it returns.

        Args:
            packets: records of the packet log, of the rounds that `changes` has.
            updates: records of the update log; those that are here already are skipped.
            longest: round -> the most bytes of its packet, of which one at a time is in memory.

        Raises LedgerError where it does not follow from what is here; nothing has changed then.
        """
        try:
            new = msgspec.msgpack.decode(changes, type=LedgerChanges)
            if new.since != self.link:
                raise LedgerError(f"changes after link {new.since}, this copy is at {self.link}")
            self._take_packets(new, packets, longest)
            for records in updates:
                self._take_updates(records)
            self._write(new)
        except MALFORMED as error:
            raise LedgerError(f"the hub's changes of its ledger cannot be read: {error}") from None

    def _take_packets(
        self, new: LedgerChanges, packets: BinaryIO, longest: Callable[[int], int] | None
    ) -> None:
        known = {row[0]: bytes(row[12]) for row in new.grown["rounds"]}
        came, next_round = [record.round for record in read_headers(packets)], self.rounds
        if came != new.rounds or new.rounds != list(range(next_round, next_round + len(came))):
            raise LedgerError(f"packets of rounds {came} came, {new.rounds} were committed")
        if (end := packets_end(self._db)) != self._packets.end:
            self._packets.cut(end)  # packets whose rows did not follow
        packets.seek(0)
        for round, packet in read_packets(packets, longest):
            if self._packets.append(round, packet).sha256 != known[round]:
                raise LedgerError(f"the packet of round {round} is not the one that was committed")

    def _take_updates(self, updates: BinaryIO) -> None:
        """Copy records, a part at a time: those of many peers are long."""
        for record in read_headers(updates):
            if record.round < self.next_update:
                continue
            if record.round != self.next_update:
                said = f"updates of round {record.round} cannot follow those of {self.next_update - 1}"
                raise LedgerError(said)
            self._updates.begin(parts_of(updates, record.length))
            if self._updates.begun != record.sha256:
                raise LedgerError(f"the updates of round {record.round} are torn or damaged")
            self._updates.seal(record.round)
            self.next_update = record.round + 1

    def _write(self, new: LedgerChanges) -> None:
        changes = [Change(table, new.grown[table]) for table in ("rounds", "counted", "evaluations", "chain")]
        changes += [change_to(self._db, table, new.small[table]) for table in SMALL if table in new.small]
        found = list[tuple[int, bytes]]()

        def then() -> list[Change]:
            found.append(self._verify(new))
            return []

        self._books.write(changes, then)
        self.link, self.head = found[0]

    def _verify(self, new: LedgerChanges) -> tuple[int, bytes]:
        """Recompute the new links from their rows. Raises LedgerError, which names the first that differs."""
        link, head = self.link, self.head or first_head_of(self._db)
        newest = {(kind, round): number for number, kind, round, *_ in new.grown["chain"]}
        for number, kind, round, entry, said in new.grown["chain"]:
            head, link = linked(head, entry), link + 1
            stands = newest[kind, round] == number and number not in new.superseded
            false = stands and entry_of(self._db, kind, round) != entry
            if number != link or said != head or false:
                raise LedgerError(f"the hub's chain breaks at {kind} {round}")
        return link, head if new.grown["chain"] else self.head

    def cut_updates(self, start: int) -> None:
        """Drop the updates of rounds before `start`, which the error feedback on the disk has."""
        kept = records_between(self.folder / UPDATES, start, self.next_update)
        self._updates.close()
        part = self.folder / (UPDATES + ".part")
        with part.open("wb") as file:
            file.write(b"".join(kept[round] for round in sorted(kept)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / UPDATES)
        self._open_updates()
        if not kept:
            self.next_update = start

    # ---- taking over ---------------------------------------------------------------------------------------

    def take_over(self, key: str = "", *notes: str) -> int:
        """Raise the term above any that the hub can reach by itself, durably; return it.

        Args:
            key: the standby's own, whose session is over.
            notes: of the ledger, which are void.
        """
        term = self.term + TAKEN_OVER
        ours = [row[:1] for row in rows_of(self._db, "sessions") if row[3] == key]
        self._books.write(
            [
                Change("meta", drop=[[name] for name in notes]),
                meta_rows({"term": str(term)}),
                Change("sessions", drop=ours),
            ]
        )
        return term

    def close(self) -> None:
        for part in (self._packets, self._updates, self._books, self._lock):
            part.close()

    def __enter__(self) -> LedgerCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
