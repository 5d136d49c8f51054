"""Users see the run URL alone on stdout, lines without a terminal, a table on one."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace

import pytest

from cocktail_cli.ui.board import LOW, TOP, Board, megabytes, sparkline
from cocktail_cli.ui.display import Display, JsonView, PlainView, QuietView, View
from cocktail_cli.ui.events import (
    Eval,
    PeerJoined,
    PeerLeft,
    Progressed,
    RunFinished,
    RunStarted,
    Step,
    Warning,
)
from cocktail_cli.ui.live_view import LiveView
from cocktail_cli.ui.wording import step_line
from cocktail_cli.volunteer.join_prompt import wrap_line

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
    compute_s={"a": 0.2, "b": 0.2},
    wait_s={"a": 0.1, "b": 0.1},
    tokens_by_peer={"a": 300, "b": 300},
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
    assert "peers=2 tok_s=1200 step_s=0.50 sync_s=0.20 up_kb=11.0" in step
    assert step.endswith("down_kb=14.0 ratio_fp16=137.6 eta_s=34")
    assert any(line.endswith("b left: left") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_quiet_prints_the_url_and_the_folder() -> None:
    out, err = io.StringIO(), io.StringIO()
    told(QuietView(out, err), err)

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]
    assert err.getvalue() == "warning: careful\n"


def test_a_run_that_was_stopped_early_says_how_far_it_came() -> None:
    err = io.StringIO()
    PlainView(io.StringIO(), err).show(replace(FINISHED, steps=39, planned=80))

    assert "39 of 80 steps" in err.getvalue()


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


def test_a_crowd_is_shown_as_ten_and_a_number_or_as_many_as_there_is_room_for() -> None:
    board = Board()
    for number in range(TOP + 7):
        board.take(PeerJoined(f"peer-{number:02}"))

    assert len(board.table(100, 40)) == 1 + TOP + 1
    assert board.table(100, 40)[-1] == "and 7 more"
    assert board.table(100, 3)[-1] == "and 14 more"


def test_the_board_knows_what_it_waits_for() -> None:
    board = Board()
    board.take(Progressed("fetching the base model", 50, 200, "bytes", 10.0, 15.0))

    [line] = [line for line in board.screen(100, 24) if "━" in line]
    assert line.startswith("fetching the base model  ━━━━━━━━━━─")
    assert line.endswith(" 50 B of 200 B, 10 B/s, 15 s left")


def status(*peers: tuple[str, int, int, int]) -> dict[str, object]:
    """Build a hub's answer from (name, tokens, bytes up, bytes down)."""
    shown = [
        {
            "name": name,
            "gpu": "RTX 3090",
            "state": "training",
            "share": 0.5,
            "tokens": tokens,
            "up_bytes": up,
            "down_bytes": down,
            "rtt_ms": 31.0,
            "last_seen_s": 1.0,
        }
        for name, tokens, up, down in peers
    ]
    return {"peers": shown, "tokens": 1000, "eval_loss": 1.9}


def test_what_peers_do_a_second_is_measured_between_two_looks_at_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("cocktail_cli.ui.board.time.monotonic", lambda: clock[0])
    board = Board(me="attic")
    board.look(status(("attic", 0, 0, 0), ("dana", 0, 0, 0)))
    clock[0] += 10.0
    board.look(status(("attic", 14_000, 340_000, 10), ("dana", 22_000, 340_000, 10)))

    header, attic, dana = board.table(100, 10)
    assert header.split() == ["PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST"]
    assert " ".join(attic.split()) == "attic < RTX 3090 training 1.4k 34.0k 1 31 ms 50% 1 s"
    assert dana.split()[:4] == ["dana", "RTX", "3090", "training"]
    assert board.evals == [1.9]
    board.look(status(("dana", 22_000, 340_000, 10)))
    assert list(board.peers) == ["dana"]


