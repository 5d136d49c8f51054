"""`cocktail logs`: the last lines of a run or of its local peer, and the new ones until it is over."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from in_this_process import Run
from test_run_registry import record

from cocktail_cli.commands import status
from cocktail_cli.machine import RunRecord, save_run
from cocktail_cli.ui import Progressed, Warning, events


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """A run that is over, with the logs of its hub and of a local peer."""
    known = replace(record(tmp_path / "out"), state="finished")
    save_run(known)
    told = " INFO cocktail_cli.told: "
    lines = [f"2026-11-23 09:00:0{n},000{told}step={n}/3\n" for n in (1, 2, 3)]
    (tmp_path / "out" / "cocktail.log").write_text("".join(lines) + "cut")
    (tmp_path / "out" / "events.jsonl").write_text(events.as_json(Progressed("starting")) + "\n")
    (tmp_path / "out" / "peers").mkdir()
    error = json.dumps({"v": 1, "error": {"message": "no GPU"}})
    peer = f"{events.as_json(Warning('slow disk'))}\n{error}\n"
    (tmp_path / "out" / "peers" / "local-1.jsonl").write_text(peer)
    (tmp_path / "out" / "peers" / "local-1.log").write_text("Traceback: of a crash\n")
    return known


def test_the_last_lines_are_printed_without_the_loggers_name(cocktail: Run, run: RunRecord) -> None:
    said = cocktail("logs", run.run, "-n", "2")

    assert said.out == "2026-11-23 09:00:02,000 step=2/3\n2026-11-23 09:00:03,000 step=3/3\n"
    assert cocktail("logs", "out", "-n", "0").out == ""


def test_a_local_peers_events_are_sentences(cocktail: Run, run: RunRecord) -> None:
    lines = cocktail("logs", run.run, "local-1").out.splitlines()

    assert lines[0].endswith("Z warning: slow disk")
    assert lines[1:] == ["error: no GPU", "Traceback: of a crash"]


def test_json_gives_the_events_as_they_are(cocktail: Run, run: RunRecord) -> None:
    assert json.loads(cocktail("logs", run.run, "--json").out)["state"] == "starting"


def test_an_unknown_peer_is_a_usage_error_with_the_nearest_name(cocktail: Run, run: RunRecord) -> None:
    said = cocktail("logs", run.run, "local-2")

    assert said.exit == 2
    assert said.err.splitlines()[-1] == "hint: did you mean local-1?"


def test_follow_prints_what_is_written_until_the_run_is_over(
    cocktail: Run, run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a line that was cut is printed with its beginning, once."""
    states = iter(["running", "running", "finished"])
    written = iter([" off\n", "next\n", "last\n"])

    def state(_: RunRecord) -> str:
        with (tmp_path / "out" / "cocktail.log").open("a") as file:
            file.write(next(written))
        return next(states)

    monkeypatch.setattr(RunRecord, "state_now", state)
    monkeypatch.setattr(status, "LOOK_EVERY", 0.0)

    assert cocktail("logs", run.run, "-f", "-n", "0").out.splitlines() == ["cut off", "next", "last"]
