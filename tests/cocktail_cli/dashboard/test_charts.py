"""Charts: what is drawn is what was given, within the frame, and told to those who do not see it."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cocktail_cli.dashboard import downsample, el
from cocktail_cli.dashboard.charts import (
    BOTTOM,
    CHARACTER,
    HEIGHT,
    LEFT,
    LEFT_OUT,
    MOST,
    RIGHT,
    ROWS,
    TOP,
    WIDTH,
    Bar,
    Plot,
    Row,
    Series,
    axis_of,
    clock,
    line_chart,
    row_chart,
    time_ticks,
)
from cocktail_cli.dashboard.markup import html
from cocktail_cli.foreign_text import paragraphs

finite = some.floats(min_value=1e-6, max_value=1e9)


def plot(*points: tuple[float, float], log: bool = False) -> Plot:
    return Plot("loss", "Loss", "It falls.", [Series("training", points, "a")], "step", "{:.3g}".format, log)


def drawn(chart: Element) -> list[tuple[float, float]]:
    """The points of the first curve, in pixels."""
    line = next(g for g in chart.iter("g") if g.get("class") == "series a").find("polyline")
    assert line is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.get("points", "").split())]


@settings(max_examples=30)
@given(some.lists(finite, min_size=1, max_size=300), some.booleans())
def test_every_point_lies_in_the_frame(ys: list[float], log: bool) -> None:
    points = drawn(line_chart(plot(*enumerate(ys), log=log)))

    assert all(LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 for x, _ in points)
    assert all(TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for _, y in points)


@settings(max_examples=30)
@given(some.lists(finite, min_size=2, max_size=400))
def test_ticks_lie_on_the_axis_and_are_few(values: list[float]) -> None:
    for log in (False, True):
        axis = axis_of(values, 200.0, 0.0, log)
        ticks = axis.ticks()

        assert len(ticks) <= 20
        assert all(-1.0 <= axis(tick) <= 201.0 for tick in ticks)
        assert log or ticks


@settings(max_examples=30)
@given(some.lists(some.tuples(finite, finite), min_size=1, max_size=1000))
def test_thinned_points_keep_the_last_the_order_and_the_range(points: list[tuple[float, float]]) -> None:
    points = sorted(points)
    few = downsample(points)

    assert len(few) == min(len(points), MOST)
    assert few[-1] == points[-1]
    assert [x for x, _ in few] == sorted(x for x, _ in few)
    low, high = min(y for _, y in points), max(y for _, y in points)
    assert all(low * (1 - 1e-9) <= y <= high * (1 + 1e-9) for _, y in few)


def test_a_lower_loss_is_drawn_lower() -> None:
    (_, first), (_, second) = drawn(line_chart(plot((1, 4.0), (2, 3.0))))

    assert second > first


def test_places_between_two_rounds_have_no_number() -> None:
    said = [text.text for text in line_chart(plot((42, 1.0), (43, 2.0))).iter("text")]

    assert (said.count("42"), said.count("43")) == (1, 1)


def test_a_label_at_the_edge_is_moved_until_it_fits() -> None:
    texts = {text.text: text for text in line_chart(plot((0, 1.0), (10_000, 2.0))).iter("text")}

    assert float(texts["10,000"].get("x", "")) + 3 * CHARACTER <= WIDTH
    assert float(texts["0"].get("x", "")) == LEFT


def test_equal_factors_are_equal_steps_on_a_log_axis() -> None:
    axis = axis_of([1.0, 10_000.0], 0.0, 100.0, log=True)

    assert axis(10) - axis(1) == pytest.approx(axis(1000) - axis(100))


def test_a_chart_says_what_it_is_and_its_values() -> None:
    chart = line_chart(plot((1, 4.0), (2, 3.0)))

    assert chart.get("role") == "img"
    named = {child.get("id") for child in chart if child.tag in ("title", "desc")}
    assert set(chart.get("aria-labelledby", "").split()) == named
    assert "step 2: training 3" in html(chart)


def test_more_peers_than_rows_are_counted() -> None:
    chart = row_chart(
        "timeline", "Peers", "", [Row(f"peer-{n}", [Bar(0, 9, "there")]) for n in range(ROWS + 7)]
    )

    assert sum(bar.get("class") == "bar" for bar in chart.iter("rect")) == ROWS
    assert "and 7 more" in html(chart)


def test_a_cross_is_explained_where_there_is_one() -> None:
    bar = Bar(0, 9, "there")
    plain, crossed = (
        row_chart("timeline", "Peers", "", [Row("ann", [bar], marks)]) for marks in ((), (bar,))
    )

    assert LEFT_OUT in html(crossed)
    assert LEFT_OUT not in html(plain)


@settings(max_examples=30)
@given(some.floats(1.0, 1e8))
def test_times_are_told_at_a_handful_of_round_places(stop: float) -> None:
    ticks = time_ticks(stop)

    assert 2 <= len(ticks) <= 5
    assert ticks[-1] <= stop
    assert len({clock(tick) for tick in ticks}) == len(ticks)


def test_times_are_spelt_as_people_do() -> None:
    assert [clock(s) for s in (0, 90, 7500, 273_600)] == ["0:00", "1:30", "2:05 h", "3 d 4 h"]


@settings(max_examples=30)
@given(some.text())
def test_nothing_a_stranger_writes_becomes_markup(text: str) -> None:
    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, attrs))

        def handle_data(self, data: str) -> None:
            found.append(data)

    found: list[object] = []
    reader = Reader()
    reader.feed(html(el("p", text, title=text)))
    reader.close()

    safe = paragraphs(text)
    assert found == [("p", [("title", safe)]), *([safe] if safe else [])]


def test_a_coordinate_is_written_to_a_hundredth() -> None:
    assert html(el("line", x1=math.pi, x2=4.0)) == '<line x1="3.14" x2="4"></line>'
