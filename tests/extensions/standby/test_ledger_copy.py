"""A copy of a ledger, as a standby has it: the hub's history to the bit, or refused."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_books import BOOKS, ROUNDS, damage, emptied, facts, flipped, halved, lived, removed
from test_run_ledger import ORIGIN, begin, chained

from cocktail_cli.extensions.standby.ledger_copy import (
    TAKEN_OVER,
    VOTING_ROUNDS,
    LedgerChanges,
    LedgerCopy,
    changes_after,
    open_tables,
    updates_between,
    voters_of,
)
from transport.ledger import Counted, EvaluationRow, KnownPeer, Ledger, OpenSession, RoundRow, UpdateLog
from transport.protocol import LedgerError, WeightedPacket

ACTS = st.lists(
    st.sampled_from(
        ["commit", "commit", "session", "lease", "gone", "ban", "evaluate", "clear", "copy", "crash"]
    ),
    max_size=20,
)


class Original:
    """A hub's ledger, and the log of the updates that went into its rounds."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder, run="a-run", samples=1000, origin={"hub": "k"})
        self.updates = UpdateLog(folder / "updates.log", 0)
        self.folder, self.rounds, self.saved = folder, 0, 0

    def act(self, act: str) -> None:
        n, ledger = self.rounds, self.ledger
        if act == "commit":
            packet = hashlib.sha256(bytes([n])).digest() * (n % 3)
            self.updates.begin(n, [WeightedPacket("ann", packet, 1.0)])
            self.updates.seal(hashlib.sha256(packet).digest())
            row = RoundRow(
                n, n, 0.1 + n, 0.7 + n / 3, 2**63 + n if n % 2 else 0, ("ann", "bob"), ("ann",), 1 / 3, 7
            )
            stale = {n - 1: 5} if n and n % 2 else {}
            ledger.commit(row, packet, (Counted(n, "ann", "s0", ((n, n + 1),), "key"),), None, stale)
            self.rounds += 1
        elif act == "session":
            ledger.leased(0, {}, sessions=[OpenSession(f"s{n}", "ann", "cpu", "key")])
        elif act == "lease":
            ledger.leased(n, {"s0": ((n, n + 1),)})
        elif act == "gone":
            ledger.gone(f"s{n}")
        elif act == "ban":
            ledger.stand(KnownPeer(f"k{n}", "eve", "banned", "why", n))
        elif act == "evaluate" and n:
            ledger.evaluated(EvaluationRow(n - 1, n, 0.1 * n, 3, False, (0.5,)))
        elif act == "clear":
            self.updates.clear(n, keep=True)
            self.saved = n


def follow(original: Original, copy: LedgerCopy, most: int = 4) -> None:
    """Bring the copy to where the original is, a few links at a time."""
    while True:
        changes = changes_after(original.folder, copy.link, most)
        new = msgspec.msgpack.decode(changes, type=LedgerChanges)
        with Ledger(original.folder, write=False) as ledger:
            packets = b""
            if new.rounds:
                first, last = ledger.record(new.rounds[0]), ledger.record(new.rounds[-1])
                assert first
                assert last
                packets = ledger.log_path.read_bytes()[first.offset : last.end]
        stop = copy.rounds + len(new.rounds)
        try:
            updates = updates_between(original.folder, copy.next_update, max(stop, copy.next_update))
        except KeyError:  # the error feedback has them
            copy.cut_updates(original.saved)
            updates = updates_between(original.folder, copy.next_update, max(stop, copy.next_update))
        copy.apply(changes, BytesIO(packets), [BytesIO(updates)])
        if new.newest:
            return


def rows(folder: Path) -> dict[str, list[object]]:
    import sqlite3

    tables = ("meta", "rounds", "counted", "leased", "sessions", "peers", "evaluations", "chain")
    with sqlite3.connect(folder / "ledger.db") as db:
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


@settings(max_examples=12, deadline=None)
@given(ACTS)
def test_whatever_happens_a_copy_that_followed_is_the_original_and_opens_as_one(acts: list[str]) -> None:
    with TemporaryDirectory() as folder:
        here, there = Path(folder, "hub"), Path(folder, "standby")
        original, copy = Original(here), LedgerCopy(there)
        for act in acts:
            if act == "crash":
                copy.close()
                copy = LedgerCopy(there)
            elif act == "copy":
                follow(original, copy)
            else:
                original.act(act)
        follow(original, copy)
        assert (there / "packets.log").read_bytes() == (here / "packets.log").read_bytes()
        assert rows(there) == rows(here)
        stop = original.rounds
        assert updates_between(there, original.saved, stop) == updates_between(here, original.saved, stop)
        term = copy.take_over()
        copy.close()
        with Ledger(there, run="a-run", samples=1000, origin={"hub": "k"}) as taken:
            assert taken.verify().rounds == stop
            assert taken.term == term + 1 == original.ledger.term + TAKEN_OVER + 1
        original.ledger.close()


