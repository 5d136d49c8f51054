"""Failures of commands as the public exceptions of the Python API."""

import traceback

import pytest

from cocktail_cli.errors import EXIT, Failure, Problem
from cocktail_cli.extensions.api.errors import FAMILY, public


@pytest.mark.parametrize("code", sorted(set(EXIT) - {"unexpected", "interrupted", "terminated"}))
def test_every_failure_that_a_user_can_cause_has_a_class_of_its_exit_status(code: str) -> None:
    error = public(Failure(code, "text"))

    assert type(error) is FAMILY[EXIT[code]]
    assert (error.code, str(error)) == (code, "text")


def test_a_traceback_has_the_problems_and_hints_that_the_command_prints() -> None:
    problem = Problem("my.yaml", 3, "training.learning_rate", "is below 0")
    error = public(Failure("recipe_invalid", "my.yaml has 1 problem", (problem,), ("its keys: ...",)))
    printed = "".join(traceback.format_exception(error))

    assert "my.yaml:3" in printed
    assert "hint: its keys: ..." in printed
    assert (error.problems, error.hints) == ((problem,), ("its keys: ...",))


def test_the_text_of_an_exception_names_the_first_problem() -> None:
    problems = (Problem("my.yaml", 3, "lora_rr", "did you mean `lora_r`?"), Problem("", None, "", "another"))
    error = public(Failure("recipe_invalid", "my.yaml has 2 problems", problems))

    assert str(error) == "my.yaml has 2 problems: my.yaml:3 lora_rr: did you mean `lora_r`?"
    assert error.message == "my.yaml has 2 problems"
    assert len(error.__notes__) == 2
