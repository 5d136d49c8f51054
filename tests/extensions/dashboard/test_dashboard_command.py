"""`cocktail dashboard` from the outside, and the page that a launch starts."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from a_run import a_run
from in_this_process import Run
from test_remote_reader import answer

from cocktail_cli.assembly import View, ViewParts, views_of
from cocktail_cli.extensions.dashboard import PageOpened, PageProcess
from cocktail_cli.extensions.dashboard.command import page_source, source_of
from cocktail_cli.extensions.dashboard.report_page import page_of
from cocktail_cli.host import run_folder
from cocktail_cli.machine import save_run
from cocktail_cli.ui import RunStarted, Warning, events, from_json, sentence
from recipes.config import load_recipe
from transport import RunKeys

STARTED = RunStarted("amber-otter-42", "cocktail://k.t@h:1/amber-otter-42", "smoke", "9f", 1000, 4, "out")


def opened(folder: Path) -> tuple[View, Any]:
    """Start the page of a launch; return its view, and the event that says what became of it."""
    told = SimpleQueue[Any]()
    [page] = views_of(ViewParts(load_recipe("smoke"), folder, told.put), {"dashboard": {"dashboard": True}})
    page.show(STARTED)
    return page, told.get(timeout=120)


@pytest.mark.slow
def test_the_dashboard_of_a_launch_is_a_process_that_prints_its_address(tmp_path: Path) -> None:
    with a_run(tmp_path / "out") as run:
        page, event = opened(run.folder)
        assert isinstance(event, PageOpened)
        address, _, key = event.url.partition("#key=")
        ask = urllib.request.Request(f"{address}join", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(ask, timeout=10) as answer:
            line = answer.read().decode()
        assert isinstance(page, PageProcess)
        assert page.process is not None
        page.process.kill()
        page.process.wait()
        page.close()

    assert line == f"cocktail join {run.record.url}"


@pytest.mark.slow
def test_a_dashboard_that_cannot_start_is_only_a_warning(tmp_path: Path) -> None:
    page, event = opened(tmp_path)
    page.close()

    assert isinstance(event, Warning)
    assert event.message == f"there is no page: {tmp_path} holds no run (no run.json)"


def test_a_launch_that_does_not_ask_for_a_page_has_none(tmp_path: Path) -> None:
    assert views_of(ViewParts(load_recipe("smoke"), tmp_path, pytest.fail)) == []


@pytest.mark.parametrize("command", ["launch smoke", "resume nobody-42"])
def test_a_page_of_a_launch_in_the_background_is_a_usage_error(cocktail: Run, command: str) -> None:
    said = cocktail(*command.split(), "--detach", "--dashboard")

    assert said.exit == 2
    assert "nobody to show a page to" in said.err
    assert "cocktail dashboard RUN shows it at any time" in said.err


def test_the_address_of_a_page_is_told_to_people_and_programs() -> None:
    event = PageOpened("http://127.0.0.1:29480/#key=secret")

    assert sentence(event) == "page: http://127.0.0.1:29480/#key=secret"
    assert from_json(json.loads(events.as_json(event))) == event


def test_the_dashboards_key_is_not_in_the_recorded_events(tmp_path: Path) -> None:
    recorder = run_folder.Recorder(tmp_path)
    recorder.show(PageOpened("http://127.0.0.1:29480/#key=secret"))
    recorder.close()

    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["url"]) == ("page_opened", "http://127.0.0.1:29480/")


def test_dashboard_without_a_name_shows_the_only_running_run(tmp_path: Path) -> None:
    with a_run(tmp_path / "out") as run:
        _, line = page_source([])

        assert line().splitlines()[-1] == f"cocktail join {run.record.url}"


def test_the_dashboards_join_line_is_the_newest_and_empty_after_the_run(tmp_path: Path) -> None:
    with a_run(tmp_path / "out") as run:
        _, line = source_of(run.record.run)
        new = run.record.with_token(RunKeys.new_token())
        save_run(new)
        *_, rotated = line().splitlines()
        run.finish(9.0)

        assert rotated == f"cocktail join {new.url}" != f"cocktail join {run.record.url}"
        assert line() == ""


@pytest.mark.slow
def test_the_process_of_a_page_never_imports_torch(tmp_path: Path) -> None:
    """Importing torch would take seconds and gigabytes beside the run."""
    code = """if True:
        import sys
        from cocktail_cli.extensions.dashboard.command import page_source
        from cocktail_cli.extensions.dashboard.web_server import Page, PageServer

        look, line = page_source(sys.argv[1:])
        page = Page(look, "key", line)
        PageServer(page)
        for path in ("/run.json", "/metrics"):
            assert "amber-otter-42" in page.answer("GET", path, {"host": "localhost"}, "127.0.0.1").text
        print({"torch", "transformers", "numpy"} & sys.modules.keys() or "light")
    """
    with a_run(tmp_path / "out") as run:
        run.commit("ann")
        said = subprocess.run([sys.executable, "-c", code, str(run.folder)], capture_output=True, text=True)

    assert said.stdout == "light\n", said.stderr


def test_dashboard_without_a_running_run_asks_which(cocktail: Run, tmp_path: Path) -> None:
    with a_run(tmp_path / "out") as run:
        run.finish(9.0)
    said = cocktail("dashboard")

    assert (said.exit, "which run? Going on here: none" in said.err) == (2, True)


def test_dashboard_of_a_run_url_reads_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42"))
    (tmp_path / "line").write_text(url + "\n")
    monkeypatch.setattr("transport.ask_status", lambda *_, **__: answer(4, ("ann", 0)))

    for given in (url, f"@{tmp_path / 'line'}"):
        look, line = source_of(given)
        assert "before this page was opened" in look().note
        assert line().splitlines()[-1] == f"cocktail join {url}"


def test_dashboard_of_two_runs_compares_them_without_a_join_line(tmp_path: Path) -> None:
    with a_run(tmp_path / "one") as one, a_run(tmp_path / "two", name="rusty-heron-7") as two:
        look, line = page_source([one.record.run, str(two.folder)])
        before = page_of(look())
        two.commit("ann", loss=3.5)

        assert before["headline"] == "amber-otter-42 and rusty-heron-7, compared"
        assert [one["title"] for one in before["sections"]] == ["Figures", "Recipes"]
        assert page_of(look())["sections"][0]["title"] == "Loss"
        assert line() == ""


def test_two_run_urls_on_the_command_line_are_refused(cocktail: Run) -> None:
    url = str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42"))
    said = cocktail("dashboard", url, f"{url}x")

    assert (said.exit, "more than one run URL" in said.err, url in said.err) == (2, True, False)


def test_dashboard_of_an_unreachable_run_fails(cocktail: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    said = cocktail("dashboard", str(RunKeys.generate().url("127.0.0.1", port, "amber-otter-42")))

    assert (said.exit, "cannot be reached: no connection" in said.err, said.out) == (5, True, "")


def test_an_unknown_run_is_exit_3_and_a_cut_url_exit_2(cocktail: Run) -> None:
    assert cocktail("dashboard", "nobody-42").exit == 3
    assert cocktail("dashboard", "cocktail://abc").exit == 2
