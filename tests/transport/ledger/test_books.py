"""Damaged books: every committed round is there again, or the ledger is refused, and no byte is lost."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_run_ledger import ORIGIN, chained, commit

from transport.ledger import (
    HEADER_SIZE,
    Counted,
    EvaluationRow,
    KnownPeer,
    Ledger,
    OpenSession,
    RoundRow,
    lock_exclusively,
)
from transport.ledger.book_opening import new_tables, read_journal, transaction
from transport.ledger.books import COLUMNS, Change, post
from transport.protocol import LedgerDamaged, LedgerError, SampleRanges

ROUNDS, SAMPLES = 9, 40
BOOKS, LOGS = ("ledger.db", "journal.log"), ("journal.log", "packets.log")


def write(folder: Path) -> Ledger:
    return Ledger(folder, run="toy", samples=SAMPLES, origin=ORIGIN)


def round_of(ledger: Ledger, number: int) -> None:
    """Open, lease and commit one round, as a hub does."""
    ids: SampleRanges = ((2 * number, 2 * number + 2),)
    ledger.leased(number, {"s-ann": ids, "s-bob": ((30, 31),)})
    counted = (Counted(number, "ann", "s-ann", ids, "key-of-ann"),)
    row = RoundRow(number, number, 1.0, 2.0, 7 + number, ("ann", "bob"), ("ann",), 3.5, 10)
    ledger.commit(row, b"packet %d " % number * (3 + number), counted)
    ledger.given_back("s-bob", number)


def lived(folder: Path) -> Ledger:
    """A ledger with some of everything."""
    ledger = write(folder)
    for name in ("ann", "bob"):
        ledger.leased(0, {}, sessions=[OpenSession(f"s-{name}", name, "GPU", f"key-of-{name}")])
    ledger.stand(KnownPeer("key-of-eve", "eve", "banned", "why", 3))
    for number in range(ROUNDS):
        round_of(ledger, number)
        if number % 4 == 0:
            ledger.evaluated(EvaluationRow(number, number, 1.5, 100, False))
    ledger.note("an extension", "what it has to know")
    ledger.leased(ROUNDS, {"s-ann": ((2 * ROUNDS, 2 * ROUNDS + 2),)})
    return ledger


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a hub that was killed: SQLite's write-ahead log is full."""
    folder = tmp_path_factory.mktemp("killed")
    ledger = lived(folder / "open")
    shutil.copytree(folder / "open", folder / "run")
    ledger.close()
    return folder / "run"


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ledger that was closed."""
    folder = tmp_path_factory.mktemp("paused") / "run"
    lived(folder).close()
    return folder


def facts(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """Read every row, but for the term, of which each opening is one."""
    with sqlite3.connect(folder / "ledger.db") as db:
        found = {
            table: db.execute(f"SELECT {names} FROM {table}").fetchall() for table, names in COLUMNS.items()
        }
    db.close()
    found["meta"] = [row for row in found["meta"] if row[0] != "term"]
    return found


def removed(data: bytes) -> bytes | None:
    return None


def emptied(data: bytes) -> bytes | None:
    return b""


def halved(data: bytes) -> bytes | None:
    return data[: len(data) // 2]


def flipped(place: float) -> Callable[[bytes], bytes]:
    """Flip one bit at a place between 0 and 1."""

    def flip(data: bytes) -> bytes:
        bit = int(place * (8 * len(data) - 1))
        return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]

    return flip


def damage(folder: Path, name: str, how: Callable[[bytes], bytes | None]) -> None:
    path = folder / name
    data = how(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)


def logs_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LOGS if (folder / name).exists()}


def opened(folder: Path, was: dict[str, list[tuple[object, ...]]]) -> list[str] | Exception:
    """Open a damaged ledger: what was there is there, and can be gone on with. Returns what was mended; or
    the error that refuses it, with the logs as they were."""
    before = logs_of(folder)
    try:
        ledger = write(folder)
    except LedgerError as error:
        return error if logs_of(folder) == before else AssertionError("something was cut")
    with ledger:
        try:
            ledger.check_packets()
        except LedgerError as error:
            kept = (folder / "packets.log").read_bytes() == before["packets.log"]
            return error if kept else AssertionError("something was cut")
        assert facts(folder) == was
        assert ledger.verify().rounds == ROUNDS
        round_of(ledger, ROUNDS)
        assert ledger.verify().rounds == ROUNDS + 1
    return ledger.mended


WAYS = st.sampled_from([removed, emptied, halved]) | st.builds(flipped, st.floats(0, 1))


@pytest.mark.parametrize(
    "name", ["ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.lock", "journal.log"]
)
@given(how=WAYS)
@example(how=removed)
@example(how=emptied)
@example(how=halved)
@settings(max_examples=25, deadline=None)
def test_whatever_happens_to_one_of_the_books_every_round_is_there(
    killed: Path, tmp_path_factory: pytest.TempPathFactory, name: str, how: Callable[[bytes], bytes | None]
) -> None:
    """The log of packets was cut to nothing with ledger.db gone, and to 26 rounds of 55 for one bit of its
    write-ahead log."""
    folder = Path(shutil.copytree(killed, tmp_path_factory.mktemp("damaged") / "run"))
    (folder / "ledger.lock").touch()
    if (folder / name).stat().st_size or how is removed:
        damage(folder, name, how)
    found = opened(folder, facts_of(killed, tmp_path_factory))
    assert isinstance(found, list), found
    shutil.rmtree(folder.parent)


def facts_of(folder: Path, places: pytest.TempPathFactory) -> dict[str, list[tuple[object, ...]]]:
    """Read every row of a copy: reading would clear the write-ahead log."""
    copy = Path(shutil.copytree(folder, places.mktemp("facts") / "run"))
    found = facts(copy)
    shutil.rmtree(copy.parent)
    return found


@pytest.mark.parametrize("name", BOOKS)
@given(how=WAYS)
@example(how=flipped(0.078125))  # of a table's name, which is no UTF-8 then
@settings(max_examples=25, deadline=None)
def test_a_ledger_that_was_closed_is_mended_likewise(
    paused: Path, tmp_path_factory: pytest.TempPathFactory, name: str, how: Callable[[bytes], bytes | None]
) -> None:
    folder = Path(shutil.copytree(paused, tmp_path_factory.mktemp("damaged") / "run"))
    was = facts(folder)
    damage(folder, name, how)
    assert isinstance(opened(folder, was), list)
    shutil.rmtree(folder.parent)


@given(how=WAYS)
@example(how=removed)
@example(how=emptied)
@settings(max_examples=40, deadline=None)
def test_damaged_packets_are_refused_and_named_and_not_a_byte_is_cut(
    killed: Path, tmp_path_factory: pytest.TempPathFactory, how: Callable[[bytes], bytes | None]
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path_factory.mktemp("damaged") / "run"))
    damage(folder, "packets.log", how)
    error = opened(folder, {})
    assert isinstance(error, LedgerDamaged)
    assert f"{folder}/packets.log" in str(error)
    assert "whole rounds" in str(error)
    assert "put packets.log back from a copy" in error.hints[0]
    shutil.rmtree(folder.parent)


def test_a_repair_says_what_it_was_and_where_the_damaged_file_is(paused: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(paused, tmp_path / "run"))
    damaged = b"not SQLite" * 500
    (folder / "ledger.db").write_bytes(damaged)
    with write(folder) as ledger:
        (said,) = ledger.mended
    assert said.startswith(f"{folder}: ledger.db is not readable: file is not a database: it was made anew")
    assert said.endswith(f"what was there is in {folder}/aside/1")
    assert (folder / "aside" / "1" / "ledger.db").read_bytes() == damaged
    with write(folder) as ledger:
        assert ledger.mended == []

    (folder / "journal.log").unlink()
    with write(folder) as ledger:
        (said,) = ledger.mended
    assert "journal.log is gone or empty: it was made anew from ledger.db, whose chain holds" in said
    assert (folder / "aside" / "2" / "ledger.db").exists()


def test_a_row_that_was_altered_is_as_it_was_written(paused: Path, tmp_path: Path) -> None:
    """Whichever table it is in: leases, standings and terms have no chain over them."""
    for number, change in enumerate(
        (
            "UPDATE meta SET value='7' WHERE key='term'",
            "UPDATE meta SET value='4000' WHERE key='samples'",
            "UPDATE leased SET ids=(SELECT ids FROM counted WHERE lease=0)",
            "UPDATE peers SET standing='member'",
            "UPDATE sessions SET key='key-of-eve'",
            "UPDATE rounds SET loss=0.1 WHERE round=3",
            "UPDATE evaluations SET loss=NULL",
            "UPDATE chain SET head=zeroblob(32) WHERE link=4",
            "UPDATE meta SET value='else' WHERE key='an extension'",
            "DROP INDEX counted_by_round",
            "PRAGMA user_version=3",
            "PRAGMA user_version=3000",
        )
    ):
        folder = Path(shutil.copytree(paused, tmp_path / str(number)))
        was = facts(folder)
        with sqlite3.connect(folder / "ledger.db") as db:
            db.execute(change)
        db.close()
        if "user_version" not in change:
            with Ledger(folder, write=False) as ledger, pytest.raises(LedgerError, match=r"ledger\.db"):
                ledger.verify()
        mended = opened(folder, was)
        assert isinstance(mended, list), change
        assert mended or "user_version=3000" in change, change


def test_what_the_journal_lost_is_taken_from_the_tables_and_the_other_way_round(
    paused: Path, tmp_path: Path
) -> None:
    """A damaged record is not the end: those behind it are carried out where the tables lack them."""
    folder = Path(shutil.copytree(paused, tmp_path / "run"))
    was, data = facts(folder), (folder / "journal.log").read_bytes()
    middle = data.index(b"CKTL", len(data) // 2)
    (folder / "journal.log").write_bytes(flipped((middle + HEADER_SIZE + 3) / len(data))(data))
    with sqlite3.connect(folder / "ledger.db") as db:  # the newest record was not carried out
        (number,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("DELETE FROM leased")
        db.execute(f"PRAGMA user_version={number - 1}")
    db.close()

    mended = opened(folder, was)
    assert isinstance(mended, list), mended
    assert "journal.log has no record" in mended[0]


def test_with_both_books_damaged_nothing_is_begun_anew(killed: Path, tmp_path: Path) -> None:
    """With tables gone or altered and a journal that is damaged before its end."""
    for number, (tables, journal) in enumerate(
        [(removed, removed), (emptied, emptied), (flipped(0.0), flipped(0.5)), (removed, flipped(0.3))]
    ):
        folder = Path(shutil.copytree(killed, tmp_path / str(number)))
        damage(folder, "ledger.db", tables)
        (folder / "ledger.db-wal").unlink()
        damage(folder, "journal.log", journal)
        error = opened(folder, {})
        assert isinstance(error, LedgerDamaged), (tables, journal)
        assert f"packets.log has {ROUNDS} whole rounds" in str(error)
        assert "put ledger.db and journal.log back" in error.hints[0]


def test_a_round_that_a_killed_hub_left_in_the_journal_alone_is_read(tmp_path: Path) -> None:
    """Who reads the folder of a hub that was killed sees what `resume` will. While a hub holds it, its tables
    are about to follow, and are read as they are."""
    with write(tmp_path / "open") as ledger:
        commit(ledger, 0, b"first")
        shutil.copytree(tmp_path / "open", tmp_path / "run")
        commit(ledger, 1, b"second")
        for name in LOGS:
            shutil.copy(tmp_path / "open" / name, tmp_path / "run" / name)
    lock, seen = tmp_path / "run" / "ledger.lock", []
    for held in (False, True):
        with (
            closing(lock_exclusively(lock)) if held else nullcontext(),
            Ledger(tmp_path / "run", write=False) as read,
        ):
            seen.append((read.verify().lacking, [packet for _, packet in read.packets()]))
    assert seen == [(0, [b"first", b"second"]), (1, [b"first"])]
    with write(tmp_path / "run") as resumed:
        assert (resumed.next_round, resumed.mended) == (2, [])


def test_a_ledger_that_was_begun_is_not_begun_again(tmp_path: Path) -> None:
    with pytest.raises(
        LedgerDamaged, match=r"ledger\.db is damaged: it is gone or empty, and so is journal\.log"
    ):
        Ledger(tmp_path, run="toy", samples=None)
    write(tmp_path).close()
    with Ledger(tmp_path, run="toy", samples=None) as ledger:
        assert ledger.samples == SAMPLES


def test_books_that_lost_rounds_are_refused_by_the_packets(killed: Path, tmp_path: Path) -> None:
    """Both books of an earlier day, beside packets that went on. One packet more is the trace of a kill."""
    folder = tmp_path / "run"
    ledger = write(folder)
    round_of(ledger, 0)
    ledger.close()
    shutil.copytree(folder, tmp_path / "earlier")
    for rounds in (1, 2):
        with write(folder) as ledger:
            round_of(ledger, rounds)
        shutil.copyfile(folder / "packets.log", tmp_path / "earlier" / "packets.log")
        whole = (folder / "packets.log").read_bytes()
        if rounds == 1:
            with write(tmp_path / "earlier") as ledger:
                assert ledger.next_round == 1
            assert whole.endswith((tmp_path / "earlier" / "packets.log.tail").read_bytes())
    with pytest.raises(
        LedgerDamaged, match=r"it has 1 rounds, and so has journal.log, but packets.log has those of 3"
    ):
        write(tmp_path / "earlier")
    assert (tmp_path / "earlier" / "packets.log").read_bytes() == whole


def without_journal(folder: Path, rounds: int = ROUNDS, change: str = "") -> Path:
    """A closed ledger whose journal is gone, with changes of its tables."""
    chained(folder, rounds=rounds)
    for name in ("journal.log", "ledger.db.sha256"):
        (folder / name).unlink()
    with sqlite3.connect(folder / "ledger.db") as db:
        db.executescript(change)
    db.close()
    return folder


@pytest.mark.parametrize("how", [removed, emptied, halved, flipped(0.0)])
def test_a_ledger_that_lost_both_its_books_is_refused(tmp_path: Path, how: Callable[..., bytes]) -> None:
    folder = without_journal(tmp_path / "run")
    packets = (folder / "packets.log").read_bytes()
    damage(folder, "ledger.db", how)
    with pytest.raises(LedgerDamaged, match=f"packets.log has {ROUNDS} whole rounds"):
        write(folder)
    assert (folder / "packets.log").read_bytes() == packets


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("DELETE FROM rounds WHERE round > 3", "round"),
        ("UPDATE rounds SET loss=1e9 WHERE round=2", "rows of round 2"),
        ("UPDATE meta SET value='5' WHERE key='samples'", "chain breaks at"),
        ("UPDATE meta SET value='x' WHERE key='term'", "damaged"),
        ("INSERT INTO peers VALUES ('k', 'eve', 'mumber', '', 0)", "standing is 'mumber'"),
    ],
)
def test_tables_that_cannot_be_believed_make_no_journal(tmp_path: Path, change: str, named: str) -> None:
    folder = without_journal(tmp_path / "run", change=change)
    with pytest.raises(LedgerDamaged, match=named):
        write(folder)
    with pytest.raises(LedgerDamaged, match=named):
        write(folder)


def test_tables_cut_by_their_write_ahead_log_make_no_journal_and_the_log_is_kept(tmp_path: Path) -> None:
    """A hub was killed, and one bit of that log flipped: SQLite drops what follows, and would clear it."""
    ledger = Ledger(tmp_path / "open", run="toy", samples=SAMPLES)
    for number in range(ROUNDS):
        round_of(ledger, number)
    folder = Path(shutil.copytree(tmp_path / "open", tmp_path / "run"))
    ledger.close()
    (folder / "journal.log").unlink()
    damage(folder, "ledger.db-wal", flipped(0.5))
    wal = (folder / "ledger.db-wal").read_bytes()

    with pytest.raises(LedgerDamaged, match=f"but packets.log has those of {ROUNDS}"):
        Ledger(folder, run="toy", samples=SAMPLES)
    assert (folder / "ledger.db-wal").read_bytes() == wal


def test_leases_that_overlap_are_dropped_where_no_journal_says_which_is_true(tmp_path: Path) -> None:
    """A sample is in the pool, in one lease, or counted."""
    overlapping = "INSERT INTO leased SELECT 9, 's-eve', ids FROM counted WHERE lease=1"
    folder = without_journal(tmp_path / "run", rounds=3, change=overlapping)
    with write(folder) as ledger:
        assert ledger._db.execute("SELECT * FROM leased").fetchall() == []
        assert "1 leases had samples that are counted or do not exist: dropped" in ledger.mended[0]


def test_the_tables_that_follow_from_the_journal_are_those_that_were_written(paused: Path) -> None:
    with new_tables() as tables:
        with transaction(tables):
            reading = read_journal(paused / "journal.log", lambda _, changes: post(tables, changes))
        found = {
            table: tables.execute(f"SELECT {names} FROM {table}").fetchall()
            for table, names in COLUMNS.items()
        }
    found["meta"] = [row for row in found["meta"] if row[0] != "term"]
    assert found == facts(paused)
    assert (reading.fault, reading.end) == ("", (paused / "journal.log").stat().st_size)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), st.integers(0, 12))
def test_changes_carried_out_twice_are_carried_out_once(acts: list[tuple[int, bool]], again: int) -> None:
    """So it does no harm that tables do not know how many they have."""
    changes = [
        Change("meta", [[str(key), str(at)]]) if put else Change("meta", drop=[[str(key)]])
        for at, (key, put) in enumerate(acts)
    ]
    with new_tables() as once, new_tables() as twice:
        post(once, changes)
        post(twice, [*changes, *changes[min(again, len(changes)) :]])
        tables = [db.execute("SELECT * FROM meta").fetchall() for db in (once, twice)]
    assert tables[0] == tables[1]
