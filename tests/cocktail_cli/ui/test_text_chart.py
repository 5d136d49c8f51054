"""A chart in characters stays in its box, falls where its values do, and tells its values on its axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cocktail_cli.ui import text_chart
from cocktail_cli.ui.text_chart import ASCII, LEAST_COLUMNS, LEAST_ROWS, UNICODE, Glyphs

number = some.floats(min_value=-1e12, max_value=1e12)
FALLING = [(float(step), 6.0 - step / 10) for step in range(1, 41)]


@settings(max_examples=40)
@given(
    some.lists(number, min_size=2, max_size=300), some.integers(1, 160), some.integers(1, 50), some.booleans()
)
def test_a_chart_fills_its_box_and_never_leaves_it(
    values: list[float], width: int, height: int, plain: bool
) -> None:
    lines = text_chart(list(enumerate(values)), [(0, values[0])], width, height, ASCII if plain else UNICODE)

    assert bool(lines) == (width >= LEAST_COLUMNS and height >= LEAST_ROWS)
    assert len(lines) in (0, height)
    assert all(len(line) <= width for line in lines)
    assert not plain or all(line.text.isascii() for line in lines)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_lower_loss_is_drawn_lower(glyphs: Glyphs) -> None:
    def row_of_mark(loss: float) -> int:
        lines = text_chart(FALLING, [(20.0, loss)], 60, 12, glyphs)
        return next(n for n, line in enumerate(lines) if any(span.style == "eval" for span in line.spans))

    assert row_of_mark(5.5) < row_of_mark(4.0) < row_of_mark(2.5)


def test_the_axes_tell_round_values_at_their_places() -> None:
    lines = [line.text for line in text_chart(FALLING, [], 60, 13)]

    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["5.0", "4.0", "3.0", "2.0"]
    assert lines[-1].split() == ["step", "10", "20", "30", "40"]
    places = [lines[-2].index("┬"), lines[-2].rindex("┬")]
    assert places[1] == len(lines[-2]) - 1
    assert places[0] == pytest.approx(lines[-1].index("step 10") + 3, abs=1)


def test_what_is_not_a_number_is_left_out() -> None:
    broken = [*FALLING, (41.0, math.nan), (42.0, math.inf)]

    assert text_chart(broken, [(41.0, -math.inf)], 60, 12) == text_chart(FALLING, [], 60, 12)
    assert text_chart([(1.0, math.nan)], [], 60, 12) == []
