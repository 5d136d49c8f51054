"""Progress is told twice a second at most, with its pace and the time that is left."""

import pytest

from cocktail_cli.ui import Progressed, ProgressMeter
from cocktail_cli.ui.wording import progress_text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr("cocktail_cli.ui.display.time.monotonic", lambda: at[0])
    return at


def test_progress_is_told_at_intervals_with_its_pace_and_at_its_end(clock: list[float]) -> None:
    told: list[Progressed] = []
    meter = ProgressMeter(told.append, "tokenizing my.jsonl", "rows")
    for second in range(1, 41):
        clock[0] = 100.0 + second / 10
        meter(10 * second, 400)
    meter(400, 400)

    assert [event.done for event in told[:3]] == [50, 100, 150]
    assert told[1] == Progressed("tokenizing my.jsonl", 100, 400, "rows", 0.0, None)
    assert (told[2].done, told[2].rate, told[2].eta) == (150, 100.0, pytest.approx(2.5))
    assert told[-1].done == 400


def test_the_pace_is_of_late_so_what_was_here_before_does_not_count(clock: list[float]) -> None:
    told: list[Progressed] = []
    meter = ProgressMeter(told.append, "fetching a/b", "bytes")
    for second in range(1, 31):
        clock[0] = 100.0 + second
        meter(5_000_000 + 1000 * second, 5_100_000)

    assert told[-1] == Progressed("fetching a/b", 5_030_000, 5_100_000, "bytes", 1000.0, 70.0)


def test_what_is_quick_is_not_worth_a_word(clock: list[float]) -> None:
    meter = ProgressMeter(lambda event: pytest.fail(str(event)), "tokenizing", "rows")
    clock[0] += 0.1
    meter(10, 10)


def test_where_the_end_is_not_known_there_is_a_pace_but_no_time_left(clock: list[float]) -> None:
    told: list[Progressed] = []
    meter = ProgressMeter(told.append, "tokenizing me/data", "rows")
    meter(0)
    clock[0] += 2.0
    meter(4000)

    assert told == [Progressed("tokenizing me/data", 4000, 0, "rows", 2000.0, None)]
    assert progress_text(told[0]) == " 4,000 rows, 2,000 rows/s"
