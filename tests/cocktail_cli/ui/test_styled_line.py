"""Lines keep their styles when they are joined, and their columns when characters are wide."""

from __future__ import annotations

from cocktail_cli.ui import Line, columns_of, padded
from cocktail_cli.ui.styled_line import Span, flowed


def test_spans_move_along_and_neighbours_of_one_style_are_one() -> None:
    line = "loss " + Line.styled("1.8", "loss") + Line.styled("4", "loss") + " " + Line.styled("lost", "bad")

    assert line == Line("loss 1.84 lost", (Span(5, 9, "loss"), Span(10, 14, "bad")))


def test_parts_flow_into_lines_and_a_long_one_is_broken_between_words() -> None:
    lines = flowed([Line("one two"), Line.styled("three", "good"), Line("a part of many words")], 15)

    assert [line.text for line in lines] == ["one two   three", "a part of many", "words"]
    assert lines[0].spans == (Span(10, 15, "good"),)


def test_wide_characters_take_two_columns() -> None:
    assert [columns_of(text) for text in ("abc", "机器", "é")] == [3, 4, 1]
    assert (padded("机器学习", 5), padded("ab", 4, right=True)) == ("机器 ", "  ab")


def test_characters_that_an_encoding_lacks_have_stand_ins() -> None:
    line = Line("── 3 % · █▁ ━ 机")

    assert line.within("utf-8") == line
    assert line.within("ascii").text == "-- 3 % - #_ = ?"
    assert line.within("cp1252").text == "-- 3 % · #_ = ?"
