"""Trackers are given the numbers of metrics.jsonl; none of them can end a run."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_this_process import Run

from cocktail_cli.assembly import ViewParts, recipe_type, views_of
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.trackers import Tracker, metric_names
from cocktail_cli.host import HostSession
from cocktail_cli.ui import Event, Metrics, RunStarted, events
from recipes.config import Recipe, load_resolved
from recipes.errors import RecipeError
from transport import Ledger
from transport.ledger import Counted, RoundRow

STARTED = RunStarted("amber-otter-42", "cocktail://k.t@h:1/amber-otter-42", "smoke", "9f", 1000, 4, "out")
STEP = events.Step(3, 4, 2, 1.5, 3, accepted=["a", "b"], step_s=2.0, compute_s={"a": 1.2}, wait_s={"a": 0.2})


def load(*overrides: str) -> Recipe:
    return load_resolved("smoke", overrides, extend=recipe_type).recipe


def tracked(folder: Path, *overrides: str, tell: Callable[[Event], None] = pytest.fail) -> list[Any]:
    return views_of(ViewParts(load(*overrides), folder, tell))


def told(tracker: Tracker, started: RunStarted = STARTED) -> None:
    """Give a tracker the start of a run, a step, an evaluation, and an event that holds no number for it."""
    for event in (started, STEP, events.Eval(3, 2, 1.75, 40), events.PeerJoined("d")):
        tracker.show(event)


# ---- keys --------------------------------------------------------------------------------------------------


def test_a_section_turns_trackers_on_and_its_keys_have_bare_names(tmp_path: Path) -> None:
    assert load().extensions == {}
    assert tracked(tmp_path) == tracked(tmp_path, "report_to=none") == []
    assert load("report_to=wandb").extensions["trackers"].report_to == ("wandb",)  # type: ignore[attr-defined]
    assert load("report_to=wandb").recipe_hash == load("trackers.report_to=[wandb]").recipe_hash
    assert load("report_to=wandb").recipe_hash != load("report_to=wandb", "project=mine").recipe_hash
    assert load("report_to=wandb", "trackers=null").recipe_hash == load().recipe_hash


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("logging.report_to=wandb", "it belongs under `trackers:`"),
        ("logging.project=mine", "it belongs under `trackers:`"),
        ("wandb_project=mine", "cocktail calls this trackers.project"),
        ("logging.use_wandb=true", "cocktail calls this trackers.report_to"),
        ("run_name=mine", "there is no such key: trackers show the name of the run"),
        ("trackers.trackio_space_id=x", "there is no such key: trackio writes to the host's disk"),
    ],
)
def test_another_name_or_place_of_its_keys_is_answered_with_that_of_now(override: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(override)

    assert [problem.message for problem in refused.value.problems] == [said]


def test_an_option_that_another_tool_has_is_answered_too(cocktail: Run) -> None:
    typed = cocktail("validate", "smoke", "--wandb-project", "x")

    assert typed.exit == 2
    assert "no such option: --wandb-project" in typed.err
    assert "cocktail calls this trackers.project" in typed.err
    assert cocktail("validate", "smoke", "--report-to", "wandb").exit == 0


# ---- numbers -----------------------------------------------------------------------------------------------


def test_trackers_get_numbers_under_names_that_group_curves() -> None:
    [step] = Metrics().lines(STEP)
    [evaluated] = Metrics().lines(events.Eval(3, 2, 1.75, 40))
    [joined] = Metrics().lines(events.PeerJoined("d"))

    assert metric_names(step)["train/loss"] == 1.5
    assert metric_names(step)["time/sync_s"] == 0.6
    assert metric_names(step)["swarm/late"] == 1.0
    assert metric_names(evaluated) == {"eval/loss": 1.75}
    assert metric_names(joined) == {}


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Callable[..., Broken]:
            assert at == "finish" or name != "finish", "it is let go"
            return lambda *_, **__: refused() if name == at else self

    def refused() -> Broken:
        raise OSError("no\nnetwork")

    monkeypatch.setattr("cocktail_cli.extensions.trackers.import_module", lambda name: Broken())
    heard = list[Any]()
    terminal: Any = SimpleNamespace(show=heard.append)
    session = HostSession(load("report_to=wandb"), tmp_path, [terminal])
    session.views += tracked(tmp_path, "report_to=wandb", tell=session.news.put)
    for event in (STARTED, STEP, STEP):
        session.show(event)
        session.show_news()
    session.close()

    said = [event.message for event in heard if event not in (STARTED, STEP)]
    assert said == ["wandb does not take the run's numbers (no network): metrics.jsonl has them"]
    assert heard.count(STEP) == 2


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.trackers.find_spec", lambda name: None)

    with pytest.raises(Failure, match="wandb is not installed") as failed:
        tracked(tmp_path, "report_to=wandb")

    assert failed.value.exit == 4


def test_tensorboard_reads_what_it_is_given_and_rounds_that_a_killed_hub_could_not_report(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Ledger(tmp_path / "ledger", run="amber-otter-42", samples=8) as ledger:
        for round in range(3):
            row = RoundRow(round, round, 100.0, 101.0 + round, 7, ("a", "b"), ("a",), 2.0 - round, 50)
            ledger.commit(row, b"packet", (Counted(round, "a", "s", ((2 * round, 2 * round + 2),)),))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "round": 0, "loss": 2.0}\n')

    [tracker] = tracked(tmp_path, "report_to=tensorboard", "global_batch_size=2")
    told(tracker, RunStarted(**(vars(STARTED) | {"round": 3})))
    tracker.close()

    read = EventAccumulator(str(tmp_path / "tracking")).Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [(2, 1.0), (3, 0.0), (3, 1.5)]
    assert [(each.step, each.value) for each in read.Scalars("eval/loss")] == [(3, 1.75)]


def test_wandb_takes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    [tracker] = tracked(tmp_path, "report_to=wandb", "project=mine")
    told(tracker)

    assert (tracker.run.project, tracker.run.name, tracker.run.id) == ("mine", STARTED.run, STARTED.run)
    assert tracker.run.config["recipe_hash"] == load("report_to=wandb", "project=mine").recipe_hash
    numbers = {name: tracker.run.summary[name] for name in ("train/loss", "eval/loss", "step", "round")}
    assert numbers == {"train/loss": 1.5, "eval/loss": 1.75, "step": 3, "round": 2}
    tracker.close()
    assert list((tmp_path / "tracking").rglob("run-*.wandb"))


def test_trackio_takes_a_run_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # a trainer of another test may have imported it
    [tracker] = tracked(tmp_path, "report_to=trackio", "project=mine")
    told(tracker)
    tracker.close()

    (database,) = (tmp_path / "trackio").glob("mine.db")
    with closing(sqlite3.connect(database)) as opened:
        rows = opened.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(run, step) for run, step, _ in rows] == [(STARTED.run, 3), (STARTED.run, 3)]
    step, evaluated = (json.loads(numbers) for _, _, numbers in rows)
    assert (step["train/loss"], step["round"], evaluated["eval/loss"]) == (1.5, 2, 1.75)
