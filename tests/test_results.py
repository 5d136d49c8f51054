"""scripts/results and scripts/rivals: the work is the same for all, tables say only what was measured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench import growth
from scripts.comparison import links, paced, work
from scripts.comparison.faults import not_counted, stall
from scripts.comparison.systems import SYSTEMS
from scripts.netlab import lab as netlab
from scripts.report import rival_tables
from scripts.report import rows as measured
from scripts.report.markdown import NOTHING


def test_compute_fp16_bytes_and_lines_are_in_the_ratio_of_gptj() -> None:
    for width in work.WIDTHS:
        parameters, seconds = work.parameters(width), work.compute_s(width)
        line = 500 * work.MBIT * 1e6 / 8

        there = 2 * work.GPTJ / (500e6 / 8) / work.GPTJ_S
        assert 2 * parameters / line / seconds == pytest.approx(there)


def test_the_model_has_the_parameters_that_its_lines_are_made_for() -> None:
    width = work.WIDTHS[-1]
    assert sum(p.numel() for p in work.make_model(width).parameters()) == work.parameters(width)


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.averages])
def test_an_exchange_that_is_measured_is_one_that_can_be_waited_for(name: str) -> None:
    case = links.Case(name, ())
    for speed in links.SPEEDS:
        width = case.width_for(speed)
        assert width == work.WIDTHS[-1] or case.exchange_s(speed, width) <= links.WAITED


def test_a_change_of_lines_is_followed_once_the_rung_rests_and_steps_are_as_short_as_later() -> None:
    took = [2.5] * 51 + [9.0] * 7 + [2.6] * 44  # the lines change in round 51, the rung in 56
    said = {"steps": 1, "sent": 1, "down_bytes": {}}
    rows = [said | {"round": r, "rung": r < 56, "end": sum(took[: r + 1])} for r in range(len(took))]
    told = SimpleNamespace(heard=lambda kind: rows)
    run: Any = SimpleNamespace(hub=told, peers=[told])

    assert [links.followed(run, 1, range(41, 51)), links.followed(run, 51, range(91, 102))] == [0, 6]


def test_a_stall_is_told_while_it_lasts() -> None:
    assert stall([0.0, 1.0, 2.0], 2.5, 9.0)["stalled"] == 6.0
    assert stall([0.0, 1.0, 2.0, 6.0, 7.0], 2.5, 7.5)["stalled"] == 3.0


def test_what_torchft_computed_and_does_not_count_is_lost() -> None:
    together = [{"step": 0, "tried": 0, "batches": 4}] * 4
    failed = [{"step": 1}] * 3  # the fourth was killed in it
    three = [{"step": 1, "tried": 1, "batches": 7}] * 3
    again = [{"step": 2, "tried": 2, "batches": 11}] * 3
    healed = {"step": 2, "tried": 1, "batches": 11, "replaced": True}  # the fourth, in DiLoCo

    assert not_counted([together[0]], together, 0) == 0
    assert not_counted([together[0], three[0]], [*together, *failed, *three], 1) == 4 * work.BATCH
    assert not_counted([together[0]], [*together, *failed], 0) == 0  # the step goes on
    assert not_counted([again[0]], [*together, *three, *again, healed], 0) == work.BATCH


def test_a_fit_finds_the_law_and_says_how_far_it_is_off_beyond_its_points() -> None:
    def point(parameters: float, peers: int) -> measured.Row:
        cpu = 0.002 + 3e-9 * parameters + 1e-10 * peers * parameters
        own = {"bytes": 0.03 * peers * parameters, "memory": 2e8 + 4 * parameters, "cpu_s": cpu}
        return {"kind": "hub", "parameters": parameters, "peers": peers, **own}

    points = [point(p, n) for p in (1e6, 1e7, 3e7) for n in (2, 4, 16)]
    beyond = point(1e9, 64)
    beyond["cpu_s"] *= 2
    (fit,) = (row for row in growth.fitted([*points, beyond]) if row["name"] == "hub, CPU-s")

    assert fit["inside"] < 1e-6
    assert fit["beyond"] == [[1e9, 64, pytest.approx(-0.5)]]
    assert fit["says"]["20.6 B parameters, 8 peers"] == pytest.approx(point(20.6e9, 8)["cpu_s"])


def test_a_row_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for seconds in (1, 2):
        measured.keep(path, {"system": "a", "speed": "500", "step_s": seconds}, ("system", "speed"))
    measured.keep(path, {"system": "b", "speed": "500", "step_s": 3}, ("system", "speed"))

    assert [row["step_s"] for row in measured.read(path)] == [2, 3]


def test_what_was_not_measured_is_an_empty_cell(tmp_path: Path) -> None:
    row = {
        "system": "cocktail",
        "parameters": 1e6,
        "compute_s": 2.0,
        "sent": 1e4,
        "busy": 0.5,
        "date": "today",
    }
    rows = [row | {"speed": "unthrottled", "step_s": 2.0}, row | {"speed": "500", "step_s": 2.5}]
    rows.append(row | {"system": "torch DDP FP16", "speed": "500", "step_s": 20.0})
    (tmp_path / "links.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    lines = rival_tables.links(tmp_path).splitlines()

    assert "| cocktail | 100.0% | 80.0% |" in lines
    assert "| torch DDP FP16 |  | 10.0% |" in lines  # it was not run without a limit
    assert rival_tables.faults(tmp_path) == NOTHING


def test_packets_go_one_by_one_where_a_line_is_slow_or_loses_some() -> None:
    lab = netlab.Lab({"hub": netlab.Line(), "p1": netlab.Line(up=100, down=100)})
    assert not lab.packet_by_packet
    for line in (netlab.Line(up=100, down=2), netlab.Line(loss=0.1)):
        lab.lines["p1"] = line
        assert lab.packet_by_packet


def test_a_paced_peer_is_given_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr(paced.loop, "join", None)
    monkeypatch.setattr(paced.loop, "compute", lambda *asked: given.extend(asked))
    monkeypatch.setattr(paced, "command", lambda: paced.loop.compute("link", "peer", 3, 1, ["sample"], 0.5))

    paced.main([], sample_s=0.1)

    assert given == ["link", "peer", 3, 1, ["sample"], 0.5]
