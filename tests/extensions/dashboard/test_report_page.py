"""The document of a page: curves as columns, texts made safe, and of compared runs only what differs."""

import json
import math
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.dashboard.report_page import (
    MOST,
    ROWS,
    RUNS,
    Document,
    Kind,
    chart,
    check_comparable,
    differing_keys,
    document,
    downsample,
    losses_by_bytes,
    page_of,
)
from cocktail_cli.extensions.dashboard.run_history import (
    About,
    Presence,
    Round,
    RunHistory,
    with_recipe,
)
from cocktail_cli.extensions.dashboard.web_server import read_part
from cocktail_cli.foreign_text import paragraphs
from recipes.config import load_recipe

finite = some.floats(min_value=1e-6, max_value=1e9)


def history(
    name: str, loss: float, recipe: str = "training: {max_steps: 9, learning_rate: 0.1}"
) -> RunHistory:
    about = About(name, recipe="smoke", recipe_text=recipe, base_sha256="ba5e" * 16)
    rounds = tuple(Round(n, n + 1, 10.0 * n, 10.0, loss - n / 10, ("ann",), tokens=100) for n in range(5))
    return RunHistory(about, "finished", 5, 9, 0.0, 50.0, rounds, evaluations=((5, loss),))


def blocks(page: Document, title: str) -> list[Any]:
    return [block for one in page["sections"] if one["title"] == title for block in one["blocks"]]


def only_chart(*points: tuple[float, float], **more: Any) -> dict[str, Any]:
    ((_, made),) = chart("Loss", {"training": points}, **more)
    return made


@settings(max_examples=30)
@given(some.lists(some.tuples(finite, finite), min_size=1, max_size=1000))
def test_thinned_points_keep_the_last_the_order_and_the_range(points: list[tuple[float, float]]) -> None:
    points = sorted(points)
    few = downsample(points)

    assert len(few) == min(len(points), MOST)
    assert few[-1] == points[-1]
    assert [x for x, _ in few] == sorted(x for x, _ in few)
    low, high = min(y for _, y in points), max(y for _, y in points)
    assert all(low * (1 - 1e-5) <= y <= high * (1 + 1e-5) for _, y in few)


def test_curves_over_other_steps_share_a_column_of_steps() -> None:
    ((_, made),) = chart("Loss", {"training": [(1, 4.0), (2, 3.0)], "held-out": [(2, 3.5)], "none": []})

    assert (made["names"], made["columns"]) == (
        ["step", "training", "held-out"],
        [[1, 2], [4.0, 3.0], [None, 3.5]],
    )
    assert (made["title"], made["said"]) == ("Loss by step", "training fell from 4 to 3; held-out is 3.5")


def test_a_loss_that_is_no_number_is_left_out_as_json_has_none() -> None:
    assert only_chart((1, math.nan), (2, 3.0), (3, math.inf))["columns"] == [[2], [3.0]]
    assert chart("Loss", {"training": [(1, math.nan)]}) == []


def test_values_far_apart_are_drawn_on_a_log_axis() -> None:
    """The first round has almost nothing to send, or the whole model: others would lie on the axis."""
    assert only_chart((0, 1e9), (1, 1000.0), (2, 2000.0))["log"]
    assert not only_chart((0, 3000.0), (1, 1000.0), (2, 2000.0))["log"]
    assert not only_chart((0, 1e9), (1, 0.0), (2, 2000.0))["log"], "0 has no place on it"


@settings(max_examples=30)
@given(some.text())
def test_every_text_of_a_page_is_made_safe_to_show(text: str) -> None:
    made = document(text, text, text, {"Summary": [("p", text), ("figures", {text: text})]})

    safe = paragraphs(text)
    assert (made["title"], made["sections"][0]["blocks"]) == (safe, [("p", safe), ("figures", {safe: safe})])


def test_the_script_can_draw_every_kind_of_block() -> None:
    functions = read_part("page.js").partition("const DRAW = {")[2].partition("\n};")[0]

    assert {*re.findall(r"^  (\w+): \(", functions, re.MULTILINE)} == {*get_args(Kind)}


