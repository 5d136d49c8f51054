"""A machine's own settings: below what is typed and the environment, above the defaults."""

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from in_this_process import Run

from cocktail_cli import key_options
from cocktail_cli.main import app

URL = "cocktail://a@127.0.0.1:1/b"


def write(text: str) -> Path:
    path = Path(os.environ["COCKTAIL_CONFIG"])
    path.write_text(text)
    return path


def understood(command: str, *typed: str) -> dict[str, Any]:
    """The parameters that the command would be called with."""
    root: Any = typer.main.get_command(app)
    with root.make_context("cocktail", [command, *typed], default_map=key_options.defaults()) as context:
        found: Any = root.commands[command].make_context(command, list(typed), parent=context)
        return dict(found.params)


def test_what_is_typed_wins_then_the_file_then_the_default() -> None:
    write('max-up = "8mbit"\nmax-down = "8mbit"\nname = "attic"\n')

    found = understood("join", URL, "--max-up", "24mbit")

    assert (found["max_up"], found["name"], found["max_down"]) == (3e6, "attic", 1e6)
    assert found["device"] == "auto"
    assert understood("launch", "smoke")["max_up"] == 1e6


def test_without_a_file_nothing_is_set() -> None:
    assert key_options.defaults() == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('max_up = "8mbit"\n', "no such setting: max_up\nhint: did you mean max-up?"),
        ("learning_rate = 1\n", "no such setting: learning_rate\nhint: there are cache-dir, device, "),
        ('max-up = "fast"\n', "max-up: "),
        ("max-down = [1, 2]\n", "max-down: "),
        ('micro-batch-size = "two"\n', "micro-batch-size is 'two', expected int"),
        ("micro-batch-size = true\n", "micro-batch-size is True, expected int"),
        ("hours\n", "Expected '=' after a key"),
    ],
)
def test_a_file_that_says_something_else_is_named(cocktail: Run, text: str, said: str) -> None:
    path = write(text)
    found = cocktail("join", URL)

    assert found.exit == 2
    assert f"{path}: " in found.err
    assert said in found.err


def test_help_and_other_commands_do_not_mind(cocktail: Run) -> None:
    write("hours\n")

    assert cocktail("join", "--help").exit == 0
    assert cocktail("runs").exit == 0
