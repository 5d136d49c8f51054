"""The board says how things are: figures, who is in the run and who is not, and the loss curve in the
room that its terminal leaves."""

import re
from dataclasses import replace
from typing import Any

import pytest
import run_story
from drawn_board import drawn
from rich.cells import cell_len
from rich.console import Console, Group

from cocktail_cli.extensions.board.board import Board, state_of
from cocktail_cli.ui import Progressed, RunStarted, events, megabytes, sentence, time_left_text

STARTED = RunStarted("amber-otter-42", "cocktail://x", "smoke", "9f2c41ab" * 8, 860_160, 80, "outputs/smoke")
STEP = replace(run_story.STEP, fingerprint="", tokens_by_peer={})
JOINED = events.Joined("amber-otter-42", "vm", "smoke", "9f" * 32, 0)
CURVE = [replace(STEP, step=step, loss=6.0 - step / 10) for step in range(1, 41)]
SIZES = [(79, 24), (59, 20), (139, 40), (39, 10), (199, 60), (19, 5), (9, 3), (79, 100)]


def board_of(*told: object, peers: int = 0) -> Board:
    board = Board()
    for event in (
        STARTED,
        *(events.PeerJoined(f"peer-{number:02}", "RTX 3090, 24 GiB") for number in range(peers)),
        *told,
    ):
        board.take(event)  # type: ignore[arg-type]
    return board


def figures(board: Board) -> list[str]:
    return [part.plain for part in board.figures()]


def chart_rows(lines: list[str]) -> int:
    return sum("│" in line or "┤" in line for line in lines)


@pytest.mark.parametrize("peers", [0, 2, 30])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_screen_fits_its_terminal(width: int, height: int, peers: int) -> None:
    """No line is longer than the terminal is wide, and the last row stays free."""
    board = board_of(
        events.Eval(0, 0, 6.0),
        *CURVE,
        events.Eval(40, 40, 2.0),
        events.PeerLeft("peer-00", "left: Ctrl-C"),
        peers=peers,
    )

    lines = drawn(board, width, height)

    assert 1 <= len(lines) < max(height, 2)
    assert all(cell_len(line) <= width for line in lines), lines


def test_the_loss_curve_grows_with_the_window() -> None:
    board = board_of(*CURVE, peers=2)

    rows = {height: chart_rows(drawn(board, 139, height)) for height in (16, 24, 40, 60)}

    assert 0 < rows[16] < rows[24] < rows[40] < rows[60]
    assert rows[40] >= 20
    assert max(map(len, drawn(board, 139, 40))) == 139


def test_a_crowd_leaves_room_for_the_curve_and_is_counted() -> None:
    lines = drawn(board_of(*CURVE, peers=30), 79, 24)

    shown = sum(line.startswith("peer-") for line in lines)
    assert chart_rows(lines) >= 3
    assert f"and {30 + 2 - shown - sum(line.startswith(('a ', 'b ')) for line in lines)} more" in lines


def test_peers_are_shown_as_far_as_there_are_lines() -> None:
    board = board_of(peers=17)

    tables = {most: drawn(Group(*board.table(100, most)), 100) for most in (1, 2, 5, 40)}

    assert [len(lines) for lines in tables.values()] == [0, 2, 5, 1 + 17]
    assert (tables[2][-1], tables[5][-1]) == ("and 17 more", "and 14 more")


def test_a_state_has_its_word_and_a_colour() -> None:
    colours = {
        "training": "green",
        "deciding": "yellow",
        "waiting": "yellow",
        "lost": "bold red",
        "done": "dim",
        "odd": "",
    }

    assert {word: state_of(word).style for word in colours} == colours
    assert all(state_of(word).plain == word for word in colours)
    coloured = [segment.text for segment in Console().render(board_of(STEP)) if "green" in str(segment.style)]
    assert coloured == ["training"] * 3, "of the run and of two peers, and nothing beside them"


def test_the_best_evaluation_is_named_with_its_step() -> None:
    board = board_of(events.Eval(0, 0, 6.0), events.Eval(20, 20, 2.5), events.Eval(40, 40, 2.75))
    assert "◆ eval 2.750 (best 2.500 at step 20)" in figures(board)

    board.take(events.Eval(60, 60, 2.25))
    assert "◆ eval 2.250 (best now)" in figures(board)