def test_more_peers_than_rows_are_counted_and_a_round_without_one_is_crossed() -> None:
    stays = tuple(Presence(f"peer-{n}", 10.0) for n in range(ROWS + 7))
    late = Round(0, 1, 30.0, 10.0, 4.0, ("peer-0",), left_out=("peer-0",))
    page = page_of([RunHistory(About("one"), "running", started=0.0, seen=50.0, rounds=(late,), stays=stays)])

    ((kind, made),) = blocks(page, "Peers")

    assert (kind, len(made["rows"]), made["left"], made["stop"]) == ("bars", ROWS, 7, 50.0)
    assert [(bar["start"], bar["wide"], bar["look"]) for bar in made["rows"]["peer-0"]] == [
        (10.0, 40.0, ""),
        (30.0, 0.0, "cross"),
    ]
    assert (made["ticks"][0], made["ticks"][-1]) == ("0 s", "50 s")


def test_the_curves_of_all_runs_are_in_one_chart() -> None:
    page = page_of([history(f"run-{number}", 4.0 + number) for number in range(RUNS)])

    assert page["sections"][0]["title"] == "Loss"
    ((_, loss),) = page["sections"][0]["blocks"]
    assert loss["names"] == ["step", *(f"run-{number}" for number in range(RUNS))]
    assert loss["columns"][2] == pytest.approx([5.0 - n / 10 for n in range(5)])


def test_losses_are_shown_over_all_bytes_until_then() -> None:
    run = history("one", 4.0)
    sent = replace(run, rounds=tuple(replace(r, up=400, down=600) for r in run.rounds))

    assert losses_by_bytes(sent) == [(1000 * (n + 1), 4.0 - n / 10) for n in range(5)]
    assert losses_by_bytes(run) == [], "where bytes are not known there is nothing to show"
    page = page_of([run, replace(sent, about=About("two"))])
    assert [one["title"] for one in page["sections"]][:3] == ["Loss", "Held-out loss", "Loss by bytes"]


def test_only_keys_that_differ_are_listed() -> None:
    first = history("one", 4.0)
    second = history("two", 4.0, "{training: {max_steps: 9, learning_rate: 0.2}, lora: {lora_r: 8}}")

    rows = [["training.learning_rate", "0.1", "0.2"], ["lora.lora_r", "-", "8"]]
    assert differing_keys([first, second]) == rows
    ((kind, said),) = blocks(
        page_of([first, replace(first, about=replace(first.about, run="three"))]), "Recipes"
    )
    assert (kind, said) == ("p", "The recipes, the base models and the data are the same.")


def test_runs_are_labelled_by_what_differs_and_a_default_is_named() -> None:
    def run(name: str, *overrides: str) -> RunHistory:
        told = load_recipe("smoke", overrides).to_json()
        return replace(history(name, 4.0), about=with_recipe(About(name), told))

    def legend(*runs: RunHistory) -> list[str]:
        ((_, loss),) = blocks(page_of(runs), "Loss")
        return loss["names"][1:]

    paper = ("preset=cocktail-paper", "seed=3")
    assert legend(run("one"), run("two", *paper)) == ["cocktail, one", "cocktail-paper, two"]
    assert legend(run("one"), run("two", "seed=3")) == ["seed=42, one", "seed=3, two"]
    assert legend(run("one"), run("two")) == ["one", "two"]


def test_curves_that_end_far_apart_have_a_log_axis_of_x() -> None:
    def log_x(first: float, second: float) -> bool:
        ((_, made),) = chart("Loss", {"a": [(1, 4.0), (first, 3.0)], "b": [(2, 4.0), (second, 3.0)]})
        return made["logX"]

    assert (log_x(300, 30_000), log_x(300, 400)) == (True, False)


def test_a_run_without_rounds_is_compared_too() -> None:
    young = replace(history("young", 4.0), rounds=(), evaluations=(), step=0)

    page = page_of([young, history("old", 4.0)])

    assert "0 / 9" in json.dumps(page)
    assert "young" in page["title"]
    assert page_of([young, replace(young, about=About("other"))])["sections"]


def test_too_many_runs_and_a_run_twice_are_usage_errors() -> None:
    with pytest.raises(Failure, match="at most 4"):
        check_comparable([f"run-{number}" for number in range(RUNS + 1)])
    with pytest.raises(Failure, match="one cannot be compared with itself"):
        check_comparable(["one", "two", "one"])
