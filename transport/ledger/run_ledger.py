"""The ledger: every decision of a run, durable before it is announced. SQLite for facts, a log for packets.

A round is committed when its row is in `rounds`; the row is written after the packet's bytes are on the disk.
So a row without bytes cannot exist. Bytes without a row (a crash in between) were never announced, and are
cut off at the next start. Counted leases are written in the transaction of the round that counts them.

    folder/ledger.db     meta, rounds, leases (counted and open), sessions, peers, evaluations, chain
    folder/packets.log   packet_log.py
    folder/estates/      residual_handoffs.py
    folder/ledger.lock   locked by the one process that writes

The chain makes the order of decisions checkable. Each committed round and each evaluation is a link:
head <- sha256(head, sha256(its rows)), and the first head is a hash of what the run began with. Who knows
a head knows that nothing before it was changed since. It is written in the transaction of its rows.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from transport.protocol import (
    LedgerBusy,
    LedgerError,
    SamplePool,
    SampleRanges,
    count_samples,
    pack_ranges,
    unpack_ranges,
)

from .packet_log import HEADER_SIZE, PacketLog, Record, read_packets
from .residual_handoffs import TABLE, Deliveries, HandoffStore, PendingHandoff

FORMAT = "1"
RECENT = 8  # rounds from which the members' speeds are estimated
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
Kind = Literal["round", "fingerprint", "evaluation"]  # of a link of the chain
VOTING_ROUNDS = 8  # a round that closed with the updates of few must not make these few the majority
ENTRIES: dict[Kind, tuple[str, ...]] = {  # the rows that a link covers
    "round": (
        "SELECT round, step, opened, committed, members, accepted, loss, tokens, counted, offset, length, "
        "hex(sha256) FROM rounds WHERE round=?",
        "SELECT lease, peer, session, round, hex(ids), key FROM counted "
        "WHERE round=? ORDER BY lease, session",
    ),
    "fingerprint": ("SELECT round, fingerprint FROM rounds WHERE round=?",),  # known later, where stale
    "evaluation": ("SELECT round, step, loss, tokens, final, rewards FROM evaluations WHERE round=?",),
}


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
class EvaluationRow:
    round: int
    step: int
    loss: float
    tokens: int  # terms of the loss
    final: bool
    rewards: tuple[float, ...] = ()  # means over preference pairs (events.EvaluationDone)


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
    handoffs: dict[int, PendingHandoff] = field(default_factory=dict)
    term: int = 0  # number of times the ledger was opened to write
    local_steps: int = 0  # of the newest round that was opened; 0: of a ledger that does not say so
    aggregators: int = 0  # peers that aggregated shards in it
    standby: str = ""  # the run's standby (messages.Standby, as JSON); "": none
    losses: tuple[tuple[int, float], ...] = ()  # (step, loss) of the rounds that trained
    held_out: tuple[tuple[int, float], ...] = ()  # of the evaluations


@dataclass(frozen=True)
class Audit:
    """Results of Ledger.verify."""

    rounds: int
    packet_bytes: int
    counted: int  # samples, each exactly once
    missing: int  # samples not counted (yet)
    head: str = ""  # newest head of the chain, hex; empty: the ledger is of a version without one


class Ledger:
    """One run's ledger. One writer; any number of readers beside it, also in other processes.

    `Ledger(folder, run=..., samples=...)` opens it to write, or begins it; `Ledger(folder, write=False)` to
    read. `wal=False` writes without SQLite's write-ahead log, which needs memory shared by all who have the
    ledger open, and so works on no network file system. `origin` names what a new run begins with (hashes of
    recipe, base and data, public keys) and is under every head. The writer may be used from several threads
    in turn, not at once (the hub has one thread for it).
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str = "",
        samples: int = 0,
        write: bool = True,
        wal: bool = True,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.writes, self.wal = Path(folder), write, wal
        self.log_path = self.folder / "packets.log"
        path = self.folder / "ledger.db"
        self._lock: sqlite3.Connection | None = None
        self._log: PacketLog | None = None
        if write:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_exclusively(self.folder / "ledger.lock")
        elif not path.exists():
            raise LedgerError(f"no ledger in {self.folder}")
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
            self.handoffs = HandoffStore(self._db, self.folder)
            self._open(run, samples, origin or {})
        except sqlite3.OperationalError as error:
            self.close()
            if "disk is full" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder)) from None
            raise LedgerError(f"{path} cannot be opened: {error}") from None
        except MALFORMED as error:
            self.close()
            raise LedgerError(f"{path} is not a ledger: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, run: str, samples: int, origin: Mapping[str, str]) -> None:
        if self.writes:
            self._db.execute(f"PRAGMA journal_mode={'WAL' if self.wal else 'DELETE'}")
            self._db.execute("PRAGMA synchronous=FULL")  # a commit is on the disk when it returns
            self._begin(run, samples, origin)
            self._db.execute(TABLE)
        else:
            self._db.execute("PRAGMA query_only=1")
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise LedgerError(f"ledger of format {meta.get('format')!r}, expected {FORMAT!r}")
        self.run, self.samples = meta["run"], int(meta["samples"])
        if self.writes and (run, samples) != (self.run, self.samples):
            raise LedgerError(
                f"the ledger in {self.folder} is of run {self.run!r} with {self.samples} samples, "
                f"not of {run!r} with {samples}"
            )
        self.origin: dict[str, str] = json.loads(meta.get("origin", "{}"))
        if self.writes:
            self._chain_older()
        self.term = int(meta.get("term", 0)) + self.writes
        if self.writes:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('term', ?)", (str(self.term),))
            self._log = PacketLog(self.log_path, packets_end(self._db))

    def _begin(self, run: str, samples: int, origin: Mapping[str, str]) -> None:
        """Write the tables of a new ledger, all of them or none."""
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
            self._extend()
            return
        rows = [("format", FORMAT), ("run", run), ("samples", str(samples))]
        rows.append(("origin", json.dumps(dict(origin), sort_keys=True)))
        self._db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            self._db.execute(statement)
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def _extend(self) -> None:
        """Extend a ledger of a time before peers had keys: its sessions cannot be resumed."""
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS peers "
            "(key TEXT PRIMARY KEY, name TEXT, standing TEXT, reason TEXT) WITHOUT ROWID"
        )
        self._add("sessions", "key TEXT DEFAULT ''")
        self._add("peers", "strikes INTEGER DEFAULT 0")
        self._add("evaluations", "rewards TEXT DEFAULT '[]'")
        self._add("counted", "key TEXT DEFAULT ''")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS chain "
            "(link INTEGER PRIMARY KEY, kind TEXT, round INTEGER, entry BLOB, head BLOB)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS counted_by_round ON counted (round)")

    def _add(self, table: str, column: str) -> None:
        """Add a column that older ledgers lack."""
        if column.split()[0] not in [row[1] for row in self._db.execute(f"PRAGMA table_info({table})")]:
            self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")

    # ---- the chain -----------------------------------------------------------------------------------------

    def head(self, rounds: int | None = None) -> str:
        """Return the head after so many rounds (None: the newest), hex; "" where it has none."""
        if not self._has_chain():
            return ""
        if rounds == 0:
            return self._first_head().hex()
        query = "SELECT lower(hex(head)) FROM chain ORDER BY link DESC LIMIT 1"
        if rounds is not None:
            query = f"SELECT lower(hex(head)) FROM chain WHERE kind='round' AND round={rounds - 1}"
        found = self._db.execute(query).fetchone()
        return str(found[0]) if found else self._first_head().hex() if rounds is None else ""

    def _has_chain(self) -> bool:
        return bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name='chain'").fetchone())

    def _first_head(self) -> bytes:
        return first_head(self.run, self.samples, self.origin)

    def _link(self, kind: Kind, round: int) -> None:
        """Append a link, within the transaction that writes its rows."""
        entry = entry_of(self._db, kind, round)
        head = linked(bytes.fromhex(self.head()), entry)
        values = (kind, round, entry, head)
        self._db.execute("INSERT INTO chain (kind, round, entry, head) VALUES (?, ?, ?, ?)", values)

    def _chain_older(self) -> None:
        """Chain what a version without a chain has written."""
        if self._db.execute("SELECT 1 FROM chain").fetchone():
            return
        self._db.execute("BEGIN IMMEDIATE")
        for row in self.rounds():
            if row.fingerprint:
                self._link("fingerprint", row.round)
            self._link("round", row.round)
        for one in self.evaluations():
            self._link("evaluation", one.round)
        self._db.execute("COMMIT")

    def _verify_chain(self, rounds: list[RoundRow]) -> str:
        """Recompute every head from the rows. Raises LedgerError, which names the round."""
        if not self._has_chain():
            return ""
        query = "SELECT kind, round, hex(entry), lower(hex(head)) FROM chain ORDER BY link"
        head, newest = self._first_head(), dict[tuple[Kind, int], str]()
        for kind, round, entry, stored in self._db.execute(query).fetchall():
            head = linked(head, bytes.fromhex(entry))
            if head.hex() != stored:
                raise LedgerError(
                    f"the chain breaks at {kind} {round}: its head is {stored}, expected {head.hex()}"
                )
            newest[kind, round] = entry.lower()  # an evaluation that was repeated has two links
        rows: list[tuple[Kind, int]] = [("round", row.round) for row in rounds]
        rows += [("fingerprint", row.round) for row in rounds if row.fingerprint]
        rows += [("evaluation", row.round) for row in self.evaluations()]
        for kind, round in dict.fromkeys([*rows, *newest]):
            if newest.get((kind, round)) != entry_of(self._db, kind, round).hex():
                raise LedgerError(f"the rows of {kind} {round} are not those that the chain covers")
        return head.hex()

    def close(self) -> None:
        for part in (self._log, getattr(self, "_db", None), self._lock):
            if part is not None:
                part.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- written by the hub --------------------------------------------------------------------------------

    def session(self, session: str, name: str, hardware: str, key: str) -> None:
        row = (session, name, hardware, key)
        self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)

    def stand(self, known: KnownPeer) -> None:
        """Store the standing of a key; a stranger is deleted."""
        if known.standing == "stranger":
            self._db.execute("DELETE FROM peers WHERE key=?", (known.key,))
        else:
            self._db.execute("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?)", astuple(known))

    def gone(self, session: str) -> None:
        """Delete a session that is over, with its undelivered leases."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DELETE FROM sessions WHERE session=?", (session,))
        self._db.execute("DELETE FROM leased WHERE session=?", (session,))
        self._db.execute("COMMIT")

    def given_back(self, session: str, round: int) -> None:
        self._db.execute("DELETE FROM leased WHERE session=? AND lease=?", (session, round))

    def leased(
        self, round: int, leases: dict[str, SampleRanges], local_steps: int = 1, aggregators: int = 0
    ) -> None:
        """Note a round that opened: who (by session) holds which samples, and how it differs from others."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT OR REPLACE INTO leased VALUES (?, ?, ?)",
            [(round, session, pack_ranges(ids)) for session, ids in leases.items()],
        )
        of_round = ("local_steps", str(local_steps)), ("aggregators", str(aggregators))
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", of_round)
        self._db.execute("COMMIT")

    def commit(
        self,
        row: RoundRow,
        packet: bytes,
        counted: tuple[Counted, ...],
        given: Deliveries | None = None,
        fingerprints: Mapping[int, int] | None = None,
    ) -> RoundRow:
        """Make a round durable, with the handoffs merged in it: number -> shards, and the fingerprints of
        earlier rounds that were not known when those were committed: round -> fingerprint.

        After LedgerError the round is not committed. After any other error (a full disk) only reopening the
        ledger can tell, and nothing more is written before that.
        """
        if self._log is None:
            raise LedgerError("this ledger is not open to write (it was opened to read, or a write failed)")
        if row.round != (next_round := self.next_round):
            raise LedgerError(f"round {row.round} cannot follow round {next_round - 1}")
        try:
            at = self._log.append(row.round, packet)
            samples = sum(count_samples(c.ids) for c in counted)
            row = replace(row, counted=samples, offset=at.offset, length=at.length, sha256=at.sha256)
            self._write(row, counted, given or {}, fingerprints or {})
        except BaseException:
            log, self._log = self._log, None
            log.close()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if given:
            self.handoffs.delete_merged()
        return row

    def _write(
        self,
        row: RoundRow,
        counted: tuple[Counted, ...],
        given: Deliveries,
        fingerprints: Mapping[int, int],
    ) -> None:
        """Write a round, the leases it counts, the handoffs merged with it, and fingerprints of earlier
        rounds in one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", columns_of(row))
        self._db.executemany(
            "INSERT INTO counted (lease, peer, session, round, ids, key) VALUES (?, ?, ?, ?, ?, ?)",
            [(c.lease, c.peer, c.session, row.round, pack_ranges(c.ids), c.key) for c in counted],
        )
        self._db.executemany(
            "DELETE FROM leased WHERE lease=? AND session=?", [(c.lease, c.session) for c in counted]
        )
        self._db.executemany(
            "UPDATE rounds SET fingerprint=? WHERE round=? AND fingerprint='0'",
            [(str(fingerprint), round) for round, fingerprint in fingerprints.items()],
        )
        self.handoffs.mark_merged(given)
        for round in sorted({row.round, *fingerprints} if row.fingerprint else fingerprints):
            self._link("fingerprint", round)
        self._link("round", row.round)
        self._db.execute("COMMIT")

    def evaluated(self, row: EvaluationRow) -> None:
        values = (*astuple(row)[:5], json.dumps(row.rewards))
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?)", values)
        self._link("evaluation", row.round)
        self._db.execute("COMMIT")

    def proven(self, round: int, fingerprint: int) -> None:
        """Note the fingerprint that a replay has told of a committed round; what was said of it gives way."""
        self._db.execute("BEGIN IMMEDIATE")
        changed = self._db.execute(
            "UPDATE rounds SET fingerprint=? WHERE round=? AND fingerprint<>?",
            (str(fingerprint), round, str(fingerprint)),
        )
        if changed.rowcount:
            self._link("fingerprint", round)
        self._db.execute("COMMIT")

    def record_standby(self, standby: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('standby', ?)", (standby,))

    # ---- read by any process -------------------------------------------------------------------------------

    def rounds(self, start: int = 0) -> list[RoundRow]:
        """Return the committed rounds from `start` on."""
        rows = self._db.execute("SELECT * FROM rounds WHERE round >= ? ORDER BY round", (start,))
        return [row_of(columns) for columns in rows]

    def evaluations(self) -> list[EvaluationRow]:
        rows = self._db.execute("SELECT * FROM evaluations ORDER BY round")
        return [  # a ledger of an older version has no rewards
            EvaluationRow(r, s, loss, tokens, bool(final), tuple(json.loads(more[0])) if more else ())
            for r, s, loss, tokens, final, *more in rows
        ]

    def counted(self, start: int = 0, stop: int = 2**62) -> list[Counted]:
        """Return the leases that the rounds start .. stop-1 have counted."""
        rows = self._db.execute(
            "SELECT lease, peer, session, ids FROM counted WHERE round >= ? AND round < ? "
            "ORDER BY round, peer, lease",
            (start, stop),
        )
        return [Counted(lease, peer, session, unpack_ranges(ids)) for lease, peer, session, ids in rows]

    @property
    def voters(self) -> frozenset[str]:
        """Return the keys of the peers that may elect a standby."""
        return voters_of(self._db)

    def contributions(self, rounds: int = 2**62) -> dict[str, tuple[int, int]]:
        """Return key of a peer -> (its samples, rounds that counted them) in the first so many rounds."""
        samples, seen = Counter[str](), defaultdict[str, set[int]](set)
        query = "SELECT key, round, ids FROM counted WHERE round < ?"
        for key, round, ids in self._db.execute(query, (rounds,)):
            samples[key] += count_samples(unpack_ranges(ids))
            seen[key].add(round)
        return {key: (samples[key], len(seen[key])) for key in samples}

    @property
    def standby(self) -> str:
        """The run's standby (messages.Standby, as JSON); "": none."""
        return meta_value(self._db, "standby", "")

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

    def accepted(self, round: int) -> tuple[str, ...] | None:
        """Return the names of the peers whose updates a round has; None if it is not committed."""
        rows = self._db.execute("SELECT * FROM rounds WHERE round=?", (round,)).fetchall()
        return row_of(rows[0]).accepted if rows else None

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
                round, packet = next(reader)
                if round != want:
                    raise LedgerError(f"the log has round {round} where {want} belongs")
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
            counted=union(self.counted()),
            sessions=tuple(sessions),
            peers=tuple(KnownPeer(*row) for row in self._db.execute("SELECT * FROM peers ORDER BY key")),
            last=rounds[-1] if rounds else None,
            evaluation=evaluations[-1] if evaluations else None,
            recent=tuple(rounds[-RECENT:]),
            handoffs=self.handoffs.rows(),
            term=self.term,
            local_steps=int(meta_value(self._db, "local_steps", "0")),
            aggregators=int(meta_value(self._db, "aggregators", "0")),
            standby=self.standby,
            losses=tuple((row.step, row.loss) for row in rounds if row.loss is not None),
            held_out=tuple((one.step, one.loss) for one in evaluations),
        )

    def verify(self, *, complete: bool = False) -> Audit:
        """Read every packet and every counted lease again. Raises LedgerError if a law is broken.

        Laws: rounds follow each other, checksums hold, no sample was counted twice and every counted one
        exists, every head of the chain follows from the one before it; with `complete` every sample was
        counted.
        """
        self._db.execute("BEGIN")  # one state of the ledger, also while a hub goes on writing
        try:
            return self._verify(complete)
        except MALFORMED as error:
            raise LedgerError(f"{self.folder / 'ledger.db'} is damaged: {error}") from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _verify(self, complete: bool) -> Audit:
        for (found,) in self._db.execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        rows, end = self.rounds(), 0
        head = self._verify_chain(rows)
        for row, (round, packet) in zip(rows, self.packets(), strict=True):
            if round != row.round or row.offset != end:
                raise LedgerError(f"round {row.round} does not follow the one before it")
            if hashlib.sha256(packet).digest() != row.sha256:
                raise LedgerError(f"the packet of round {row.round} is not the one that was committed")
            end = row.record.end
        ids = union(self.counted())
        if ids and (ids[0][0] < 0 or ids[-1][1] > self.samples):
            raise LedgerError(f"samples {ids[0][0]}..{ids[-1][1]} counted, the run has 0..{self.samples}")
        if count_samples(ids) != sum(row.counted for row in rows):
            raise LedgerError("the rounds and the leases disagree about how many samples were counted")
        total = sum(row.length for row in rows)
        audit = Audit(len(rows), total, count_samples(ids), self.samples - count_samples(ids), head)
        if complete and audit.missing:
            raise LedgerError(f"{audit.missing} of {self.samples} samples were never counted")
        return audit


