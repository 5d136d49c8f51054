"""`cocktail status`: one screen, all of each peer, and again and again until the run is over."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from in_this_process import Run

from cocktail_cli.commands import status
from cocktail_cli.errors import Failure

PEER = {
    "name": "attic\x1b[2J",
    "gpu": "RTX 3090",
    "state": "training",
    "share": 0.42,
    "tokens": 12_345,
    "up_bytes": 1_500_000,
    "down_bytes": 3_000_000,
    "fetched_bytes": 900_000,
    "rtt_ms": 31.2,
    "last_seen_s": 1.2,
    "joined_s": 640.0,
    "rounds": 7,
    "left_out": 2,
    "compute_s": 40.0,
    "wait_s": 5.0,
}


def answer(step: int, state: str = "running", **changed: Any) -> dict[str, Any]:
    found = {"run": "amber-otter-42", "state": state, "step": step, "max_steps": 20, "loss": 5.0 - step / 4}
    found |= {
        "eval_loss": None,
        "losses": [(n, 5.0 - n / 4) for n in range(1, step + 1)],
        "tokens": 100 * step,
    }
    return found | {"tokens_per_s": 90.0, "eta_s": 2 * (20 - step), "peers": [PEER]} | changed


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Make the hub give these answers, one after the other."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(status, "ask", lambda run: told.pop(0))
    monkeypatch.setattr(status, "EVERY", 0.0)
    yield told
    assert told == []


def test_watch_without_a_terminal_prints_a_line_for_each_change_until_the_end(
    cocktail: Run, answers: list[dict[str, Any]]
) -> None:
    answers += [answer(1), answer(1), answer(2), answer(2, peers=[]), answer(2, "paused", peers=[])]
    said = cocktail("status", "amber-otter-42", "--watch")

    lines = [line.partition(" ")[2] for line in said.out.splitlines()]
    assert (said.exit, lines) == (
        0,
        [
            "running step=1/20 loss=4.7500 peers=1 tok_s=90 eta_s=38",
            "running step=2/20 loss=4.5000 peers=1 tok_s=90 eta_s=36",
            "running step=2/20 loss=4.5000 peers=0 tok_s=90 eta_s=36",
            "paused step=2/20 loss=4.5000 peers=0 tok_s=90",
        ],
    )


def test_watch_waits_for_a_hub_that_restarts(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Failure("unreachable", "the hub of amber-otter-42: no connection")
    told: list[Any] = [answer(1), gone, gone, answer(20, "finished")]

    def ask(run: str) -> dict[str, Any]:
        if isinstance(found := told.pop(0) if told else gone, Failure):
            raise found
        return dict(found)

    monkeypatch.setattr(status, "ask", ask)
    monkeypatch.setattr(status, "EVERY", 0.0)

    assert len(cocktail("status", "amber-otter-42", "--watch").out.splitlines()) == 2
    assert cocktail("status", "amber-otter-42", "--watch").exit == 5


def test_watch_with_json_prints_one_object_a_line(cocktail: Run, answers: list[dict[str, Any]]) -> None:
    answers += [answer(1), answer(20, "finished")]
    said = cocktail("status", "amber-otter-42", "--watch", "--json")

    assert [json.loads(line)["step"] for line in said.out.splitlines()] == [1, 20]


def test_ctrl_c_ends_watch_with_exit_0(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: str) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "ask", interrupted)

    assert cocktail("status", "amber-otter-42", "--watch").exit == 0


def test_the_full_table_of_peers_has_all_columns_and_no_control_characters(
    cocktail: Run, answers: list[dict[str, Any]]
) -> None:
    answers.append(answer(3))
    said = cocktail("status", "amber-otter-42", "--peers")

    head, row = said.out.splitlines()[-2:]
    assert head.split() == list(status.ALL)
    assert row.startswith("attic?[2J RTX 3090 training   42%  12.3k 1.5M 3.0M 31 ms  1 s 11 min      7    2")


def test_a_narrow_terminal_shows_only_the_columns_that_fit() -> None:
    head, row = status.table(status.ALL, [status.all_of(PEER)], 45)

    assert head.split() == ["PEER", "HARDWARE", "STATE", "SHARE", "TOKENS"]
    assert len(row) <= 45


def test_status_without_a_run_is_of_the_only_one_that_goes_on(cocktail: Run) -> None:
    said = cocktail("status")

    assert (said.exit, said.err.splitlines()) == (
        2,
        ["error: which run? Going on here: none", "hint: cocktail runs lists all"],
    )
