"""Compared runs share their charts, and only what differs between their recipes is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cocktail_cli.dashboard import RunHistory, check_comparable, compared, recipe_differences
from cocktail_cli.dashboard.comparison import MOST, losses_by_bytes, unit_of
from cocktail_cli.dashboard.markup import html
from cocktail_cli.dashboard.run_history import About, Evaluation, Round
from cocktail_cli.errors import Failure


def history(
    name: str, loss: float, recipe: str = "training: {max_steps: 9, learning_rate: 0.1}"
) -> RunHistory:
    about = About(name, recipe="smoke", recipe_text=recipe, base_sha256="ba5e" * 16)
    rounds = tuple(Round(n, n + 1, 10.0 * n, 10.0, loss - n / 10, ("ann",), tokens=100) for n in range(5))
    return RunHistory(about, "finished", 5, 9, 0.0, 50.0, rounds, evaluations=(Evaluation(4, 5, loss),))


def test_the_curves_of_all_runs_are_in_one_chart_with_a_legend() -> None:
    page = compared([history(f"run-{number}", 4.0 + number) for number in range(MOST)])

    loss = next(one for one in page.sections if one.get("id") == "loss")
    looks = [group.get("class") for group in loss.iter("g") if str(group.get("class")).startswith("series ")]
    assert [looks.count(f"series {look}") for look in "abcd"] == [2, 2, 2, 2]  # a curve, and its legend
    assert all(f">run-{number}<" in html(loss) for number in range(MOST))
    assert page.sections[0] is loss


def test_losses_are_shown_over_all_bytes_until_then() -> None:
    run = history("one", 4.0)
    sent = replace(run, rounds=tuple(replace(r, up=400_000, down=600_000) for r in run.rounds))

    assert losses_by_bytes(sent, 1000) == [(1000.0 * (n + 1), 4.0 - n / 10) for n in range(5)]
    assert losses_by_bytes(run, 1000) == [], "where bytes are not known there is nothing to show"
    assert [one.get("id") for one in compared([run, sent]).sections][:4] == ["loss", "held", "bytes", "speed"]
    assert [unit_of(most)[0] for most in (0, 99_999, 100_000, 5 * 10**9)] == ["bytes", "bytes", "kB", "MB"]


def test_only_keys_that_differ_are_listed() -> None:
    first = history("one", 4.0)
    second = history("two", 4.0, "{training: {max_steps: 9, learning_rate: 0.2}, lora: {lora_r: 8}}")

    assert recipe_differences([first, second]) == [
        ["training.learning_rate", "0.1", "0.2"],
        ["lora.lora_r", "-", "8"],
    ]
    assert recipe_differences([first, replace(first, about=replace(first.about, run="three"))]) == []


def test_a_run_without_rounds_is_compared_too() -> None:
    young = replace(history("young", 4.0), rounds=(), evaluations=(), step=0)

    text = "".join(map(html, compared([young, history("old", 4.0)]).sections))

    assert "0 of 9" in text
    assert "young" in text
    assert compared([young, replace(young, about=About("other"))]).sections


def test_too_many_runs_and_a_run_twice_are_usage_errors() -> None:
    with pytest.raises(Failure, match="at most 4"):
        check_comparable([f"run-{number}" for number in range(MOST + 1)])
    with pytest.raises(Failure, match="one cannot be compared with itself"):
        check_comparable(["one", "two", "one"])