def first_head(run: str, samples: int, origin: Mapping[str, str]) -> bytes:
    """Hash what a run begins with: the head of a chain without links."""
    begins = {"format": FORMAT, "run": run, "samples": samples, "origin": origin}
    return hashlib.sha256(json.dumps(begins, sort_keys=True).encode()).digest()


def entry_of(db: sqlite3.Connection, kind: Kind, round: int) -> bytes:
    """Hash the rows that a link covers, as they are in the tables now."""
    rows = [db.execute(query, (round,)).fetchall() for query in ENTRIES[kind]]
    return hashlib.sha256(json.dumps([kind, rows]).encode()).digest()


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


def linked(head: bytes, entry: bytes) -> bytes:
    """Return the head after one more link."""
    return hashlib.sha256(head + entry).digest()


def union(counted: list[Counted]) -> SampleRanges:
    """Return all counted ids. Raises LedgerError if one was counted twice."""
    pool = SamplePool()
    for lease in counted:
        try:
            pool.put(lease.ids)
        except ValueError as error:
            raise LedgerError(
                f"a sample of {lease.peer}, lease {lease.lease}, was counted twice: {error}"
            ) from None
    return pool.ranges


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


def meta_value(db: sqlite3.Connection, key: str, default: str) -> str:
    """Read one value of the table `meta`."""
    found = db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    return str(found[0]) if found else default


def count_rounds(db: sqlite3.Connection) -> int:
    """Count the committed rounds."""
    (found,) = db.execute("SELECT coalesce(max(round) + 1, 0) FROM rounds").fetchone()
    return int(found)


def packets_end(db: sqlite3.Connection) -> int:
    """Return the offset at which the committed packets end in their log, in bytes."""
    (end,) = db.execute("SELECT max(offset + length) FROM rounds").fetchone()
    return 0 if end is None else int(end) + HEADER_SIZE


def merge_wal(folder: Path) -> None:
    """Merge SQLite's write-ahead log into ledger.db, so that reading does not change that file any more.

    Raises LedgerError where a reader is in the way for five seconds.
    """
    with closing(sqlite3.connect(folder / "ledger.db", timeout=5.0)) as db:
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise LedgerError(f"another program reads {folder / 'ledger.db'}")


def lock_exclusively(path: Path) -> sqlite3.Connection:
    """Take a lock that ends with the process, on every system Python runs on: SQLite's own."""
    lock = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        raise LedgerBusy(f"another process writes the ledger in {path.parent} ({error})") from None
    return lock
