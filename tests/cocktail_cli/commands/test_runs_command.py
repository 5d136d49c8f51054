"""`cocktail runs`: every run of this machine, with how far it came, and without its secrets."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from in_this_process import Run
from test_run_registry import record

from cocktail_cli.machine import save_run
from recipes.config import load_recipe


def ago(**time: float) -> str:
    return (datetime.now(UTC) - timedelta(**time)).strftime("%Y-%m-%dT%H:%M:%SZ")


def two_runs(folder: Path) -> None:
    """Store a finished run of three days ago, and one that was killed at step 7 of 20 just now."""
    old = record(folder / "old")
    save_run(replace(old, state="finished", steps=9, planned=9, started=ago(days=3)))
    killed = replace(record(folder / "new", "brisk-finch-10"), port=1, bind="127.0.0.1", planned=20)
    save_run(replace(killed, url="cocktail://k.t@127.0.0.1:1/r", started=ago(minutes=4)))
    (folder / "new" / "recipe.json").write_text(load_recipe("smoke").to_json())
    lines = [{"kind": "step", "step": 6}, {"kind": "step", "step": 7}, {"kind": "eval", "step": 7}]
    text = "".join(json.dumps({"v": 1, **line}) + "\n" for line in lines)
    (folder / "new" / "metrics.jsonl").write_text(text + '{"v": 1, "kind": "step", "st')


def test_runs_are_listed_the_newest_first_with_state_step_model_and_age(
    cocktail: Run, tmp_path: Path
) -> None:
    two_runs(tmp_path)
    head, new, old = cocktail("runs").out.splitlines()

    assert head.split() == ["RUN", "STATE", "STEP", "MODEL", "AGE", "FOLDER"]
    assert new.split() == [
        *["brisk-finch-10", "died", "7/20", "builtin:tiny-gpt-neox", "4", "min"],
        str(tmp_path / "new"),
    ]
    assert old.split() == [*["amber-otter-42", "finished", "9/9", "?", "3", "days"], str(tmp_path / "old")]
    assert cocktail("runs", "-q").out.split() == ["brisk-finch-10", "amber-otter-42"]


def test_runs_as_json_hold_no_secret(cocktail: Run, tmp_path: Path) -> None:
    two_runs(tmp_path)
    (new, old) = json.loads(cocktail("runs", "--json").out)["runs"]

    assert [new[key] for key in ("run", "state", "step", "planned")] == ["brisk-finch-10", "died", 7, 20]
    assert {"url", "keys"} & (new.keys() | old.keys()) == set()


def test_a_machine_without_runs_names_the_first_command(cocktail: Run) -> None:
    said = cocktail("runs")

    assert (said.exit, said.out) == (0, "")
    assert "cocktail launch smoke" in said.err


def test_a_run_that_was_stopped_has_the_last_loss_that_it_had_and_who_stopped_it(
    cocktail: Run, tmp_path: Path
) -> None:
    save_run(replace(record(tmp_path / "out"), state="paused", reason="paused by its host (SIGTERM)"))
    lines = [{"kind": "step", "step": 6, "loss": 4.5}, {"kind": "step", "step": 7, "loss": None}]
    text = "".join(json.dumps({"v": 1, **line}) + "\n" for line in lines)
    (tmp_path / "out" / "metrics.jsonl").write_text(text)

    said = json.loads(cocktail("status", str(tmp_path / "out"), "--json").out)

    assert (said["loss"], said["reason"]) == (4.5, "paused by its host (SIGTERM)")
