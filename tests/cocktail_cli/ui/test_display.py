"""Users see the run URL alone on stdout, lines without a terminal, a table on one."""

import io
import json
from dataclasses import replace

import pytest
from run_story import FINISHED, STARTED, STEP, STORY, URL

from cocktail_cli.ui import Display, View, step_line
from cocktail_cli.ui.display import JsonView, PlainView, QuietView


def told(view: View, err: io.StringIO) -> list[str]:
    for event in STORY:
        view.show(event)
    view.close()
    return err.getvalue().splitlines()


def test_stdout_has_the_line_to_pass_on_and_the_model_and_nothing_else() -> None:
    out, err = io.StringIO(), io.StringIO()
    told(PlainView(out, err), err)

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]


def test_without_a_terminal_each_event_is_a_line_with_its_time() -> None:
    err = io.StringIO()
    lines = told(PlainView(io.StringIO(), err), err)

    step = next(line for line in lines if "step=12/80" in line)
    assert step.split()[1:] == step_line(STEP, 0).split()
    assert "loss=1.8421" in step
    assert "peers=2 tok_s=1200 step_s=0.50 sync_s=0.20 up_kb=11.0" in step
    assert step.endswith("down_kb=14.0 ratio_fp16=137.6 eta_s=34")
    assert any(line.endswith("b left: left") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_invitation_is_two_lines_to_install_and_to_join() -> None:
    screen = io.StringIO()  # a terminal shows both streams
    install = "uv tool install git+https://example.org/cocktail"
    PlainView(screen, screen).show(replace(STARTED, install=install, guests=1))

    lines = screen.getvalue().splitlines()
    assert lines[lines.index(install) + 1] == f"cocktail join {URL}"
    assert "waiting   the first step waits for 1 peer from elsewhere" in lines


def test_an_invitation_without_an_address_has_no_line_that_fails_elsewhere() -> None:
    screen = io.StringIO()
    PlainView(screen, screen).show(replace(STARTED, install=""))

    lines = screen.getvalue().splitlines()
    assert not any("install" in line for line in lines)
    assert any("Tell them where they get cocktail" in line for line in lines)
    assert f"cocktail join {URL}" in lines


def test_quiet_prints_the_url_and_the_folder() -> None:
    out, err = io.StringIO(), io.StringIO()
    told(QuietView(out, err), err)

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]
    assert err.getvalue() == "warning: careful\n"


def test_a_run_that_was_stopped_early_says_how_far_it_came() -> None:
    err = io.StringIO()
    stopped = replace(FINISHED, steps=39, planned=80, reason="stopped by its host")
    PlainView(io.StringIO(), err).show(stopped)

    assert "amber-otter-42 stopped at step 39 of 80 (by its host)" in err.getvalue()
    assert "finished" not in err.getvalue()


def test_json_is_one_object_a_line() -> None:
    out = io.StringIO()
    told(JsonView(out), out)

    names = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert names[0] == "run_started"
    assert names[-1] == "run_finished"


def test_a_table_is_drawn_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    assert not Display().live(io.StringIO())
    assert Display(progress="rich").live(io.StringIO())
