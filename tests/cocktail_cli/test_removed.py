"""A command, option or variable that is gone answers with its replacement, in one line."""

import json

import pytest
from in_this_process import Run
from test_completion import COMMANDS

from cocktail_cli.assembly import SHOWING
from cocktail_cli.key_options import REMOVED, VARIABLES


@pytest.mark.parametrize("old", REMOVED)
def test_what_is_gone_is_a_usage_error_of_one_line_that_names_its_replacement(
    cocktail: Run, old: str
) -> None:
    command, _, option = old.partition(" ")
    said = cocktail(command, "smoke", *([f"{option}=1"] if option else []))
    as_json = json.loads(cocktail(command, *([option] if option else []), "--json").out)["error"]

    assert said.exit == as_json["exit"] == 2
    assert said.out == ""
    assert said.err == f"error: cocktail {old} is gone; now it is {REMOVED[old]}\n"
    assert said.err == f"error: {as_json['message']}\n"


@pytest.mark.parametrize("old", REMOVED)
def test_what_is_gone_is_no_command_or_option(old: str) -> None:
    command, _, option = old.partition(" ")
    options = {name for p in COMMANDS[command].params for name in p.opts} if option else {*COMMANDS}

    assert (option or command) not in options


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_is_gone_is_not_ignored_in_silence(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "5mbit")
    said = cocktail("join", "-y")
    options = {name for command in SHOWING for p in COMMANDS[command].params for name in p.opts}

    assert said.exit == 2
    assert said.err == f"error: {variable} of the environment is gone; now it is {VARIABLES[variable]}\n"
    assert VARIABLES[variable] in options
    assert cocktail("recipes", "list").exit == 0


def test_what_stands_behind_two_dashes_is_no_option(cocktail: Run) -> None:
    assert "is gone" not in cocktail("status", "--", "--resume").err
