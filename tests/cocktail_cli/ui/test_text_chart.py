"""A chart in characters stays in its box, falls where its values do, and tells its values on its axes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cocktail_cli.ui import MARK, showable, text_chart
from cocktail_cli.ui.text_chart import LEAST_COLUMNS, LEAST_ROWS

number = some.floats(min_value=-1e12, max_value=1e12)
FALLING = [(float(step), 6.0 - step / 10) for step in range(1, 41)]


@settings(max_examples=40)
@given(some.lists(number, min_size=2, max_size=300), some.integers(1, 160), some.integers(1, 50))
def test_a_chart_fills_its_box_and_never_leaves_it(values: list[float], width: int, height: int) -> None:
    lines = text_chart(list(enumerate(values)), [(0, values[0])], width, height)

    assert bool(lines) == (width >= LEAST_COLUMNS and height >= LEAST_ROWS)
    assert len(lines) in (0, height)
    assert all(len(line) <= width for line in lines)
    assert all(showable(line, "ascii").isascii() and "?" not in showable(line, "ascii") for line in lines)
    assert [showable(line, "utf-8") for line in lines] == lines


def test_a_lower_loss_is_drawn_lower() -> None:
    def row_of_mark(loss: float) -> int:
        return next(n for n, line in enumerate(text_chart(FALLING, [(20.0, loss)], 60, 12)) if MARK in line)

    assert row_of_mark(5.5) < row_of_mark(4.0) < row_of_mark(2.5)


def test_the_axes_tell_round_values_at_their_places() -> None:
    lines = text_chart(FALLING, [], 60, 13)

    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["5.0", "4.0", "3.0", "2.0"]
    assert lines[-1].split() == ["step", "10", "20", "30", "40"]
    places = [lines[-2].index("┬"), lines[-2].rindex("┬")]
    assert places[1] == len(lines[-2]) - 1
    assert places[0] == pytest.approx(lines[-1].index("step 10") + 3, abs=1)


def test_what_is_not_a_number_is_left_out() -> None:
    broken = [*FALLING, (41.0, math.nan), (42.0, math.inf)]

    assert text_chart(broken, [(41.0, -math.inf)], 60, 12) == text_chart(FALLING, [], 60, 12)
    assert text_chart([(1.0, math.nan)], [], 60, 12) == []


def test_what_a_terminal_cannot_show_has_stand_ins() -> None:
    line = "step 3 · 5 % ━ … ⠒◆ 机"

    assert showable(line, "utf-8") == line
    assert showable(line, "ascii") == showable(line, "cp1252") == "step 3 - 5 % = ~ *o ?"
    assert showable("⠒é", "cp1252") == "*é"
    assert showable("⠒机", "utf-8", term="linux") == "*机", "its font has no braille"
