"""What a user sees: the run URL alone on stdout, lines without a terminal, a table on one."""

from __future__ import annotations

import io
import json

import pytest

from cocktail_cli.board import TOP, Board, megabytes, sparkline
from cocktail_cli.events import Eval, PeerJoined, PeerLeft, Progressed, RunFinished, RunStarted, Step, Warning
from cocktail_cli.show import Display, JsonView, LiveView, PlainView, QuietView, View, step_line

URL = "cocktail://" + "k" * 43 + "." + "t" * 24 + "@203.0.113.7:29400/amber-otter-42"
STARTED = RunStarted("amber-otter-42", URL, "smoke", "9f2c41ab" * 8, 860_160, 80, "outputs/smoke")
FINISHED = RunFinished("amber-otter-42", "outputs/smoke", 80, 2.25, "finished")
STEP = Step(
    step=12,
    steps=80,
    round=12,
    loss=1.8421,
    peers=2,
    accepted=["a", "b"],
    up_bytes={"a": 10_000, "b": 12_000},
    down_bytes={"a": 14_000, "b": 14_000},
    ratio_up={"a": 172.0, "b": 143.4},
    ratio_fp16=137.6,
    fingerprint="00ff00ff00ff00ff",
    step_s=0.5,
)
STORY = [
    STARTED,
    PeerJoined("a", "CPU, 2 cores"),
    PeerJoined("b"),
    Eval(0, 0, 4.5),
    STEP,
    PeerLeft("b", "left"),
    Warning("careful"),
    FINISHED,
]


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
    assert "up_kb=11.0 down_kb=14.0 ratio_fp16=137.6" in step
    assert any(line.endswith("b left: left") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_quiet_prints_the_url_and_the_folder() -> None:
    out, err = io.StringIO(), io.StringIO()
    told(QuietView(out, err), err)

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]
    assert err.getvalue() == "warning: careful\n"


def test_json_is_one_object_a_line() -> None:
    out = io.StringIO()
    told(JsonView(out), out)

    names = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert names[0] == "run_started"
    assert names[-1] == "run_finished"


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_survives_hostile_names_and_narrow_terminals(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "30")
    out, err = io.StringIO(), io.StringIO()
    view = LiveView(out, err, color=False)
    view.show(PeerJoined("[red]x[/nope]", "[bold"))
    told(view, err)

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]
    assert "[red]x[/nope]" in err.getvalue()


def test_a_crowd_is_shown_as_ten_and_a_number() -> None:
    board = Board()
    for number in range(TOP + 7):
        board.take(PeerJoined(f"peer-{number:02}"))

    rows = board.rows(wide=True)

    assert len(rows) == TOP + 1
    assert rows[-1][0] == "and 7 more"
    assert all(len(row) == len(board.columns(True)) for row in rows)


def test_the_board_knows_what_it_waits_for() -> None:
    board = Board()
    board.take(Progressed("fetching model.safetensors", 50, 200))

    assert "fetching model.safetensors 25 %" in board.summary()


def test_a_sparkline_falls_where_the_loss_does() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(n) for n in range(100)])) == 24


def test_bytes_are_told_in_decimal_units() -> None:
    assert [megabytes(n) for n in (812, 34_100, 2_100_000_000)] == ["812 B", "34.1 kB", "2.1 GB"]


def test_a_table_is_drawn_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    assert not Display().live(io.StringIO())
    assert Display(progress="rich").live(io.StringIO())