def test_a_step_is_compute_and_wait_and_the_rest_and_bytes_are_saved() -> None:
    board = Board()
    down, fetched = {"a": 514_000, "b": 14_000, "joiner": 9}, {"a": 500_000, "joiner": 9}
    board.take(replace(STEP, down_bytes=down, fetched_bytes=fetched))

    assert board.times() == [
        "step 0.5 s = compute 0.2 + wait 0.1 + sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x below FP16",
    ]


def test_a_step_is_no_shorter_than_what_it_consists_of() -> None:
    board = Board()
    board.take(replace(STEP, step_s=0.25))

    assert board.times()[0] == "step 0.3 s = compute 0.2 + wait 0.1 + sync 0.0"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (120, 40), (40, 10), (200, 60), (20, 5)])
def test_the_screen_fits_its_terminal(width: int, height: int) -> None:
    board = Board()
    for event in [*STORY, *(PeerJoined(f"peer-{number:02}", "RTX 3090, 24 GiB") for number in range(30))]:
        board.take(event)

    lines = board.screen(width, height)

    assert len(lines) < height
    assert len(lines) == 1 or height >= LOW
    assert all(len(line) <= width for line in lines) or height < LOW  # one line, which is cut


def test_in_a_slim_terminal_names_are_whole_and_nothing_is_cut_off() -> None:
    board = Board()
    for event in [STARTED, PeerJoined("local-1", "RTX 3090, 24 GiB"), STEP]:
        board.take(event)

    lines = board.screen(39, 24)

    assert lines[0] == "step 12/80 · 15 % · ETA 0h 00m"
    assert lines[2:6] == [
        "step 0.5 s = compute 0.2 + wait 0.1 +",
        "sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x",
        "below FP16",
    ]
    assert any(line.split()[:2] == ["local-1", "syncing"] for line in lines)
    assert board.one_line(39) == "step 12/80 loss 1.842 · ETA 0h 00m"


def test_what_is_said_before_a_join_is_broken_between_words() -> None:
    line = "it will       download 65.5 kB (base model and packets; 4.1 MB are here)"

    assert wrap_line(line, 80) == [line]
    assert wrap_line(line, 45) == [
        "it will       download 65.5 kB (base model",
        "              and packets; 4.1 MB are here)",
    ]


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


class Terminal:
    """A screen of so many columns that breaks lines as terminals do, and knows what rich sends."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row = width, [""], 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing, as writes are not buffered."""

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\x1b[1A":
                self.row = max(0, self.row - 1)
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part[0] not in "\x1b\r":
                self.rows[self.row] += part
        return len(text)

    def narrow(self, width: int) -> None:
        """Reflow as terminals do: a line too long takes several rows, and the cursor moves along."""
        cut = [[row[i : i + width] for i in range(0, len(row), width)] or [""] for row in self.rows]
        self.row = sum(len(pieces) for pieces in cut[: self.row])
        self.rows, self.width = [piece for row in cut for piece in row], width


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    return Terminal(120)


def test_nothing_is_left_of_the_table_when_its_terminal_is_made_narrower(terminal: Terminal) -> None:
    view = LiveView(io.StringIO(), terminal, color=False)  # type: ignore[arg-type]
    for event in STORY[:5]:
        view.show(event)
    assert any("DOWN/S" in row for row in terminal.rows)

    terminal.narrow(60)
    view.console.width = 60
    view.draw()

    shown = "\n".join(terminal.rows)
    assert "DOWN/S" not in shown
    assert shown.count("── amber-otter-42") == 1
    assert shown.count("Ctrl-C") == 1
    view.close()


def test_what_others_write_goes_above_the_table(terminal: Terminal) -> None:
    before = sys.stderr
    view = LiveView(io.StringIO(), terminal, color=False)  # type: ignore[arg-type]
    for event in STORY[:5]:
        view.show(event)
    print("a library has something to say", file=sys.stderr)
    view.close()

    rows = [row for row in terminal.rows if row]
    assert rows.index("a library has something to say") < rows.index(next(r for r in rows if "── amber" in r))
    assert sys.stderr is before
