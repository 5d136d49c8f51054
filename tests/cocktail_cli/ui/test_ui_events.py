"""`--json` is an interface: one line an event, versioned, with names that do not change."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cocktail_cli.host import run_folder
from cocktail_cli.ui import Warning, events, timestamp
from cocktail_cli.ui.events import Eval, PeerLeft, RunFinished, Step, as_json, from_json, name_of

NOON = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def test_an_event_is_one_line_with_version_time_and_name() -> None:
    line = as_json(PeerLeft("attic", "left: Ctrl-C"), NOON)

    assert "\n" not in line
    assert json.loads(line) == {
        "v": 1,
        "t": "2026-11-20T12:00:00Z",
        "event": "peer_left",
        "peer": "attic",
        "reason": "left: Ctrl-C",
        "legacy_bytes": 0,
        "how": "left",
    }


def test_a_step_tells_bytes_of_each_peer_and_the_fingerprint() -> None:
    step = Step(3, 20, 4, loss=None, peers=1, up_bytes={"a": 10}, down_bytes={"a": 20}, fingerprint="00ff")

    told = json.loads(as_json(step))

    assert told["event"] == "step"
    assert told["loss"] is None
    assert (told["up_bytes"], told["down_bytes"], told["fingerprint"]) == ({"a": 10}, {"a": 20}, "00ff")


def test_fields_of_extensions_are_in_the_line_of_a_step_and_cannot_replace_its_own() -> None:
    step = Step(3, 20, 4, loss=None, peers=1, extra={"hottest": 71, "loss": 9.0})

    told = json.loads(as_json(step))

    assert (told["hottest"], told["loss"], told["event"]) == (71, None, "step")
    assert "extra" not in told
    again = from_json(told)
    assert isinstance(again, Step)
    assert again.extra == {"hottest": 71}
    assert getattr(again, "hottest") == 71  # noqa: B009  # for mypy a step has no such field
    assert not hasattr(again, "coldest")


def test_an_event_that_nobody_has_defined_is_an_error() -> None:
    with pytest.raises(LookupError):
        from_json({"v": 1, "t": "2026-11-20T12:00:00Z", "event": "nothing_of_ours"})
    assert not hasattr(events, "NothingOfOurs")


def test_names_of_events_are_those_of_the_documentation() -> None:
    events = [Eval(0, 0, 1.0), Warning("careful"), RunFinished("r", "m", 1, None, "finished")]

    assert [name_of(type(event)) for event in events] == ["eval", "warning", "run_finished"]


def test_times_are_utc() -> None:
    assert timestamp(NOON) == "2026-11-20T12:00:00Z"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_diary_on_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """The warning comes once, and what did not fit is written later."""
    told: list[str] = []
    recorder = run_folder.Recorder(tmp_path, told.append)
    real, recorder.events = recorder.events, open("/dev/full", "w")  # noqa: SIM115
    recorder.show(Warning("one"))
    recorder.show(Warning("two"))
    recorder.events = real
    recorder.show(Warning("three"))
    recorder.close()

    assert told == ["events.jsonl cannot be written: No space left on device; the run goes on"]
    assert json.loads((tmp_path / "events.jsonl").read_text())["message"] == "three"
