"""metrics.jsonl: a line for each committed round, once."""

import json
from pathlib import Path
from typing import Any

import pytest

from cocktail_cli.host import run_folder
from cocktail_cli.ui import Metrics, RunStarted, read_written
from cocktail_cli.ui.events import PeerJoined, PeerLeft, PeerReady, Step
from cocktail_cli.ui.metrics_lines import line
from recipes.config import load_recipe
from transport import Ledger
from transport.ledger import Counted, RoundRow

STARTED = RunStarted("amber-otter-42", "cocktail://k.t@h:1/amber-otter-42", "smoke", "9f", 1000, 4, "out")
STEP = Step(
    step=3,
    steps=4,
    round=2,
    loss=1.5,
    peers=3,
    tokens=900,
    accepted=["a", "b"],
    up_bytes={"a": 100, "b": 120, "c": 80},
    down_bytes={"a": 200, "b": 200, "c": 200},
    ratio_fp16=117.0,
    packet_bytes=90,
    step_s=2.0,
    compute_s={"a": 1.0, "b": 1.2, "c": 1.5},
    wait_s={"a": 0.1, "b": 0.3, "c": 0.2},
    tokens_by_peer={"a": 100, "b": 200},
    lr=1e-4,
    grad_norm=0.7,
    samples=48,
)
WANTED = {
    "v": 1,
    "kind": "step",
    "step": 3,
    "round": 2,
    "loss": 1.5,
    "tokens": 900,
    "tokens_per_s": 150.0,
    "peers": 3,
    "late": 1,
    "samples": 48,
    "lr": 1e-4,
    "grad_norm": 0.7,
    "step_s": 2.0,
    "compute_s": 1.2,
    "wait_s": 0.2,
    "sync_s": 0.6,
    "up_bytes": 300,
    "down_bytes": 600,
    "ratio_fp16": 117.0,
    "packet_bytes": 90,
}


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / run_folder.METRICS).read_text().splitlines()]


def test_a_step_is_a_flat_line_of_sums_and_medians() -> None:
    [found] = Metrics().lines(STEP)

    assert {key: found[key] for key in WANTED} == WANTED
    assert set(found) == {*WANTED, "t"}


def test_peers_that_come_and_go_are_lines_with_the_round_they_did_it_in() -> None:
    metrics = Metrics()
    list(metrics.lines(STEP))
    events = (PeerJoined("d", "CPU"), PeerReady("d", 3, 4.5), PeerLeft("d", "left: Ctrl-C"))

    found = [line for event in events for line in metrics.lines(event)]

    assert [(each["kind"], each["round"], each["did"]) for each in found] == [
        ("peer", 2, "joined"),
        ("peer", 2, "ready"),
        ("peer", 2, "left"),
    ]
    assert (found[0]["hardware"], found[1]["joining_s"], found[2]["reason"]) == ("CPU", 4.5, "left: Ctrl-C")


def test_what_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / run_folder.METRICS
    whole = '{"step": 1, "round": 4, "loss": 1.0}\n{"v":1,"kind":"eval","round":3,"eval_loss":2.0}\n'
    path.write_text(whole + '{"v":')

    assert read_written(path) == (4, 3)
    assert path.read_text() == whole
    assert read_written(tmp_path / "none.jsonl") == (-1, -1)


@pytest.mark.parametrize("junk", [b"\xff\x00{", b"[1, 2]", b"{}", b'{"round": "x", "loss": 1}', b"", b"3"])
def test_a_damaged_line_is_in_nobodys_way(tmp_path: Path, junk: bytes) -> None:
    """A run with such a line can be resumed; it could not be."""
    path = tmp_path / "metrics.jsonl"
    good = b'{"round": 4, "loss": 1.5}\n{"round": 3, "eval_loss": 2.5}\n'
    path.write_bytes(good + junk + b"\n" + good)

    assert read_written(path) == (4, 3)


def test_rounds_that_a_killed_hub_could_not_write_down_are_filled_in_from_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / run_folder.LEDGER, run="amber-otter-42", samples=8)
    for round in range(4):
        row = RoundRow(round, round, 100.0, 101.0 + round, 7, ("a", "b"), ("a",), 2.0 - round, 50)
        ledger.commit(row, b"packet", (Counted(round, "a", "s", ((2 * round, 2 * round + 2),)),))
    ledger.close()
    before = [line("step", step=1, round=0, loss=2.0), line("step", step=2, round=1, loss=1.0)]
    (tmp_path / run_folder.METRICS).write_text("".join(json.dumps(each) + "\n" for each in before))

    recorder = run_folder.Recorder(tmp_path, pytest.fail, load_recipe("smoke", ["global_batch_size=2"]))
    recorder.show(RunStarted(**(vars(STARTED) | {"round": 4})))
    recorder.close()

    found = written(tmp_path)
    assert [each["round"] for each in found] == [0, 1, 2, 3]
    assert [(each["step"], each["loss"], each["tokens"]) for each in found[2:]] == [
        (3, 0.0, 150),
        (4, -1.0, 200),
    ]
    assert found[3]["t"] == "1970-01-01T00:01:44Z"
    assert (found[3]["peers"], found[3]["late"], found[3]["packet_bytes"]) == (2, 1, 6)
    assert found[3]["up_bytes"] is None, "the ledger does not know"
    assert set(found[3]) == {*WANTED, "t"}
