"""Rewards of preference pairs where users see them: metrics, sentences, the page of a run, `preview`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from cocktail_cli.extensions.dpo import RewardsOnPage
from cocktail_cli.extensions.dpo.keys import Keys
from cocktail_cli.main import app
from cocktail_cli.ui import Metrics, events, sentence

MEANS = {
    "rewards/chosen": 0.5,
    "rewards/rejected": -0.25,
    "rewards/accuracies": 0.75,
    "rewards/margins": 0.75,
}


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


def test_rewards_of_preference_pairs_are_on_the_page_and_only_there() -> None:
    part, known = RewardsOnPage(), None
    told: list[events.Event] = [
        events.Step(1, 20, 0, 4.0, 1),
        events.Step(2, 20, 1, 4.0, 1, extra={"rewards": MEANS}),
        events.Eval(2, 2, 0.6, 8, {"rewards": MEANS | {"rewards/accuracies": 0.625}}),
    ]
    for event in told[:1]:
        known = part.heard(known, json.loads(events.as_json(event)))
    assert known is None
    for event in told[1:]:
        known = part.heard(known, json.loads(events.as_json(event)))

    means, pairs = (given["curves"] for _, given in part.show(known).sections["Rewards"])

    assert means == {"chosen": [(2, 0.5)], "rejected": [(2, -0.25)]}
    assert pairs == {"share of pairs": [(2, 0.75)], "held-out": [(2, 0.625)]}


def test_preview_shows_both_answers_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "It is", "chosen": " a", "rejected": " bc"}))
    typed = ["dpo={}", "lora_r=4", "packing=false", "max_length=24", "datasets.0.type=auto"]
    data = ["preview", "smoke", *typed, "--data", str(tmp_path / "rows.jsonl")]

    said = CliRunner().invoke(app, data).output
    [told] = json.loads(CliRunner().invoke(app, [*data, "--json"]).stdout)["data"]

    assert "chosen    [It is] a<|endoftext|>\nrejected  [It is] bc<|endoftext|>" in said
    assert (told["type"], sum(row["samples"] for row in told["lengths"])) == ("preference", 2)
