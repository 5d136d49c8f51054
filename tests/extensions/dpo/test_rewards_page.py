"""Rewards of preference pairs where users see them: metrics, sentences, the page of a run, `preview`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from a_run import ARun, a_run
from typer.testing import CliRunner

from cocktail_cli.extensions.dashboard.report_page import page_of
from cocktail_cli.extensions.dpo.keys import Keys
from cocktail_cli.main import app
from cocktail_cli.ui import Metrics, events, sentence

MEANS = {
    "rewards/chosen": 0.5,
    "rewards/rejected": -0.25,
    "rewards/accuracies": 0.75,
    "rewards/margins": 0.75,
}


@pytest.fixture
def run(tmp_path: Path):
    with a_run(tmp_path / "out") as run:
        yield run


def blocks(run: ARun) -> list[Any]:
    found = page_of([run.reader().look()])["sections"]
    return [block for one in found if one["title"] == "Rewards" for block in one["blocks"]]


def test_rewards_have_trls_names_in_json_metrics_and_sentences() -> None:
    assert Keys().named(()) == {}
    told = events.Eval(3, 3, 0.6, 8, Keys().named((0.5, -0.25, 0.75)))
    line = json.loads(events.as_json(told))
    [metrics] = Metrics().lines(told)

    assert line["rewards"] == MEANS
    assert events.from_json(line) == told
    assert {name: metrics[f"eval_{name}"] for name in MEANS} == MEANS
    assert sentence(told) == (
        "eval step=3 loss=0.6000 rewards/chosen=0.500 rewards/rejected=-0.250 rewards/accuracies=0.750 "
        "rewards/margins=0.750"
    )


def test_rewards_of_preference_pairs_are_on_the_page_and_only_there(run: ARun) -> None:
    run.commit("ann")
    assert blocks(run) == []
    run.commit("ann", extra={"rewards": MEANS})
    run.tell(events.Eval(2, 2, 0.6, 8, {"rewards": MEANS | {"rewards/accuracies": 0.625}}), 30.0)

    means_chart, pairs_chart = (given for _, given in blocks(run))

    assert (means_chart["names"], means_chart["columns"]) == (
        ["step", "chosen", "rejected"],
        [[2], [0.5], [-0.25]],
    )
    assert pairs_chart["columns"] == [[2], [0.75], [0.625]]


def test_preview_shows_both_answers_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "It is", "chosen": " a", "rejected": " bc"}))
    typed = ["dpo={}", "lora_r=4", "packing=false", "max_length=24", "datasets.0.type=auto"]
    data = ["preview", "smoke", *typed, "--data", str(tmp_path / "rows.jsonl")]

    said = CliRunner().invoke(app, data).output
    [told] = json.loads(CliRunner().invoke(app, [*data, "--json"]).stdout)["data"]

    assert "chosen    [It is] a<|endoftext|>\nrejected  [It is] bc<|endoftext|>" in said
    assert (told["type"], sum(row["samples"] for row in told["lengths"])) == ("preference", 2)
