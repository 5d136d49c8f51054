import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import Ledger
from transport.ledger import (
    HEADER_SIZE,
    Counted,
    EvaluationRow,
    OpenSession,
    RoundRow,
    RungRow,
    packet_log,
    read_packets,
)
from transport.protocol import LedgerBusy, LedgerError, SampleRanges


def begin(folder: Path, samples: int = 40) -> Ledger:
    return Ledger(folder, run="toy", samples=samples)


def commit(
    ledger: Ledger,
    round: int,
    packet: bytes,
    ids: SampleRanges = (),
    peer: str = "ann",
    lease: int = 0,
    rung: RungRow | None = None,
) -> RoundRow:
    counted = (Counted(lease, peer, f"session-{peer}", ids),) if ids else ()
    row = RoundRow(round, round, 1.0, 2.0, 2**64 - 1, ("ann", "bob"), ("ann",), 3.5, 10)
    return ledger.commit(row, packet, counted, rung and rung.note())


def some(folder: Path, rounds: int = 3) -> Ledger:
    ledger = begin(folder)
    for r in range(rounds):
        commit(ledger, r, b"packet %d" % r * (r + 1), ((4 * r, 4 * r + 4),), lease=r)
    return ledger


def test_what_was_committed_is_read_again_by_another(tmp_path: Path) -> None:
    with some(tmp_path) as ledger:
        ledger.evaluated(EvaluationRow(2, 2, 1.5, 100, False))
        with Ledger(tmp_path, write=False) as reader:
            assert reader.rounds() == ledger.rounds()
            assert [r.fingerprint for r in reader.rounds()] == [2**64 - 1] * 3
            assert reader.rounds()[1].members == ("ann", "bob")
            assert list(reader.packets()) == [(r, b"packet %d" % r * (r + 1)) for r in range(3)]
            assert [r for r, _ in reader.packets(1, 2)] == [1]
            assert reader.evaluations() == [EvaluationRow(2, 2, 1.5, 100, False)]
            assert (reader.verify().counted, reader.verify().missing) == (12, 28)


def test_a_fingerprint_that_was_not_known_at_the_commit_is_written_with_a_later_one(tmp_path: Path) -> None:
    """With rounds in flight no peer has x' of the open round yet. What is known stays."""
    with begin(tmp_path) as ledger:
        for r in range(3):
            row = RoundRow(r, r, 1.0, 2.0, 0, (), (), None, 0)
            ledger.commit(row, b"p", (), None, {max(0, r - 1): 7 + r})
    with Ledger(tmp_path, write=False) as reader:
        assert [row.fingerprint for row in reader.rounds()] == [7, 9, 0]


def test_a_ledger_on_a_network_file_system_has_no_write_ahead_log_whatever_it_began_with(
    tmp_path: Path,
) -> None:
    with some(tmp_path):
        assert (tmp_path / "ledger.db-wal").exists()
    with Ledger(tmp_path, run="toy", samples=40, wal=False) as ledger:
        assert not (tmp_path / "ledger.db-wal").exists()
        commit(ledger, 3, b"packet", ((12, 16),), lease=3)
        with Ledger(tmp_path, write=False) as reader:
            assert len(reader.rounds()) == 4
            commit(ledger, 4, b"packet", ((16, 20),), lease=4)
            assert len(reader.rounds()) == 5
    with begin(tmp_path) as ledger:
        assert (len(ledger.rounds()), ledger.verify().counted) == (5, 20)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with begin(tmp_path), pytest.raises(LedgerBusy, match="another process"):
        begin(tmp_path)

    begin(tmp_path).close()


def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    begin(tmp_path).close()

    with pytest.raises(LedgerError, match="'toy' with 40 samples, not of 'other'"):
        Ledger(tmp_path, run="other", samples=40)


def test_no_ledger_and_no_database_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(tmp_path / "nothing", write=False)
    (tmp_path / "ledger.db").write_bytes(b"this is not SQLite, but long enough to be looked at" * 100)
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger(tmp_path, write=False)


