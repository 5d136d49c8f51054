"""The board says how things are: who is in the run, who is not, and how long it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawn_board import drawn

from cocktail_cli.ui.board import Board
from cocktail_cli.ui.events import (
    Joined,
    Left,
    PeerDeciding,
    PeerDeclined,
    PeerJoined,
    PeerLeft,
    RunFinished,
    RunStarted,
    Step,
)
from cocktail_cli.ui.wording import sentence

STARTED = RunStarted("amber-otter-42", "cocktail://", "smoke", "9f" * 32, 860_160, 100, "outputs/smoke")
JOINED = Joined("amber-otter-42", "vm", "smoke", "9f" * 32, 0)


def peer(name: str, state: str = "training", **changes: Any) -> dict[str, Any]:
    figures = {"gpu": "CPU", "share": 0.5, "rtt_ms": None, "last_seen_s": 0.0, "tokens": 1000}
    return {"name": name, "state": state, **figures, "up_bytes": 1000, "down_bytes": 1000, **changes}


def status(*peers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"state": "running", "step": 25, "max_steps": 100, "peers": list(peers), **changes}


def row(board: Board, name: str) -> list[str]:
    (line,) = [line for line in plain(board) if line.split()[:1] == [name] and ":" not in line]
    return line.split()


def plain(board: Board) -> list[str]:
    return drawn(board, 120)


def board_of(*events: Any) -> Board:
    board = Board()
    for event in events:
        board.take(event)
    return board


def test_rates_are_never_negative_after_a_restart_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    board = board_of(STARTED)
    for tokens, moved in ((9000, 900_000), (10_000, 1_000_000), (100, 10_000), (200, 20_000)):
        board.look(status(peer("attic", tokens=tokens, up_bytes=moved, down_bytes=moved)))
        now[0] += 10.0
        assert "-" not in "".join(cell for cell in row(board, "attic")[1:] if re.search(r"\d", cell))

    assert row(board, "attic")[3:6] == ["10", "1.0k", "1.0k"]


def test_the_eta_of_a_joiner_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    alone = Step(25, 100, 25, 2.0, 2, step_s=40.0, eta_s=3000.0)  # a slow machine, whose leases span rounds
    board = board_of(JOINED, alone)
    board.look(status(peer("vm"), eta_s=540))
    board.take(alone)

    assert "ETA 9 min 00 s" in plain(board)[0]


def test_somebody_who_decides_is_no_peer_and_is_never_late() -> None:
    board = board_of(STARTED, PeerDeciding("vm", "CPU, 2 cores"))
    board.take(Step(1, 100, 1, 2.0, 1, accepted=["a"], up_bytes={"a": 9, "vm": 9}, ratio_up={"a": 2.0}))

    assert "deciding" in row(board, "vm")
    board.take(PeerDeclined("vm"))
    assert not any(line.startswith("vm") for line in plain(board))


def test_a_peer_that_joins_is_not_called_late() -> None:
    board = board_of(STARTED, PeerJoined("vm", "CPU"))
    board.take(Step(1, 100, 1, 2.0, 1, accepted=["a"], up_bytes={"a": 9, "vm": 9}, ratio_up={"a": 2.0}))

    assert "syncing" in row(board, "vm")


def test_the_last_frame_of_a_run_shows_its_peers_done_and_those_that_went_before_as_they_went() -> None:
    board = board_of(STARTED, PeerJoined("a"), PeerJoined("b"), PeerJoined("c"))
    board.take(PeerLeft("b", "connection lost", how="lost"))
    board.take(PeerLeft("c", "left: Ctrl-C", how="left"))
    board.take(RunFinished("amber-otter-42", "outputs/smoke", 100, None, "all steps are done"))

    assert {name: row(board, name)[1] for name in "abc"} == {"a": "done", "b": "lost", "c": "left"}


def test_a_run_that_waits_says_so_and_gives_no_time_left() -> None:
    board = board_of(STARTED, PeerJoined("a"), Step(3, 100, 3, 2.0, 1, eta_s=90.0))
    assert "ETA 1 min 30 s" in plain(board)[0]
    board.look(status(peer("a", "lost")) | {"state": "waiting", "eta_s": None})

    assert "ETA" not in plain(board)[0]
    assert plain(board)[1].startswith("waiting for peers")
    board.take(Step(4, 100, 4, 2.0, 1))
    assert plain(board)[1].startswith("training")


def test_a_hub_that_does_not_answer_is_no_training() -> None:
    board = board_of(JOINED, PeerJoined("vm"))
    board.take(Step(3, 100, 3, 2.0, 1, accepted=["vm"], ratio_up={"vm": 2.0}, up_bytes={"vm": 9}, eta_s=90.0))
    board.miss()

    assert "ETA" not in plain(board)[0]
    assert plain(board)[1].startswith("waiting for the hub to answer")
    assert "waiting" in row(board, "vm")


def test_this_machine_is_not_lost_to_a_hub_that_was_started_again() -> None:
    board = board_of(JOINED)
    board.look(status(peer("vm", "lost"), peer("b", "lost")))

    assert "waiting" in row(board, "vm")
    assert "lost" in row(board, "b")


def test_a_table_that_is_left_on_the_screen_names_no_keys() -> None:
    board = board_of(STARTED, PeerJoined("a"), Step(3, 100, 3, 2.0, 1))
    assert any("Ctrl-C" in line for line in plain(board))
    board.over = True

    assert not any("Ctrl-C" in line for line in plain(board))


def test_the_others_of_a_status_stay_on_the_board_below_the_peers() -> None:
    board = board_of(STARTED)
    board.look(status(peer("z"), others=[peer("a", "left"), {"name": "b", "gpu": "", "state": "deciding"}]))

    names = [line.split()[0] for line in plain(board) if line[:2] in ("z ", "a ", "b ")]
    assert names == ["b", "z", "a"]


def test_leaving_says_what_was_given_and_how_to_return() -> None:
    left = Left("amber-otter-42", "vm", "left (Ctrl-C)", False, 40, 2_000_000, 3_000_000, 0.34, 720.0, True)
    said = (
        "left amber-otter-42 (Ctrl-C). You gave 40 steps, 34% of all that was trained, in 12 min "
        "(sent 2.0 MB, received 3.0 MB). Thank you! The same command returns."
    )

    assert sentence(left) == said
    over = Left("amber-otter-42", "vm", "all steps are done", True, 60, 1000, 2000, 0.52, 34.0)
    assert sentence(over) == (
        "amber-otter-42 is over: all steps are done. You gave 60 steps, 52% of all that was trained, in 34 s "
        "(sent 1.0 kB, received 2.0 kB). Thank you!"
    )
