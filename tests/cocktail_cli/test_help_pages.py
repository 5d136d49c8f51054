"""A page of help fits a screen: options in groups, one line each, no names of Python types."""

import re

import pytest
from in_this_process import Run
from test_completion import COMMANDS

NARROW = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))


@pytest.mark.parametrize("name", ["", "recipes", *COMMANDS])
def test_a_page_has_under_60_lines_of_80_columns_and_names_no_type(cocktail: Run, name: str) -> None:
    said = cocktail(*name.split(), "--help")

    lines = said.out.splitlines()
    assert said.exit == 0
    assert len(lines) < 60
    assert [line for line in lines if len(line) > NARROW] == []
    assert re.findall(r"<\w+>|\[x>=", said.out) == []


@pytest.mark.parametrize("name", ["launch", "join"])
def test_options_are_grouped_by_task_and_take_one_line_each(cocktail: Run, name: str) -> None:
    _, *groups = re.split(r"\n(?=[A-Z][\w ]*:\n)", cocktail(name, "--help").out)

    titles = [group.partition(":")[0] for group in groups]
    assert {"Options", "Network", "This machine", "Output"} <= set(titles)
    for group in groups[titles.index("Options") :]:
        rows = group.splitlines()[1:]
        assert [row for row in rows if row and not row.lstrip().startswith("-")] == []


def test_the_commands_are_grouped_by_task_and_take_one_line_each(cocktail: Run) -> None:
    said = cocktail("--help").out

    titles = re.findall(r"^([A-Z]\w*):$", said, re.MULTILINE)
    assert titles == ["Run", "Check", "Results", "Tools", "Options"]
    commands = said.partition("Run:\n")[2].partition("Options:")[0].splitlines()
    assert [line for line in commands if line.startswith("   ")] == []


def test_examples_are_lines_that_can_be_copied(cocktail: Run) -> None:
    lines = cocktail("launch", "--help").out.splitlines()

    assert "  cocktail launch smoke --peers 3" in lines
