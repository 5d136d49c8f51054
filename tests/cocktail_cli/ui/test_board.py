"""The board shows a run as lines that fit their terminal, with the loss curve in the room that is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cocktail_cli.ui import Line, Progressed, RunStarted, columns_of, megabytes, time_left_text
from cocktail_cli.ui.board import Board, sparkline, state_style
from cocktail_cli.ui.events import Eval, PeerJoined, PeerLeft, Step

STARTED = RunStarted("amber-otter-42", "cocktail://x", "smoke", "9f2c41ab" * 8, 860_160, 80, "outputs/smoke")
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
    step_s=0.5,
    compute_s={"a": 0.2, "b": 0.2},
    wait_s={"a": 0.1, "b": 0.1},
    eta_s=34.0,
)
CURVE = [replace(STEP, step=step, loss=6.0 - step / 10) for step in range(1, 41)]
SIZES = [(79, 24), (59, 20), (139, 40), (39, 10), (199, 60), (19, 5), (9, 3), (79, 100)]


def board_of(*events: object, peers: int = 0) -> Board:
    board = Board()
    for event in (
        STARTED,
        *(PeerJoined(f"peer-{number:02}", "RTX 3090, 24 GiB") for number in range(peers)),
        *events,
    ):
        board.take(event)  # type: ignore[arg-type]
    return board


def plain(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def chart_rows(lines: list[Line]) -> int:
    return sum("│" in line.text or "┤" in line.text for line in lines)


@pytest.mark.parametrize("peers", [0, 2, 30])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_screen_fits_its_terminal(width: int, height: int, peers: int) -> None:
    """No line is longer than the terminal is wide, and the last row stays free."""
    board = board_of(
        Eval(0, 0, 6.0), *CURVE, Eval(40, 40, 2.0), PeerLeft("peer-00", "left: Ctrl-C"), peers=peers
    )

    lines = board.screen(width, height)

    assert 1 <= len(lines) < max(height, 2)
    assert all(columns_of(line.text) <= width for line in lines if width >= 19), plain(lines)


def test_the_loss_curve_grows_with_the_window() -> None:
    board = board_of(*CURVE, peers=2)

    rows = {height: chart_rows(board.screen(139, height)) for height in (16, 24, 40, 60)}

    assert 0 < rows[16] < rows[24] < rows[40] < rows[60]
    assert rows[40] >= 20
    assert max(len(line) for line in board.screen(139, 40)) == 139


def test_a_crowd_leaves_room_for_the_curve_and_is_counted() -> None:
    lines = plain(board_of(*CURVE, peers=30).screen(79, 24))

    shown = sum(line.startswith("peer-") for line in lines)
    assert chart_rows(board_of(*CURVE, peers=30).screen(79, 24)) >= 3
    assert f"and {30 + 2 - shown - sum(line.startswith(('a ', 'b ')) for line in lines)} more" in lines


def test_peers_are_shown_as_far_as_there_are_lines() -> None:
    board = board_of(peers=17)

    assert len(board.table(100, 40)) == 1 + 17
    assert board.table(100, 5)[-1].text == "and 14 more"
    assert board.table(100, 2) == board.table(100, 1) == [Line("17 peers")]
    assert board.table(100, 0) == []


def test_a_state_has_its_word_and_a_colour() -> None:
    words = {
        "training": "good",
        "deciding": "busy",
        "waiting": "busy",
        "lost": "bad",
        "done": "dim",
        "odd": "",
    }

    assert {word: state_style(word) for word in words} == words
    board = board_of(peers=1)
    board.peers["peer-00"].state = "lost"
    (row,) = board.table(79, 5)[1:]
    assert [(row.text[s.start : s.stop].strip(), s.style) for s in row.spans] == [("lost", "bad")]


def test_the_best_evaluation_is_named_with_its_step() -> None:
    board = board_of(Eval(0, 0, 6.0), Eval(20, 20, 2.5), Eval(40, 40, 2.75))
    assert "◆ eval 2.750 (best 2.500 at step 20)" in plain(board.figures())

    board.take(Eval(60, 60, 2.25))
    assert "◆ eval 2.250 (best now)" in plain(board.figures())


def test_figures_name_rate_norm_and_speed() -> None:
    board = board_of(replace(STEP, lr=1.7e-4, grad_norm=0.714, tokens=2_600_000, samples=5184))
    board.tokens_per_s = 1900.0

    said = plain(board.figures())

    assert said == [
        "training",
        "loss 1.842",
        "lr 1.7e-04",
        "grad 0.71",
        "1.9k tok/s",
        "2.6M tokens",
        "5,184 samples",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(34.0, "34 s"), (725.0, "12 min 05 s"), (3599.6, "1 h 00 min"), (12_000.0, "3 h 20 min")],
)
def test_time_left_is_told_to_the_second_below_an_hour(seconds: float, text: str) -> None:
    assert time_left_text(seconds) == text


def test_the_hubs_estimate_goes_before_the_one_by_the_runs_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("cocktail_cli.ui.board.time.monotonic", lambda: clock[0])
    board = board_of(STEP)
    assert "ETA 34 s" in board.title(79).text

    board.look(status(("a", 0, 0, 0)) | {"eta_s": 95})
    clock[0] += 10.0
    assert "ETA 1 min 25 s" in board.title(79).text


def test_the_board_knows_what_it_waits_for() -> None:
    board = Board()
    board.take(Progressed("fetching the base model", 50, 200, "bytes", 10.0, 15.0))

    [line] = [line for line in plain(board.screen(100, 24)) if "━" in line]
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
    return {"peers": shown, "tokens": 1000, "eval_loss": 1.9, "eval_losses": [[20, 1.9]]}


def test_what_peers_do_a_second_is_measured_between_two_looks_at_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("cocktail_cli.ui.board.time.monotonic", lambda: clock[0])
    board = Board(me="attic")
    board.look(status(("attic", 0, 0, 0), ("dana", 0, 0, 0)))
    clock[0] += 10.0
    board.look(status(("attic", 14_000, 340_000, 10), ("dana", 22_000, 340_000, 10)))

    header, attic, dana = plain(board.table(100, 10))
    assert header.split() == ["PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST"]
    assert " ".join(attic.split()) == "attic < RTX 3090 training 1.4k 34.0k 1 31 ms 50% 1 s"
    assert dana.split()[:4] == ["dana", "RTX", "3090", "training"]
    assert board.evals == {20: 1.9}
    assert "3.6k tok/s" in plain(board.figures())
    clock[0] += 3.0
    board.look(status(("dana", 5, 40, 10)))  # it has joined again: its sums begin at zero
    assert list(board.peers) == ["dana"]
    assert board.peers["dana"].rates() is None


def test_a_joiner_sees_the_curve_of_before_it_came() -> None:
    board = board_of(replace(STEP, step=12, loss=1.8))
    board.look(status() | {"losses": [[1, 4.0], [6, 3.0], [12, 2.0]]})

    assert board.losses == [[1, 4.0], [6, 3.0], (12, 1.8)]


def test_a_step_is_compute_and_wait_and_the_rest_and_bytes_are_saved() -> None:
    down, fetched = {"a": 514_000, "b": 14_000, "joiner": 9}, {"a": 500_000, "joiner": 9}
    board = board_of(replace(STEP, down_bytes=down, fetched_bytes=fetched))

    assert board.times() == [
        "step 0.5 s = compute 0.2 + wait 0.1 + sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x below FP16",
    ]


def test_a_step_is_no_shorter_than_what_it_consists_of() -> None:
    assert board_of(replace(STEP, step_s=0.25)).times()[0] == "step 0.3 s = compute 0.2 + wait 0.1 + sync 0.0"


def test_in_a_slim_terminal_names_are_whole_and_nothing_is_cut_off() -> None:
    board = board_of(STEP)
    board.peers = {"local-1": board.peers["a"]}

    lines = plain(board.screen(39, 24))

    assert lines[0] == "step 12/80 · 15 % · ETA 34 s"
    assert lines[2:6] == [
        "step 0.5 s = compute 0.2 + wait 0.1 +",
        "sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x",
        "below FP16",
    ]
    assert any(line.split()[:2] == ["local-1", "training"] for line in lines)
    assert board.one_line(39).text == "step 12/80 loss 1.842 · ETA 34 s"


def test_a_sparkline_falls_where_the_loss_does() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(n) for n in range(100)])) == 24


def test_bytes_are_told_in_decimal_units() -> None:
    assert [megabytes(n) for n in (812, 34_100, 2_100_000_000)] == ["812 B", "34.1 kB", "2.1 GB"]