def test_rounds_follow_each_other(tmp_path: Path) -> None:
    with some(tmp_path) as ledger, pytest.raises(LedgerError, match="round 5 cannot follow round 2"):
        commit(ledger, 5, b"x")


def test_a_sample_counted_twice_is_found(tmp_path: Path) -> None:
    with some(tmp_path) as ledger:
        commit(ledger, 3, b"x", ((11, 13),), peer="bob", lease=3)

        with pytest.raises(LedgerError, match="counted twice"):
            ledger.verify()


def test_a_sample_that_was_never_counted_is_found(tmp_path: Path) -> None:
    with some(tmp_path) as ledger:
        with pytest.raises(LedgerError, match="28 of 40 samples were never counted"):
            ledger.verify(complete=True)
        commit(ledger, 3, b"x", ((12, 40),), lease=3)

        assert ledger.verify(complete=True).missing == 0


@pytest.mark.parametrize("at", [0, 3, 30, HEADER_SIZE + 2])
def test_a_damaged_byte_is_found(tmp_path: Path, at: int) -> None:
    some(tmp_path).close()
    log = tmp_path / "packets.log"
    data = bytearray(log.read_bytes())
    data[at] ^= 1
    log.write_bytes(data)

    with Ledger(tmp_path, write=False) as ledger, pytest.raises(LedgerError):
        ledger.verify()


ORIGIN = {"recipe": "00ff", "base": "ff00"}


def chained(folder: Path, origin: dict[str, str] = ORIGIN, rounds: int = 3) -> str:
    """The newest head of a run of three rounds and an evaluation."""
    with Ledger(folder, run="toy", samples=40, origin=origin) as ledger:
        for r in range(rounds):
            counted = (Counted(r, "ann", "s", ((4 * r, 4 * r + 4),), "key-of-ann"),)
            ledger.commit(RoundRow(r, r, 1, 2, 7, ("ann",), ("ann",), 3.5, 10), b"packet %d" % r, counted)
        ledger.evaluated(EvaluationRow(2, 2, 1.5, 100, True, (0.5,)))
        assert ledger.verify().head == ledger.head()
        return ledger.head()


