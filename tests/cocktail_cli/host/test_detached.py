"""A run that goes on by itself (`--detach`), one beside another (`--fresh`), one that is paused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_this_process import Run
from stalling_hub import SMALL
from test_run_registry import record
from waiting import until

from cocktail_cli.errors import Failure
from cocktail_cli.host import local_peers
from cocktail_cli.host.run_folder import unused_folder
from cocktail_cli.machine import load_run, save_run
from cocktail_cli.ui import Event, Progressed, RunStarted, Warning, events, from_json

STARTED = RunStarted(
    "amber-otter-42", "cocktail://k.t@h:1/amber-otter-42", "smoke", "abc", 9, 20, "outputs/smoke"
)


class Told:
    """A view that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def show(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the other process be one that says these lines, and ends."""

    def saying(*lines: str, status: int = 0) -> None:
        script = (
            f"import sys; print({chr(10).join(lines)!r}); print('crash', file=sys.stderr); sys.exit({status})"
        )
        starts = subprocess.Popen

        def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
            assert command[command.index("-m") :][:3] == ["-m", "cocktail_cli", "launch"]
            return starts([sys.executable, "-c", script], **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return saying


def test_every_event_can_be_told_to_another_process_of_ours() -> None:
    for kind in set(Event.__subclasses__()) - {events.OfExtension}:
        fields = {field.name: field.type for field in kind.__dataclass_fields__.values()}
        values: dict[str, Any] = {name: 1 if "int" in of else "one" for name, of in fields.items()}
        event = kind(**values | ({"extra": {"of an extension": 1}} if "extra" in fields else {}))

        assert from_json(json.loads(events.as_json(event))) == event


def test_the_other_process_is_listened_to_until_its_run_has_started(says: Any, tmp_path: Path) -> None:
    says(*map(events.as_json, (Progressed("starting"), Warning("late"), STARTED, Progressed("training"))))
    view = Told()
    local_peers.start_detached(["launch", "smoke", "--detach"], tmp_path, view)

    assert view.events == [Progressed("starting"), Warning("late"), STARTED]
    assert view.closed


def test_its_failure_is_that_of_the_command(says: Any, tmp_path: Path) -> None:
    failed = Failure("port_in_use", "cannot listen on 127.0.0.1:1: taken", hints=("another --port",))
    says(events.as_json(Progressed("starting")), failed.as_json(), status=4)
    with pytest.raises(Failure, match="taken") as caught:
        local_peers.start_detached(["launch", "smoke", "--detach"], tmp_path, Told())

    assert (caught.value.exit, caught.value.hints) == (4, ("another --port",))


def test_one_that_crashes_has_said_why_in_the_log(says: Any, tmp_path: Path) -> None:
    says(events.as_json(Progressed("starting")), status=9)
    with pytest.raises(Failure, match="ended with exit 9") as caught:
        local_peers.start_detached(["launch", "smoke", "--detach"], tmp_path, Told())

    assert str(tmp_path / "cocktail.log") in caught.value.hints[0]
    assert "crash" in (tmp_path / "cocktail.log").read_text()


def test_the_other_process_is_given_the_same_words_in_the_folder_that_was_found() -> None:
    words = ["launch", "smoke", "--fresh", "--detach", "-o", "out", "--", "name=--detach"]

    assert local_peers.detached_command(words, Path("/runs/out-2")) == [
        *("launch", "--json", "--detached", "smoke", "-o", "out", "-o", "/runs/out-2", "--", "name=--detach")
    ]


def test_a_fresh_run_lies_beside_the_one_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "smoke"
    assert unused_folder(folder) == folder
    save_run(record(folder))
    assert unused_folder(folder) == tmp_path / "smoke-2"
    (tmp_path / "smoke-2").mkdir()

    assert unused_folder(folder) == tmp_path / "smoke-3"


def test_a_paused_run_says_how_it_goes_on(cocktail: Run, tmp_path: Path) -> None:
    save_run(replace(record(tmp_path / "out"), state="paused", steps=7, planned=20))

    assert "amber-otter-42 · paused · step 7/20" in cocktail("status", "amber-otter-42").out
    assert cocktail("status", "amber-otter-42").err == "Next: cocktail resume amber-otter-42\n"
    assert cocktail("stop", "amber-otter-42").out.splitlines()[-1] == "cocktail resume amber-otter-42"


@pytest.mark.slow
@pytest.mark.usefixtures("fast_starts")
def test_a_detached_run_outlives_its_launch_is_reached_and_paused(cocktail: Run, tmp_path: Path) -> None:
    options = ["--no-train", "--port", "0", "--bind", "127.0.0.1", "-o", "out", *SMALL]
    said = cocktail("launch", "smoke", "--detach", "-q", *options)
    run = load_run("out")

    assert (said.exit, said.out.strip()) == (0, run.url)
    assert json.loads(cocktail("status", run.run, "--json").out)["state"] == "waiting"
    assert cocktail("stop", run.run, "--pause").exit == 0
    log, last = tmp_path / "out" / "cocktail.log", "is paused after 0 of"  # written after run.json's state
    until(lambda: last in log.read_text(), 60)
    assert load_run("out").state == "paused"
