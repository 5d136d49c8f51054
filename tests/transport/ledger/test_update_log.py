from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.ledger import RoundUpdates, UpdateLog, pack_header, pack_updates, read_rounds
from transport.ledger.update_log import unpack_updates
from transport.protocol import LedgerDamaged, LedgerError, WeightedPacket


def updates_of(round: int) -> list[WeightedPacket]:
    return [WeightedPacket("ann", b"a" * (round + 1), 3.0), WeightedPacket("bob \N{SNOWMAN}", b"", 0.1)]


def append(log: UpdateLog, round: int, sha256: bytes, updates: Sequence[WeightedPacket]) -> None:
    log.begin(round, updates)
    log.seal(sha256)


def some(path: Path, rounds: int = 3) -> UpdateLog:
    log = UpdateLog(path, 0)
    for round in range(rounds):
        append(log, round, bytes([round]) * 32, updates_of(round))
    return log


def expected(start: int, stop: int) -> list[RoundUpdates]:
    return [RoundUpdates(r, bytes([r]) * 32, tuple(updates_of(r))) for r in range(start, stop)]


UPDATES = st.lists(st.builds(WeightedPacket, st.text(), st.binary(), st.floats()))


@given(st.binary(min_size=32, max_size=32), UPDATES, UPDATES)
def test_what_went_into_a_round_is_read_as_it_was_written(
    sha256: bytes, updates: list[WeightedPacket], inherited: list[WeightedPacket]
) -> None:
    read = unpack_updates(7, b"".join(pack_updates(updates, inherited)) + sha256)

    # repr: NaN is not equal to itself
    assert repr(read) == repr(RoundUpdates(7, sha256, tuple(updates), tuple(inherited)))


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=1), UPDATES)
def test_the_total_of_a_round_is_read_as_it_was_written(
    sha256: bytes, total: bytes, inherited: list[WeightedPacket]
) -> None:
    read = unpack_updates(7, b"".join(pack_updates([], inherited, [total[:1], total[1:]])) + sha256)

    assert repr(read) == repr(RoundUpdates(7, sha256, (), tuple(inherited), total))


def test_another_process_reads_the_rounds_and_goes_on(tmp_path: Path) -> None:
    some(tmp_path / "log").close()

    log = UpdateLog(tmp_path / "log", 3)
    append(log, 3, bytes([3]) * 32, updates_of(3))

    assert list(read_rounds(log.path, 0, 4)) == expected(0, 4)
    assert list(read_rounds(log.path, 2, 4)) == expected(2, 4)
    with pytest.raises(LedgerError, match="of round 6 cannot follow those of round 3"):
        append(log, 6, bytes(32), [])
    log.close()


def test_a_round_that_was_never_committed_is_dropped(tmp_path: Path) -> None:
    some(tmp_path / "log").close()

    log = UpdateLog(tmp_path / "log", 2)
    append(log, 2, bytes(32), [("eve", b"other", 1.0)])

    assert [r.updates[0][0] for r in read_rounds(log.path, 0, 3)] == ["ann", "ann", "eve"]
    log.close()


def test_a_tail_torn_at_any_byte_is_cut_and_the_round_logged_again(tmp_path: Path) -> None:
    """A hub that was killed while it wrote round 2, which therefore is not committed."""
    path = tmp_path / "log"
    some(path, 2).close()
    begun = path.stat().st_size
    some(tmp_path / "whole", 3).close()
    data = (tmp_path / "whole").read_bytes()
    for cut in range(begun, len(data) + 1):
        path.write_bytes(data[:cut])
        assert list(read_rounds(path, 0, 2)) == expected(0, 2), "as `verify` reads it while a hub writes"
        log = UpdateLog(path, 2)
        append(log, 2, bytes([2]) * 32, updates_of(2))
        assert list(read_rounds(log.path, 0, 3)) == expected(0, 3)
        log.close()


def reopened(path: Path) -> Iterator[RoundUpdates]:
    """What the next process reads of three committed rounds."""
    UpdateLog(path, 3).close()
    yield from read_rounds(path, 0, 3)


def test_committed_rounds_that_are_cut_damaged_or_gone_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    some(path, 3).close()
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(LedgerDamaged, match="lacks the updates of round"):
            list(reopened(path))
        assert path.read_bytes() == data[:cut], "nothing is cut off that may be evidence"
    path.write_bytes(data[:-1] + b"!")
    log = UpdateLog(path, 3)
    with pytest.raises(LedgerError, match="torn or damaged"):
        list(read_rounds(log.path, 0, 3))
    log.close()


def test_what_was_begun_is_nothing_before_it_is_sealed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    log = some(tmp_path / "log", 2)
    like_a_record = pack_header(3, b"")
    log.begin(2, [("eve", b"e" * 999 + like_a_record, 1.0)])
    log.begin(2, updates_of(2))
    log.seal(bytes([2]) * 32)

    assert list(read_rounds(log.path, 0, 3)) == expected(0, 3)
    assert (tmp_path / "log").stat().st_size == log.size
    log.begin(3, [("eve", b"other", 1.0)])
    log.close()
    again = UpdateLog(tmp_path / "log", 3)
    assert list(read_rounds(again.path, 0, 3)) == expected(0, 3)
    again.close()


def test_a_log_of_another_version_is_refused_in_words() -> None:
    with pytest.raises(LedgerError, match="by another version of cocktail"):
        unpack_updates(7, bytes(32) + b"\1\0\0\0\0\0\0\0")


def test_a_cleared_log_begins_with_the_next_round(tmp_path: Path) -> None:
    log = some(tmp_path / "log", 3)
    log.clear(3)
    assert log.size == 0
    append(log, 3, bytes([3]) * 32, updates_of(3))
    log.close()

    again = UpdateLog(tmp_path / "log", 4)
    assert list(read_rounds(again.path, 3, 4)) == expected(3, 4)
    again.close()


def test_the_newest_round_is_logged_again_where_it_was_not_committed(tmp_path: Path) -> None:
    log = some(tmp_path / "log", 2)
    append(log, 2, bytes(32), [("eve", b"of no use" * 99, 1.0)])
    log.begin(2, [("eve", b"refused", 1.0)])  # no packet came of it
    append(log, 2, bytes([2]) * 32, updates_of(2))
    append(log, 3, bytes([3]) * 32, updates_of(3))
    with pytest.raises(LedgerError, match="cannot follow"):
        log.begin(2, updates_of(2))

    assert list(read_rounds(log.path, 0, 4)) == expected(0, 4)
    log.close()
