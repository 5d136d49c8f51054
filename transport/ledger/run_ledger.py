"""The ledger: every decision of a run, durable before it is announced. Rows for facts, a log for packets.

A round is committed when the journal has its row; that is written after the packet's bytes are on the disk.
So a row without bytes cannot exist. Bytes without a row (a crash in between) were never announced: they are
cut off at the next start, once they were copied. Counted leases are written with the round that counts
them.

    folder/journal.log   every change of the rows, in order: the truth (books.py)
    folder/ledger.db     the rows as SQLite tables: meta, rounds, leases (counted and open), sessions, peers,
                         evaluations, chain
    folder/packets.log   packet_log.py
    folder/estates/      residual_handoffs.py
    folder/ledger.lock   locked by the one process that writes
    folder/aside/<n>     damaged files, as they were before they were made anew

The chain makes the order of decisions checkable (books.py).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transport.protocol import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    SampleRanges,
    count_samples,
    pack_ranges,
    unpack_ranges,
)

from .book_opening import (
    BOTH,
    damaged,
    is_as_closed,
    is_full,
    new_tables,
    open_books,
    read_journal,
    read_tables,
    transaction,
)
from .books import (
    CLOSED,
    DATABASE,
    FORMAT,
    JOURNAL,
    MALFORMED,
    RUNG,
    Books,
    Change,
    Changes,
    Kind,
    count_rounds,
    counted_ids,
    first_difference,
    first_head_of,
    meta_rows,
    meta_value,
    newest_head,
    next_link,
    packets_end,
    post,
    rows_of,
    rungs_of,
    verify_chain,
    verify_rows,
)
from .packet_log import PACKETS, PacketLog, Record, count_records, read_packets, record_at

LOCK = "ledger.lock"
HASHERS = min(4, os.cpu_count() or 1)  # threads that read the packets of a resumed run
RECENT = 8  # rounds from which the members' speeds are estimated


@dataclass(frozen=True)
class Counted:
    """The samples of one lease, counted by one accepted packet."""

    lease: int  # the round that leased them
    peer: str
    session: str
    ids: SampleRanges
    key: str = ""  # public key of the peer


@dataclass(frozen=True)
class RoundRow:
    """One committed round. The caller of `commit` sets the fields up to `tokens`, the ledger the rest."""

    round: int
    step: int  # step the round was opened for
    opened: float  # wall clock
    committed: float  # wall clock
    fingerprint: int  # of the global model before this round; 0: no peer has reported it yet
    members: tuple[str, ...]
    accepted: tuple[str, ...]
    loss: float | None
    tokens: int
    counted: int = 0  # samples this round counted
    offset: int = 0  # of the packet's record in the log
    length: int = 0  # bytes of the packet
    sha256: bytes = b""  # of the packet

    @property
    def record(self) -> Record:
        return Record(self.round, self.offset, self.length, self.sha256)


@dataclass(frozen=True)
class RungRow:
    """The rung of a committed round, and what the next one follows from (transport/scheduling/leases.py)."""

    round: int
    rung: int
    need: float
    members: int

    def note(self) -> dict[str, str]:
        """Return the note of it that `commit` takes."""
        return {f"{RUNG}{self.round}": f"{self.rung} {self.need!r} {self.members}"}


@dataclass(frozen=True)
class EvaluationRow:
    round: int
    step: int
    loss: float
    tokens: int  # terms of the loss
    final: bool
    figures: tuple[float, ...] = ()  # means of the objective's further figures; column `rewards`


@dataclass(frozen=True)
class OpenSession:
    """A session that was alive when the hub stopped, and its leases."""

    session: str
    name: str
    hardware: str
    key: str  # of its peer
    leases: dict[int, SampleRanges] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownPeer:
    """The standing of a key in the run (admission.Standing)."""

    key: str
    name: str  # last name of the peer
    standing: str  # "member", "banned"; a "stranger" is not stored
    reason: str = ""
    strikes: int = 0  # packets of it that could not be used


@dataclass(frozen=True)
class Recovered:
    """The state of a run in its ledger, from which a hub starts."""

    round: int = 0  # the next round
    counted: SampleRanges = ()
    sessions: tuple[OpenSession, ...] = ()
    peers: tuple[KnownPeer, ...] = ()
    last: RoundRow | None = None
    evaluation: EvaluationRow | None = None  # the newest
    recent: tuple[RoundRow, ...] = ()  # the last rounds, in order
    term: int = 0  # number of times the ledger was opened to write
    rungs: tuple[RungRow, ...] = ()  # of the rounds, where they had several to choose from
    losses: tuple[tuple[int, float], ...] = ()  # (step, loss) of the rounds that trained
    held_out: tuple[tuple[int, float], ...] = ()  # of the evaluations


@dataclass(frozen=True)
class LedgerFacts:
    """Results of Ledger.verify."""

    rounds: int
    packet_bytes: int
    counted: int  # samples, each exactly once
    missing: int  # samples not counted (yet)
    head: str  # newest head of the chain, hex
    lacking: int  # changes in the journal that the tables lack: one where a hub goes on


class Ledger:
    """One run's ledger. One writer; any number of readers beside it, also in other processes.

    `Ledger(folder, run=..., samples=...)` opens it to write, or begins it; with `samples=None` it is not
    begun. `Ledger(folder, write=False)` opens it to read. `wal=False` writes without SQLite's write-ahead
    log, which needs memory shared by all who have the ledger open, and so works on no network file system.
    `origin` names what a new run begins with (hashes of recipe, base and data, public keys) and is under
    every head. The writer may be used from several threads in turn, not at once (the hub has one thread for
    it).

    Opened to write, what is damaged is mended where that can be done: `mended` has a sentence for each
    repair.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str = "",
        samples: int | None = 0,
        write: bool = True,
        wal: bool = True,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.writes, self.wal = Path(folder), write, wal
        self.path, self.log_path = self.folder / DATABASE, self.folder / PACKETS
        self.mended: list[str] = []
        path = self.path
        self._lock: sqlite3.Connection | None = None
        self._log: PacketLog | None = None
        self._books: Books | None = None
        if write:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_exclusively(self.folder / LOCK)
        elif not path.exists():
            raise LedgerError(f"no ledger in {folder}: {DATABASE} is gone")
        try:
            if write:
                self._books = open_books(self.folder, first_rows(run, samples, origin), self._fit, wal)
                self._db, self.mended = self._books.db, list(self._books.mended)
            else:
                closed = (self.folder / CLOSED).exists()
                self._db = read_tables(self.folder, killed=not closed and not is_locked(self.folder))
            self._open(run, samples)
        except sqlite3.OperationalError as error:
            self.close()
            if is_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder)) from None
            raise LedgerError(f"{path} cannot be opened: {error}") from None
        except MALFORMED as error:
            self.close()
            raise LedgerError(f"{path} is not a ledger: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, run: str, samples: int | None) -> None:
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise LedgerError(f"ledger of format {meta.get('format')!r}, expected {FORMAT!r}")
        self.run, self.samples = meta["run"], int(meta["samples"])
        samples = self.samples if samples is None else samples
        if self.writes and (run, samples) != (self.run, self.samples):
            raise LedgerError(
                f"the ledger in {self.folder} is of run {self.run!r} with {self.samples} samples, "
                f"not of {run!r} with {samples}"
            )
        self.origin: dict[str, str] = json.loads(meta.get("origin", "{}"))
        self.term = int(meta.get("term", 0)) + self.writes
        if self.writes:
            self._write(meta_rows({"term": str(self.term)}))
            self._log = PacketLog(self.log_path, packets_end(self._db))

    def _fit(self, db: sqlite3.Connection) -> None:
        """Raise LedgerDamaged unless the packet log has the packets of these rows, and no more than a kill
        can leave."""
        rows = packet_records(db)
        check_packet_log(self.log_path, rows)
        check_nothing_follows(self.log_path, rows)

    def _write(self, *changes: Change, links: Iterable[tuple[Kind, int]] = ()) -> None:
        """Make changes durable in one transaction, with the links of the chain that cover them."""
        if self._books is None:
            raise LedgerError("this ledger is not open to write (it was opened to read, or a write failed)")

        def then() -> list[Change]:
            found = list[Change]()
            for kind, round in links:
                found.append(Change("chain", [next_link(self._db, kind, round)]))
                post(self._db, found[-1:])
            return found

        self._books.write(changes, then)

    # ---- the chain -----------------------------------------------------------------------------------------

    def head(self, rounds: int | None = None) -> str:
        """Return the head after so many rounds (None: the newest), hex; "" where it has not so many."""
        if rounds is None:
            return newest_head(self._db).hex()
        if rounds == 0:
            return first_head_of(self._db).hex()
        query = f"SELECT lower(hex(head)) FROM chain WHERE kind='round' AND round={rounds - 1}"
        found = self._db.execute(query).fetchone()
        return str(found[0]) if found else ""

    def close(self) -> None:
        for part in (self._log, self._books, getattr(self, "_db", None), self._lock):
            if part is not None:
                part.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- written by the hub --------------------------------------------------------------------------------

    def stand(self, known: KnownPeer) -> None:
        """Store the standing of a key; a stranger is deleted."""
        change = Change("peers", [list(astuple(known))])
        self._write(Change("peers", drop=[[known.key]]) if known.standing == "stranger" else change)

    def gone(self, session: str) -> None:
        """Delete a session that is over, with its undelivered leases."""
        leases = self._db.execute("SELECT lease FROM leased WHERE session=?", (session,)).fetchall()
        void = [[lease, session] for (lease,) in leases]
        self._write(Change("sessions", drop=[[session]]), Change("leased", drop=void))

    def given_back(self, session: str, round: int) -> None:
        self._write(Change("leased", drop=[[round, session]]))

    def leased(
        self,
        round: int,
        leases: dict[str, SampleRanges],
        sessions: Sequence[OpenSession] = (),
    ) -> None:
        """Note a round that opened: who (by session) holds which samples, and how it differs from others.

        Args:
            sessions: those that are new here, in the same record.
        """
        new = [[one.session, one.name, one.hardware, one.key] for one in sessions]
        rows = [[round, session, pack_ranges(ids)] for session, ids in leases.items()]
        begun = [Change("sessions", new)] if new else []
        self._write(*begun, Change("leased", rows))

    def commit(
        self,
        row: RoundRow,
        packet: bytes,
        counted: tuple[Counted, ...],
        notes: Mapping[str, str] | None = None,
        fingerprints: Mapping[int, int] | None = None,
    ) -> RoundRow:
        """Make a round durable, with notes as `note` has them, and the fingerprints of
        earlier rounds that were not known when those were committed: round -> fingerprint.

        After LedgerError the round is not committed. After any other error (a full disk) only reopening the
        ledger can tell, and nothing more is written before that.
        """
        if self._log is None or self._books is None:
            raise LedgerError("this ledger is not open to write (it was opened to read, or a write failed)")
        if row.round != (next_round := self.next_round):
            raise LedgerError(f"round {row.round} cannot follow round {next_round - 1}")
        known = dict(fingerprints or {})
        row = replace(row, fingerprint=row.fingerprint or known.get(row.round, 0))
        try:
            at = self._log.append(row.round, packet)
            samples = sum(count_samples(c.ids) for c in counted)
            row = replace(row, counted=samples, offset=at.offset, length=at.length, sha256=at.sha256)
            earlier = [  # whose fingerprints are known by now
                [*old[:4], str(fingerprint), *old[5:]]
                for number, fingerprint in known.items()
                for old in rows_of(self._db, "rounds", f"round={number} AND fingerprint='0'")
            ]
            self._write(
                Change("rounds", [list(columns_of(row)), *earlier]),
                Change(
                    "counted",
                    [[c.lease, c.peer, c.session, row.round, pack_ranges(c.ids), c.key] for c in counted],
                ),
                Change("leased", drop=[[c.lease, c.session] for c in counted]),
                *([meta_rows(notes)] if notes else []),
                links=[
                    *(("fingerprint", r) for r in sorted({row.round, *known} if row.fingerprint else known)),
                    ("round", row.round),
                ],
            )
        except BaseException:
            log, self._log = self._log, None
            log.close()
            self._books.fail()
            raise
        return row

    def evaluated(self, row: EvaluationRow) -> None:
        values = [*astuple(row)[:5], json.dumps(row.figures)]
        self._write(Change("evaluations", [values]), links=[("evaluation", row.round)])

    def proven(self, round: int, fingerprint: int) -> None:
        """Note the fingerprint that a replay has told of a committed round; what was said of it gives way."""
        found = self._db.execute("SELECT * FROM rounds WHERE round=?", (round,)).fetchone()
        if found is not None and (row := row_of(found)).fingerprint != fingerprint:
            corrected = list(columns_of(replace(row, fingerprint=fingerprint)))
            self._write(Change("rounds", [corrected]), links=[("fingerprint", round)])

    def note(self, name: str, text: str) -> None:
        """Store what an extension has to know of the run after a restart."""
        self._write(meta_rows({name: text}))

    # ---- read by any process -------------------------------------------------------------------------------

    def rounds(self, start: int = 0) -> list[RoundRow]:
        """Return the committed rounds from `start` on."""
        rows = self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (start,))
        return [row_of(columns) for columns in rows]

    def rungs(self) -> list[RungRow]:
        """Return the rungs of the committed rounds, in order, with what the next ones follow from."""
        return sorted((RungRow(*one) for one in rungs_of(self._db)), key=lambda row: row.round)

    def evaluations(self) -> list[EvaluationRow]:
        rows = self._db.execute("SELECT * FROM evaluations ORDER BY round")
        return [
            EvaluationRow(round, step, loss, tokens, bool(final), tuple(json.loads(figures)))
            for round, step, loss, tokens, final, figures in rows
        ]

    def counted(self, start: int = 0, stop: int = 2**62) -> list[Counted]:
        """Return the leases that the rounds start .. stop-1 have counted."""
        rows = self._db.execute(
            "SELECT lease, peer, session, ids FROM counted WHERE round >= ? AND round < ? "
            "ORDER BY round, peer, lease",
            (start, stop),
        )
        return [Counted(lease, peer, session, unpack_ranges(ids)) for lease, peer, session, ids in rows]

    def contributions(self, rounds: int = 2**62) -> dict[str, tuple[int, int]]:
        """Return key of a peer -> (its samples, rounds that counted them) in the first so many rounds."""
        samples, seen = Counter[str](), defaultdict[str, set[int]](set)
        query = "SELECT key, round, ids FROM counted WHERE round < ?"
        for key, round, ids in self._db.execute(query, (rounds,)):
            samples[key] += count_samples(unpack_ranges(ids))
            seen[key].add(round)
        return {key: (samples[key], len(seen[key])) for key in samples}

    def noted(self, name: str) -> str:
        """Return the note of this name; empty: there is none."""
        return meta_value(self._db, name, "")

    @property
    def changes(self) -> int:
        """Count the rows that were written since it was opened."""
        return self._db.total_changes

    @property
    def next_round(self) -> int:
        """Count the committed rounds."""
        return count_rounds(self._db)

    def record(self, round: int) -> Record | None:
        """Locate the packet of a round in the log; None if the round is not committed."""
        columns = self._db.execute("SELECT * FROM rounds WHERE round=?", (round,)).fetchone()
        return None if columns is None else row_of(columns).record

    def packets(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (round, packet) of the committed rounds start .. stop-1, one packet in memory at a time."""
        count = count_rounds(self._db)
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise LedgerError(f"packets {start}-{stop} asked for, the ledger has 0-{count}")
        first = self.record(start)
        if start == stop or first is None:
            return
        with open(self.log_path, "rb") as file:
            file.seek(first.offset)
            reader = read_packets(file)
            for want in range(start, stop):
                try:
                    round, packet = next(reader)
                except (LedgerError, StopIteration) as error:
                    raise LedgerError(f"{self.log_path}: {error or 'it ends'}") from None
                if round != want:
                    raise LedgerError(f"{self.log_path} has round {round} where {want} belongs")
                yield round, packet

    def recover(self) -> Recovered:
        rounds = self.rounds()
        evaluations = self.evaluations()
        sessions = []
        for session, name, hardware, key in self._db.execute(
            "SELECT session, name, hardware, key FROM sessions"
        ):
            rows = self._db.execute("SELECT lease, ids FROM leased WHERE session=?", (session,))
            leases = {r: unpack_ranges(ids) for r, ids in rows}
            sessions.append(OpenSession(session, name, hardware, key, leases))
        return Recovered(
            round=len(rounds),
            counted=counted_ids(self._db),
            sessions=tuple(sessions),
            peers=tuple(KnownPeer(*row) for row in self._db.execute("SELECT * FROM peers ORDER BY key")),
            last=rounds[-1] if rounds else None,
            evaluation=evaluations[-1] if evaluations else None,
            recent=tuple(rounds[-RECENT:]),
            term=self.term,
            rungs=tuple(self.rungs()),
            losses=tuple((row.step, row.loss) for row in rounds if row.loss is not None),
            held_out=tuple((one.step, one.loss) for one in evaluations),
        )

    def verify(self, *, complete: bool = False) -> LedgerFacts:
        """Read every packet and every counted lease again. Raises LedgerError if a law is broken.

        Laws: rounds follow each other, checksums hold, no sample was counted twice and every counted one
        exists, every head of the chain follows from the one before it; with `complete` every sample was
        counted.
        """
        with self._one_state():
            return self._verify(complete)

    @contextmanager
    def _one_state(self) -> Iterator[None]:
        """Let the block see one state of the ledger, also while a hub goes on writing. Raises LedgerDamaged
        where it meets malformed rows."""
        self._db.execute("BEGIN")
        try:
            yield
        except MALFORMED as error:
            raise damaged(self.path, str(error)) from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _verify(self, complete: bool) -> LedgerFacts:
        for (found,) in self._db.execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        rows = self.rounds()
        try:
            head = verify_chain(self._db)
            ids = verify_rows(self._db)
        except LedgerError as error:
            raise damaged(self.path, str(error)) from None
        lacking = self._compare_journal()
        self._fit(self._db)
        for row, (round, packet) in zip(rows, self.packets(), strict=True):
            if round != row.round or hashlib.sha256(packet).digest() != row.sha256:
                raise LedgerError(f"the packet of round {row.round} is not the one that was committed")
        many, total = count_samples(ids), sum(row.length for row in rows)
        facts = LedgerFacts(len(rows), total, many, self.samples - many, head, lacking)
        if complete and facts.missing:
            raise LedgerError(f"{facts.missing} of {self.samples} samples were never counted")
        return facts

    def _compare_journal(self) -> int:
        """Compare the tables with what follows from the journal; return how many changes of it they lack.
        Raises LedgerError where they differ."""
        number, journal = int(self._db.execute("PRAGMA user_version").fetchone()[0]), self.folder / JOURNAL
        with closing(new_tables()) as tables:
            with transaction(tables):
                reading = read_journal(
                    journal, lambda n, changes: post(tables, changes if n < number else ())
                )
            if reading.fault:
                raise damaged(journal, reading.fault)
            if reading.next < number:
                raise damaged(journal, f"it ends before record {number - 1}, which {DATABASE} has")
            if place := first_difference(self._db, tables):
                raise damaged(self.path, f"it has other rows than {JOURNAL} ({place})")
        if not is_as_closed(self.folder):
            raise damaged(self.path, f"it is not what {CLOSED} says, or that is")
        return reading.next - number

    def check_rows(self) -> int:
        """Compare the tables with the journal; return how many of its changes they lack. Raises
        LedgerError."""
        with self._one_state():
            return self._compare_journal()

    def check_packets(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read every committed packet and compare its hash. Raises LedgerDamaged, which names the round.

        Args:
            progress: called with the bytes that were read, and all there are.
        """
        rows, end = packet_records(self._db), packets_end(self._db)
        with ThreadPoolExecutor(HASHERS, "cocktail-hashes") as pool:
            for record, whole in zip(rows, pool.map(self._is_whole, rows), strict=True):
                if not whole:
                    pool.shutdown(wait=False, cancel_futures=True)
                    why = f"the packet of round {record.round} is another one than was committed"
                    raise damaged(self.log_path, f"{why}; before it are {record.round} whole rounds")
                progress(record.end, end)

    def _is_whole(self, record: Record) -> bool:
        with self.log_path.open("rb") as file:
            return record.is_whole(file)


def first_rows(run: str, samples: int | None, origin: Mapping[str, str] | None) -> Changes | None:
    """Return the rows that a new ledger begins with; None where it is not to be begun."""
    if samples is None:
        return None
    values = {"format": FORMAT, "run": run, "samples": str(samples)}
    return [meta_rows(values | {"origin": json.dumps(dict(origin or {}), sort_keys=True)})]


def packet_records(db: sqlite3.Connection) -> list[Record]:
    """List where the committed packets are in their log."""
    rows = db.execute("SELECT round, offset, length, sha256 FROM rounds ORDER BY round")
    return [Record(*row) for row in rows]


def check_packet_log(path: Path, rows: Sequence[Record]) -> None:
    """Raise LedgerDamaged unless the log has records where these are. Payloads are not read."""
    end, size = 0, path.stat().st_size if path.exists() else 0
    with path.open("rb") if size else nullcontext() as file:
        for number, row in enumerate(rows):
            if row.round != number or row.offset != end:
                raise LedgerError(f"round {row.round} does not follow the one before it")
            whole = f"before that are {number} whole rounds"
            if file is None or row.end > size:
                lost = f"{rows[-1].end} were committed: it was cut or replaced"
                raise damaged(path, f"it has {size} bytes, but {lost}; {whole}")
            if record_at(file, row.offset) != row:
                raise damaged(path, f"round {number} does not begin at byte {row.offset}; {whole}")
            end = row.end


def check_nothing_follows(path: Path, rows: Sequence[Record]) -> None:
    """Raise LedgerDamaged where the log has more than these records, and the one behind them that a process
    leaves which is killed before it commits: the books have lost rounds."""
    if not path.exists():
        return
    with path.open("rb") as file:
        more = record_at(file, rows[-1].end if rows else 0)
    if more is None or more.end >= path.stat().st_size:
        return
    why = f"it has {len(rows)} rounds, and so has {JOURNAL}, but {PACKETS} has those of {count_records(path)}"
    raise damaged(path.with_name(DATABASE), why, BOTH)


def columns_of(row: RoundRow) -> tuple[Any, ...]:
    """Return the columns in the table's order. SQLite has no unsigned 64 bits: the fingerprint is text."""
    columns = [getattr(row, f.name) for f in fields(row)]
    columns[4:7] = str(row.fingerprint), json.dumps(row.members), json.dumps(row.accepted)
    return tuple(columns)


def row_of(columns: tuple[Any, ...]) -> RoundRow:
    """Invert columns_of."""
    fingerprint, members, accepted = columns[4:7]
    names = tuple(json.loads(members)), tuple(json.loads(accepted))
    return RoundRow(*(*columns[:4], int(fingerprint), *names, *columns[7:]))


def is_locked(folder: Path) -> bool:
    """Tell whether a process writes the ledger in this folder."""
    lock = folder / LOCK
    try:
        if lock.exists():
            lock_exclusively(lock).close()
    except LedgerBusy:
        return True
    return False


def lock_exclusively(path: Path, patience: float = 0.0) -> sqlite3.Connection:
    """Take a lock that ends with the process, on every system Python runs on: SQLite's own. Another process
    that has it is waited for up to `patience` seconds."""
    lock = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=patience)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        raise LedgerBusy(f"another process writes the ledger in {path.parent} ({error})") from None
    except sqlite3.DatabaseError as error:
        lock.close()
        raise LedgerDamaged(
            f"{path} is damaged: {error}", (f"remove it: there is nothing in {path}",)
        ) from None
    return lock
