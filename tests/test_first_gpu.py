"""scripts/gpu: what has figures is not measured again, what fails is told, and no command runs for ever."""

import sys
from pathlib import Path

from scripts.first_gpu.measure import LEAST, measure
from scripts.first_gpu.stages import Scale, Stage, last_object, outcomes, picked, stages, step_figures
from scripts.report import cost_tables
from scripts.report.rows import read

SAYS = """print('warming up'); print('{"packets": 50, "equal": true}')"""


def stage(name: str, program: str) -> Stage:
    return Stage(name, [sys.executable, "-c", program], "equal", picked("packets", "equal"))


def test_each_stage_leaves_its_output_and_a_row_and_a_failing_one_stops_no_other(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    every = [stage("fails", "raise SystemExit(3)"), stage("parity", SAYS)]
    failed = measure(every, "H200", tmp_path, out, minutes=2)

    assert failed == ["fails"]
    assert [(row["stage"], row["figures"]) for row in read(out)] == [
        ("parity", {"packets": 50, "equal": True})
    ]
    assert "warming up" in (tmp_path / "parity.txt").read_text()
    assert "| parity | equal | packets 50, equal True |" in cost_tables.gpu(tmp_path)


def test_nothing_is_begun_that_the_minutes_have_no_room_for(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"

    assert measure([stage("parity", SAYS)], "H200", tmp_path, out, minutes=LEAST / 61) == []
    assert read(out) == []


def test_a_page_without_rows_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert "Not measured" in cost_tables.gpu(tmp_path)


def test_no_stage_takes_over_ninety_seconds_and_names_are_unique() -> None:
    every = stages("cuda", Path("out"), Scale())

    assert max(stage.seconds for stage in every) <= 90
    assert len({stage.name for stage in every}) == len(every)


def test_figures_are_read_from_what_the_commands_print() -> None:
    assert last_object('text\n{"a": 1}\n{"b": 2}\nmore') == {"b": 2}
    assert outcomes("3 failed, 207 passed in 47 s") == {"failed": 3, "passed": 207}
    assert step_figures('{"step_s": 1.02, "compute_s": 1.0}')["beyond_compute"] == 0.02