def test_figures_name_rate_norm_and_speed() -> None:
    board = board_of(replace(STEP, lr=1.7e-4, grad_norm=0.714, tokens=2_600_000, samples=5184))
    board.tokens_per_s = 1900.0

    assert figures(board)[:7] == [
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


def test_the_board_knows_what_it_waits_for() -> None:
    board = Board()
    board.take(Progressed("fetching the base model", 50, 200, "bytes", 10.0, 15.0))

    [line] = drawn(board, 100)
    assert line.startswith("fetching the base model ━━━━━━━━━━ ")
    assert line.endswith(" 50 B of 200 B, 10 B/s, 15 s left")


def peer(name: str, state: str = "training", **changes: Any) -> dict[str, Any]:
    figures = {"gpu": "CPU", "share": 0.5, "rtt_ms": None, "last_seen_s": 0.0, "tokens": 1000}
    return {"name": name, "state": state, **figures, "up_bytes": 1000, "down_bytes": 1000, **changes}


def status(*peers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"state": "running", "step": 25, "max_steps": 100, "peers": list(peers), **changes}


def row(board: Board, name: str) -> list[str]:
    (line,) = [line for line in drawn(board, 120) if line.split()[:1] == [name] and ":" not in line]
    return line.split()


def test_what_peers_do_a_second_is_measured_between_two_looks_at_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("cocktail_cli.extensions.board.board.time.monotonic", lambda: clock[0])
    board = Board(me="attic")
    board.look(status(*(peer(name, tokens=1000, up_bytes=0, down_bytes=0) for name in ("attic", "dana"))))
    clock[0] += 10.0
    moved = {"gpu": "RTX 3090", "rtt_ms": 31.0, "last_seen_s": 1.0, "up_bytes": 340_000, "down_bytes": 10}
    board.look(status(peer("attic", tokens=15_000, **moved), peer("dana", tokens=23_000, **moved)))

    header, attic, dana = drawn(Group(*board.table(100, 10)), 100)
    assert header.split() == ["PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST"]
    assert " ".join(attic.split()) == "attic < RTX 3090 training 1.4k 34.0k 1 31 ms 50% 1 s"
    assert dana.split()[:4] == ["dana", "RTX", "3090", "training"]
    board.look(status(peer("eve", tokens=0, **moved)) | {"tokens_per_s": 3400.0})
    board.look(status(peer("eve", tokens=9000, **moved)))
    assert board.peers["eve"].rates() is None, "what it did before it trained is no speed"
    board.look(status() | {"tokens_per_s": 3400.0})
    assert "3.4k tok/s" in figures(board), "the run's speed is the hub's figure, on each view"
    clock[0] += 3.0
    board.look(
        status(peer("dana", tokens=5, up_bytes=40, down_bytes=10))
    )  # it has joined again: its sums begin at zero
    assert list(board.peers) == ["dana"]
    assert board.peers["dana"].rates() is None


def test_a_joiner_sees_the_curve_of_before_it_came() -> None:
    board = board_of(replace(STEP, step=12, loss=1.8))
    board.look(status(losses=[[1, 4.0], [6, 3.0], [12, 2.0]], eval_losses=[[20, 1.9]]))

    assert board.losses == [[1, 4.0], [6, 3.0], (12, 1.8)]
    assert board.evals == {20: 1.9}


def test_a_step_is_compute_and_wait_and_the_rest_and_bytes_are_saved() -> None:
    down, fetched = {"a": 514_000, "b": 14_000, "joiner": 9}, {"a": 500_000, "joiner": 9}
    board = board_of(replace(STEP, down_bytes=down, fetched_bytes=fetched))

    assert figures(board)[2:] == [
        "step 0.5 s = compute 0.2 + wait 0.1 + sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x below FP16",
    ]


def test_a_step_is_no_shorter_than_what_it_consists_of() -> None:
    assert (
        figures(board_of(replace(STEP, step_s=0.25)))[2] == "step 0.3 s = compute 0.2 + wait 0.1 + sync 0.0"
    )


def test_in_a_slim_terminal_names_are_whole_and_nothing_is_cut_off() -> None:
    board = board_of(STEP)
    board.peers = {"local-1": board.peers["a"]}

    lines = drawn(board, 39, 24)

    assert lines[0] == "step 12/80 · 15 % · amber-otter-42 ·… ─"
    assert lines[2:6] == [
        "step 0.5 s = compute 0.2 + wait 0.1 +",
        "sync 0.2",
        "50.0 kB exchanged, 6.8 MB saved, 138x",
        "below FP16",
    ]
    assert any(line.split()[:2] == ["local-1", "training"] for line in lines)


def test_bytes_are_told_in_decimal_units() -> None:
    assert [megabytes(n) for n in (812, 34_100, 2_100_000_000)] == ["812 B", "34.1 kB", "2.1 GB"]


def test_rates_are_never_negative_after_a_restart_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    board = board_of()
    for tokens, moved in ((9000, 900_000), (10_000, 1_000_000), (100, 10_000), (200, 20_000)):
        board.look(status(peer("attic", tokens=tokens, up_bytes=moved, down_bytes=moved)))
        now[0] += 10.0
        assert "-" not in "".join(cell for cell in row(board, "attic")[1:] if re.search(r"\d", cell))

    assert row(board, "attic")[3:6] == ["10", "1.0k", "1.0k"]


def test_the_time_left_is_the_hubs_estimate_less_what_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    alone = events.Step(
        25, 100, 25, 2.0, 2, step_s=40.0, eta_s=3000.0
    )  # a slow machine, whose leases span rounds
    board = board_of(JOINED, alone)
    board.look(status(peer("vm"), eta_s=540))
    board.take(alone)
    now[0] += 10.0

    assert "ETA 8 min 50 s" in drawn(board, 120)[0]


def test_somebody_who_decides_is_no_peer_and_is_never_late() -> None:
    board = board_of(events.PeerDeciding("vm", "CPU, 2 cores"))
    board.take(
        events.Step(1, 100, 1, 2.0, 1, accepted=["a"], up_bytes={"a": 9, "vm": 9}, ratio_up={"a": 2.0})
    )

    assert "deciding" in row(board, "vm")
    board.take(events.PeerDeclined("vm"))
    assert not any(line.startswith("vm") for line in drawn(board, 120))


def test_a_peer_that_joins_is_not_called_late() -> None:
    board = board_of(events.PeerJoined("vm", "CPU"))
    board.take(
        events.Step(1, 100, 1, 2.0, 1, accepted=["a"], up_bytes={"a": 9, "vm": 9}, ratio_up={"a": 2.0})
    )

    assert "syncing" in row(board, "vm")


def test_the_last_frame_of_a_run_shows_its_peers_done_and_those_that_went_before_as_they_went() -> None:
    board = board_of(events.PeerJoined("a"), events.PeerJoined("b"), events.PeerJoined("c"))
    board.take(events.PeerLeft("b", "connection lost", how="lost"))
    board.take(events.PeerLeft("c", "left: Ctrl-C", how="left"))
    board.take(events.RunFinished("amber-otter-42", "outputs/smoke", 100, None, "all steps are done"))

    assert {name: row(board, name)[1] for name in "abc"} == {"a": "done", "b": "lost", "c": "left"}


def test_a_run_that_waits_says_so_and_gives_no_time_left() -> None:
    board = board_of(events.PeerJoined("a"), events.Step(3, 100, 3, 2.0, 1))
    board.look(status(peer("a"), eta_s=90))
    assert "ETA 1 min" in drawn(board, 120)[0]
    board.look(status(peer("a", "lost")) | {"state": "waiting", "eta_s": None})

    assert "ETA" not in drawn(board, 120)[0]
    assert drawn(board, 120)[1].startswith("waiting for peers")
    board.take(events.Step(4, 100, 4, 2.0, 1))
    assert drawn(board, 120)[1].startswith("training")


def test_a_hub_that_does_not_answer_is_no_training() -> None:
    board = board_of(JOINED, events.PeerJoined("vm"))
    board.take(events.Step(3, 100, 3, 2.0, 1, accepted=["vm"], ratio_up={"vm": 2.0}, up_bytes={"vm": 9}))
    board.look(status(peer("vm"), eta_s=90))
    board.miss()

    assert "ETA" not in drawn(board, 120)[0]
    assert drawn(board, 120)[1].startswith("waiting for the hub to answer")
    assert "waiting" in row(board, "vm")


@pytest.mark.parametrize(
    ("doing", "keys"),
    [
        ("leaving (Ctrl-C), within 22 s", "Ctrl-C: at once"),
        ("pausing (Ctrl-C): finishing the exchange in flight", "Ctrl-C: end the run with its model"),
        ("ending (Ctrl-C): finishing the exchange in flight", "Ctrl-C: at once"),
        ("writing the model", "Ctrl-C: at once"),
    ],
)
def test_how_it_ends_is_said_until_it_has_and_the_keys_say_what_they_do_then(doing: str, keys: str) -> None:
    board = board_of(JOINED, events.Step(3, 100, 3, 2.0, 1), events.Progressed(doing))
    board.take(events.Step(4, 100, 4, 2.0, 1))
    board.miss()

    lines = drawn(board, 120)
    assert lines[1].startswith(doing)
    assert lines[-1] == keys


def test_this_machine_is_not_lost_to_a_hub_that_was_started_again() -> None:
    board = board_of(JOINED)
    board.look(status(peer("vm", "lost"), peer("b", "lost")))

    assert "waiting" in row(board, "vm")
    assert "lost" in row(board, "b")


def test_a_table_that_is_left_on_the_screen_names_no_keys() -> None:
    board = board_of(events.PeerJoined("a"), events.Step(3, 100, 3, 2.0, 1))
    assert any("Ctrl-C" in line for line in drawn(board, 120))
    board.over = True

    assert not any("Ctrl-C" in line for line in drawn(board, 120))


def test_the_others_of_a_status_stay_on_the_board_below_the_peers() -> None:
    board = board_of()
    board.look(status(peer("z"), others=[peer("a", "left"), {"name": "b", "gpu": "", "state": "deciding"}]))

    names = [line.split()[0] for line in drawn(board, 120) if line[:2] in ("z ", "a ", "b ")]
    assert names == ["b", "z", "a"]


def test_leaving_says_what_was_given_and_how_to_return() -> None:
    left = events.Left(
        "amber-otter-42", "vm", "left (Ctrl-C)", False, 40, 2_000_000, 3_000_000, 0.34, 720.0, True
    )
    said = (
        "left amber-otter-42 (Ctrl-C). You gave 40 steps, 34% of all that was trained, in 12 min "
        "(sent 2.0 MB, received 3.0 MB). Thank you! The same command returns."
    )

    assert sentence(left) == said
    over = events.Left("amber-otter-42", "vm", "all steps are done", True, 60, 1000, 2000, 0.52, 34.0)
    assert sentence(over) == (
        "amber-otter-42 is over: all steps are done. You gave 60 steps, 52% of all that was trained, in 34 s "
        "(sent 1.0 kB, received 2.0 kB). Thank you!"
    )
    paused = events.Left("amber-otter-42", "vm", "paused by its host (Ctrl-C)", False, returns=True)
    assert sentence(paused) == "amber-otter-42: paused by its host (Ctrl-C). The same command returns."


def test_progress_without_an_end_has_no_bar() -> None:
    board = Board()
    board.take(Progressed("tokenizing me/data", 4000, 0, "rows", 2000.0, None))

    assert drawn(board, 80) == ["tokenizing me/data   4,000 rows, 2,000 rows/s"]


@pytest.mark.parametrize("width", [30, 60, 100])
def test_a_bar_takes_one_line_and_the_room_there_is(width: int) -> None:
    board = Board()
    board.take(Progressed("fetching the base", 89 * 10**8, 121 * 10**8, "bytes", 61e6, 52.0))

    [line] = drawn(board, width)

    assert len(line) <= width
    assert ("━" * 3 in line, line.endswith("8.9 GB of 12.1 GB, 61.0 MB/s, 52 s left")) == (
        width > 60,
        width >= 60,
    )


def test_the_screen_of_watch_has_loss_curve_peers_and_what_ctrl_c_does() -> None:
    board = Board(run="amber-otter-42", watched=True)
    for step in (1, 2, 3):
        losses = [(n, 5.0 - n / 4) for n in range(1, step + 1)]
        figures = {"step": step, "max_steps": 20, "losses": losses, "eta_s": 2 * (20 - step)}
        board.look(status(peer("attic\x1b[2J", gpu="RTX 3090"), **figures))
    lines = drawn(board, 99, 30)

    assert lines[0].startswith("step 3/20 · 15 % · ETA 34 s · amber-otter-42 ──")
    assert any("loss 4.250" in line for line in lines)
    assert any(line.startswith("attic?[2J") and "RTX 3090" in line for line in lines)
    assert lines[-1] == "Ctrl-C: look no more; the run goes on"