def test_a_copy_takes_no_history_but_its_own(tmp_path: Path) -> None:
    """One altered row, a packet of another round or a repeated message changes nothing."""
    original, copy = Original(tmp_path / "hub"), LedgerCopy(tmp_path / "standby")
    for act in ("commit", "lease", "commit"):
        original.act(act)
    good = msgspec.msgpack.decode(changes_after(original.folder, 0), type=LedgerChanges)
    packets = (original.folder / "packets.log").read_bytes()
    updates = updates_between(original.folder, 0, 2)
    altered = msgspec.structs.replace(good, grown=good.grown | {"counted": good.grown["counted"][:1]})
    for bad, with_packets in (
        (altered, packets),
        (good, packets[: len(packets) // 2]),
        (msgspec.structs.replace(good, since=7), packets),
    ):
        with pytest.raises(LedgerError):
            copy.apply(msgspec.msgpack.encode(bad), BytesIO(with_packets), [BytesIO(updates)])
    assert (copy.link, copy.rounds) == (0, 0)

    copy.apply(msgspec.msgpack.encode(good), BytesIO(packets), [BytesIO(updates)])
    with pytest.raises(LedgerError, match="this copy is at"):
        copy.apply(msgspec.msgpack.encode(good), BytesIO(packets), [BytesIO(updates)])
    assert copy.head.hex() == original.ledger.head()


def test_of_updates_the_error_feedback_has_nothing_stays(tmp_path: Path) -> None:
    """A standby's disk is bounded: the log is cut at the round of the saved error feedback."""
    original, copy = Original(tmp_path / "hub"), LedgerCopy(tmp_path / "standby")
    for _ in range(5):
        original.act("commit")
    follow(original, copy)
    copy.cut_updates(4)
    assert updates_between(tmp_path / "standby", 4, 5)
    with pytest.raises(KeyError):
        updates_between(tmp_path / "standby", 3, 5)
    original.act("commit")
    follow(original, copy)
    assert updates_between(tmp_path / "standby", 4, 6)
    shutil.rmtree(tmp_path)


def test_a_packet_that_is_longer_than_the_recipe_makes_is_not_copied(tmp_path: Path) -> None:
    original, copy = Original(tmp_path / "hub"), LedgerCopy(tmp_path / "standby")
    for _ in range(3):
        original.act("commit")  # packets of 0, 32 and 64 bytes
    changes, packets = changes_after(original.folder, 0), (original.folder / "packets.log").read_bytes()
    updates = updates_between(original.folder, 0, 3)

    with pytest.raises(LedgerError):
        copy.apply(changes, BytesIO(packets), [BytesIO(updates)], longest=lambda round: 63)
    assert (copy.link, copy.rounds) == (0, 0)
    copy.apply(changes, BytesIO(packets), [BytesIO(updates)], longest=lambda round: 64)
    assert copy.rounds == 3


def test_a_message_has_as_many_rounds_as_their_packets_and_rows_leave_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has a bound that a standby knows, however many peers the run has."""
    rounds, crowd, most = 5, 300, 1 << 18
    monkeypatch.setattr("cocktail_cli.extensions.standby.ledger_copy.MOST_BYTES", most)
    names = tuple(f"peer-{n}" for n in range(crowd))
    with Ledger(tmp_path, run="a-run", samples=10**6, origin={"hub": "k"}) as ledger:
        for round in range(rounds):
            row = RoundRow(round, round, 0.1, 0.7, 0, names, names, 0.5, 7)
            ids = range(round * crowd, (round + 1) * crowd)
            counted = [
                Counted(i, name, name, ((i, i + 1),), "key") for i, name in zip(ids, names, strict=True)
            ]
            ledger.commit(row, b"packet", tuple(counted))

    first = changes_after(tmp_path, 0)
    came = msgspec.msgpack.decode(first, type=LedgerChanges).rounds

    assert 0 < len(came) < rounds
    assert len(first) < most


def test_members_vote_whose_samples_a_recent_round_counted(tmp_path: Path) -> None:
    """A round that closes with one update makes its peer no majority; one that has left has no vote."""
    with begin(tmp_path) as ledger, open_tables(tmp_path) as db:

        def round_of(number: int, members: tuple[str, ...], workers: tuple[str, ...]) -> frozenset[str]:
            counted = [
                Counted(number, name, f"session-{name}", ((at, at + 1),), f"key-{name}")
                for at, name in enumerate(workers, 5 * number)
            ]
            row = RoundRow(number, number, 1.0, 2.0, 0, members, workers, 3.5, 10)
            ledger.commit(row, b"packet", tuple(counted))
            return frozenset(key.removeprefix("key-") for key in voters_of(db))

        everybody = ("ann", "bob", "cyd", "dan")
        assert voters_of(db) == frozenset()
        assert round_of(0, everybody, ("ann", "bob", "cyd")) == {"ann", "bob", "cyd"}, "dan has not worked"
        assert round_of(1, ("ann", "bob", "dan"), ("ann",)) == {"ann", "bob"}, "cyd has left"
        for number in range(2, VOTING_ROUNDS):
            assert round_of(number, everybody, ("ann",)) == {"ann", "bob", "cyd"}
        assert round_of(VOTING_ROUNDS, everybody, ("ann",)) == {"ann"}
        assert round_of(VOTING_ROUNDS + 1, everybody, ()) == {"ann"}, "it counted nobody's samples"


@pytest.mark.parametrize("most", [2, 3, 512])
@pytest.mark.parametrize("followed", [False, True])
def test_a_copy_follows_what_was_corrected(tmp_path: Path, followed: bool, most: int) -> None:
    """A replay has told other fingerprints, and an evaluation was repeated: of a copy that had the rows of
    before, and of one that begins, a few links at a time. Receipts name heads of before."""
    chained(tmp_path / "hub", rounds=5)
    with (
        Ledger(tmp_path / "hub", run="toy", samples=40, origin=ORIGIN) as ledger,
        LedgerCopy(tmp_path / "standby") as copy,
    ):
        packets = (tmp_path / "hub" / "packets.log").read_bytes()
        if followed:
            copy.apply(changes_after(tmp_path / "hub", 0), BytesIO(packets), [])
        heads = [ledger.head(rounds) for rounds in range(6)]
        for round, fingerprint in ((3, 10), (1, 11)):
            ledger.proven(round, fingerprint)
        ledger.evaluated(repeated := EvaluationRow(2, 2, 1.25, 100, True, (0.75,)))
        assert [ledger.head(rounds) for rounds in range(6)] == heads
        while copy.head.hex() != ledger.head():
            changes = changes_after(tmp_path / "hub", copy.link, most)
            rounds = msgspec.msgpack.decode(changes, type=LedgerChanges).rounds
            start, stop = (ledger.record(r) for r in (rounds[0], rounds[-1])) if rounds else (None, None)
            new = packets[start.offset : stop.end] if start and stop else b""
            copy.apply(changes, BytesIO(new), [])
    with Ledger(tmp_path / "standby", run="toy", samples=40) as taken:
        assert taken.evaluations() == [repeated]
        assert [row.fingerprint for row in taken.rounds()] == [7, 11, 7, 10, 7]
        taken.verify()


@pytest.mark.parametrize("name", BOOKS)
@pytest.mark.parametrize("how", [removed, emptied, halved, flipped(0.4)])
def test_a_copy_is_mended_like_the_original(
    tmp_path: Path,
    name: str,
    how: Callable[[bytes], bytes | None],
    copies: Callable[[Path, Path], LedgerCopy],
) -> None:
    lived(tmp_path / "hub").close()
    copy = copies(tmp_path / "hub", tmp_path / "standby")
    link, rounds = copy.link, copy.rounds
    copy.close()
    was = facts(tmp_path / "standby")
    damage(tmp_path / "standby", name, how)

    with LedgerCopy(tmp_path / "standby") as again:
        assert (again.link, again.rounds) == (link, rounds) == (link, ROUNDS)
        assert facts(tmp_path / "standby") == was


@pytest.fixture
def copies() -> Iterator[Callable[[Path, Path], LedgerCopy]]:
    """Makes the whole copy of a ledger that has no update log."""
    made: list[LedgerCopy] = []

    def copied(hub: Path, to: Path) -> LedgerCopy:
        made.append(LedgerCopy(to))
        made[-1].apply(changes_after(hub, 0), BytesIO((hub / "packets.log").read_bytes()), [])
        return made[-1]

    yield copied
    for copy in made:
        copy.close()


@pytest.mark.parametrize(
    "data", [b"", b"\x92\x01\x02", b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff", b"\x81\xa1\xff\x01"]
)
def test_hostile_msgpack_is_no_change_of_a_ledger(data: bytes, tmp_path: Path) -> None:
    copy = LedgerCopy(tmp_path)
    with pytest.raises(LedgerError):
        copy.apply(data, b"", b"")
    copy.close()