def test_a_head_follows_from_all_that_was_decided_before_it(tmp_path: Path) -> None:
    """Two equal runs have equal heads; another origin, or one round less, gives another head."""
    head = chained(tmp_path / "a")

    assert chained(tmp_path / "b") == head
    assert chained(tmp_path / "c", {}) != head
    assert chained(tmp_path / "d", rounds=2) != head
    with Ledger(tmp_path / "a", write=False) as ledger:
        heads = [ledger.head(rounds) for rounds in range(4)]
        assert len({*heads, head}) == 5, "and each has one of its own"
        assert ledger.origin == ORIGIN
        assert (ledger.contributions(), ledger.contributions(2)) == (
            {"key-of-ann": (12, 3)},
            {"key-of-ann": (8, 2)},
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE rounds SET loss=3.4 WHERE round=1", "round 1"),
        ("UPDATE rounds SET accepted='[\"bob\"]' WHERE round=2", "round 2"),
        ("UPDATE counted SET key='key-of-bob' WHERE round=0", "round 0"),
        ("UPDATE counted SET round=0 WHERE round=1", "round 0"),
        ("UPDATE rounds SET fingerprint='8' WHERE round=1", "fingerprint 1"),
        ("UPDATE rounds SET fingerprint='0' WHERE round=1", "fingerprint 1"),
        ("UPDATE evaluations SET loss=1.4", "evaluation 2"),
        ("DELETE FROM evaluations", "evaluation 2"),
        ("UPDATE chain SET entry=zeroblob(32) WHERE round=1", "fingerprint 1"),
        ("UPDATE chain SET head=zeroblob(32) WHERE round=1", "fingerprint 1"),
        ("UPDATE chain SET head='text' WHERE round=1", "fingerprint 1"),
        ("DELETE FROM chain WHERE kind='round' AND round=0", "fingerprint 1"),
        ("DELETE FROM chain", "round 0"),
        ("UPDATE meta SET value='{}' WHERE key='origin'", "fingerprint 0"),
    ],
)
def test_a_decision_altered_afterwards_is_named(tmp_path: Path, change: str, named: str) -> None:
    chained(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute(change)
    db.close()

    with Ledger(tmp_path, write=False) as ledger, pytest.raises(LedgerError, match=named):
        ledger.verify()


def test_a_fingerprint_that_is_known_rounds_later_is_chained_then(tmp_path: Path) -> None:
    with begin(tmp_path) as ledger:
        ledger.commit(RoundRow(0, 0, 1.0, 2.0, 0, ("ann",), ("ann",), 3.5, 10), b"packet", ())
        before = ledger.head(1)
        row = RoundRow(1, 1, 1.0, 2.0, 0, ("ann",), ("ann",), 3.5, 10)
        ledger.commit(row, b"packet", (), None, {0: 7})

        assert (ledger.head(1), [row.fingerprint for row in ledger.rounds()]) == (before, [7, 0])
        assert ledger.verify().head == ledger.head() == ledger.head(2)


def test_a_log_that_lost_committed_bytes_is_refused(tmp_path: Path) -> None:
    some(tmp_path).close()
    log = tmp_path / "packets.log"
    log.write_bytes(log.read_bytes()[:-1])

    with pytest.raises(LedgerError, match="were committed: it was cut or replaced"):
        begin(tmp_path)


def test_a_tail_torn_at_any_byte_is_cut_and_the_round_done_again(tmp_path: Path) -> None:
    some(tmp_path / "whole").close()
    tail = packet_log.pack_header(3, b"the packet of round 3") + b"the packet of round 3"
    for cut in range(len(tail) + 1):
        folder = tmp_path / "torn"
        shutil.copytree(tmp_path / "whole", folder)
        with open(folder / "packets.log", "ab") as log:
            log.write(tail[:cut])
        with begin(folder) as ledger:
            assert ledger.recover().round == 3
            commit(ledger, 3, b"another packet", ((12, 16),), lease=3)
            assert ledger.verify().rounds == 4
        shutil.rmtree(folder)


class Killed(BaseException):
    """The process is no more."""


class Fuse:
    """Stands in for the database or the log's file; the n-th call of all of them does not return."""

    left = 0

    def __init__(self, inner: Any, watched: tuple[str, ...], after: bool) -> None:
        self._inner, self._watched, self._after = inner, watched, after

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if name not in self._watched:
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            Fuse.left -= 1
            if Fuse.left == 0 and not self._after:
                raise Killed
            result = inner(*args, **kwargs)
            if Fuse.left == 0:
                raise Killed
            return result

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_write_a_round_is_there_whole_or_not_at_all(tmp_path: Path, after: bool) -> None:
    outcomes = []
    for n in range(1, 40):
        folder = tmp_path / str(n)
        ledger = some(folder)
        assert ledger._log is not None
        db, file = ledger._db, ledger._log._file
        ledger._db = Fuse(db, ("execute", "executemany"), after)  # type: ignore[assignment]
        ledger._log._file = Fuse(file, ("seek", "write", "flush"), after)  # type: ignore[assignment]
        Fuse.left = n
        try:
            commit(ledger, 3, b"packet of round 3", ((12, 16),), lease=3)
        except Killed:
            pass
        else:
            outcomes.append("done")
        for part in (file, db, ledger._lock):  # what the system does for a process that is gone
            part.close()  # type: ignore[union-attr]
        with begin(folder) as again:
            round = again.recover().round
            audit = again.verify()
            assert (audit.rounds, audit.counted) == (round, 4 * round)
            commit(again, round, b"next", ((4 * round, 4 * round + 4),), lease=round)
        outcomes.append("there" if round == 4 else "not there")
        if "done" in outcomes:
            break

    assert "done" in outcomes, "every write was killed once"
    assert "not there" in outcomes


def test_after_a_write_that_failed_nothing_more_is_written(tmp_path: Path) -> None:
    ledger = some(tmp_path)
    db = ledger._db
    ledger._db = Fuse(db, ("executemany",), False)  # type: ignore[assignment]
    Fuse.left = 1
    with pytest.raises(Killed):
        commit(ledger, 3, b"x", ((12, 16),))
    ledger._db = db
    with pytest.raises(LedgerError, match="a write failed"):
        commit(ledger, 3, b"x", ((12, 16),))
    ledger.close()

    with begin(tmp_path) as again:
        assert again.recover().round == 3


def test_open_leases_and_sessions_are_recovered(tmp_path: Path) -> None:
    with some(tmp_path) as ledger:
        ledger.leased(0, {}, sessions=[OpenSession("session-ann", "ann", "CPU", "key-of-ann")])
        ledger.leased(0, {}, sessions=[OpenSession("session-bob", "bob", "GPU", "key-of-bob")])
        ledger.leased(3, {"session-ann": ((12, 14),), "session-bob": ((14, 16),)})
        ledger.leased(4, {"session-ann": ((16, 20),)})
        commit(ledger, 3, b"x", ((12, 14),), lease=3)
        ledger.gone("session-bob")
    with begin(tmp_path) as ledger:
        recovered = ledger.recover()

    assert recovered.round == 4
    assert recovered.counted == ((0, 14),)
    assert recovered.sessions == (OpenSession("session-ann", "ann", "CPU", "key-of-ann", {4: ((16, 20),)}),)
    assert recovered.last is not None
    assert recovered.last.round == 3


def test_the_rungs_of_rounds_and_what_they_follow_from_are_recovered_to_the_bit(tmp_path: Path) -> None:
    written = [RungRow(0, 1, 0.1 + 0.2, 8), RungRow(1, 3, 1e-300, 4)]
    with begin(tmp_path) as ledger:
        for row in written:
            commit(ledger, row.round, b"packet", rung=row)
        commit(ledger, 2, b"packet")
    with begin(tmp_path) as ledger:
        assert ledger.recover().rungs == tuple(written)
        ledger.verify()


@given(st.lists(st.binary(max_size=300), max_size=5), st.data())
def test_records_survive_and_any_cut_is_noticed(packets: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(packet_log.pack_header(r, p) + p for r, p in enumerate(packets))
    cut = data.draw(st.integers(0, len(wire)))
    read = []
    try:
        for round, packet in read_packets(io.BytesIO(wire[:cut])):
            read.append((round, packet))
    except LedgerError:
        assert cut < len(wire)

    assert read == list(enumerate(packets))[: len(read)]
    assert len(read) == len(packets) or cut < len(wire)


@pytest.mark.parametrize("size", [10, 2**40, 2**64 - 1])
def test_a_record_that_is_longer_than_its_file_is_torn(size: int) -> None:
    head = packet_log.HEADER.pack(packet_log.MAGIC, 1, size, bytes(32))

    with pytest.raises(LedgerError, match="torn"):
        list(read_packets(io.BytesIO(head + packet_log.CRC.pack(zlib.crc32(head)) + b"short")))


WRITER = """
import sys
from io import BytesIO
from pathlib import Path
from transport import Ledger
from transport.ledger.run_ledger import Counted, RoundRow
ledger = Ledger(Path(sys.argv[1]), run="toy", samples=100000)
r = ledger.recover().round
while True:
    ledger.leased(0, {}, sessions=[OpenSession(f"s{r}", "ann", "", "key")])
    ledger.leased(r, {f"s{r}": ((r, r + 1),)})
    row = RoundRow(r, r, 0, 0, r, ("ann",), ("ann",), None, 1)
    ledger.commit(row, b"p" * (r * 7919 % 50000), (Counted(r, "ann", f"s{r}", ((r, r + 1),)),))
    print(r, flush=True)
    r += 1
"""


@pytest.mark.slow
def test_killed_at_random_instants_what_was_announced_is_there(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    announced = -1
    for i in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.02 + 0.021 * i)
        child.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        lines = child.stdout.read().split()
        child.wait()
        announced = max([announced, *map(int, lines[:-1])])
        with Ledger(tmp_path, run="toy", samples=100000) as ledger:
            audit = ledger.verify()
            assert audit.rounds == audit.counted > announced
