"""A run's folder as a history: rounds from the ledger, details from events.jsonl, each of them once."""

from pathlib import Path
from typing import Any

import pytest
from a_run import BEGAN, PARAMETERS, ARun, a_run

from cocktail_cli.extensions.dashboard.report_page import bars_of, idle_of, page_of, ratio_of
from cocktail_cli.extensions.dashboard.run_history import (
    About,
    Contribution,
    Round,
    RunFolderReader,
    RunHistory,
)
from cocktail_cli.machine import save_run
from cocktail_cli.ui import events
from transport.protocol import LedgerError


@pytest.fixture
def run(tmp_path: Path):
    with a_run(tmp_path / "out") as run:
        yield run


def look(run: ARun) -> RunHistory:
    return run.reader().look()


def blocks(c: RunHistory, title: str) -> list[Any]:
    """Return the blocks of a section of the page."""
    return [block for one in page_of([c])["sections"] if one["title"] == title for block in one["blocks"]]


def part_of(c: RunHistory, peer: str) -> Contribution:
    return next(one for one in c.contributions if one.peer == peer)


def test_rounds_have_the_ledgers_loss_and_the_diarys_bytes(run: ARun) -> None:
    run.commit("ann", "bob", loss=3.5)

    (one,) = look(run).rounds

    assert (one.loss, one.members, one.seconds) == (3.5, ("ann", "bob"), pytest.approx(9.0))
    assert (one.up, one.down) == (40_000, 60_000)
    assert idle_of([one]) == pytest.approx(0.25)
    assert one.ratio == pytest.approx(2 * 2 * 2 * PARAMETERS / 100_000)


def test_a_round_whose_packets_move_nothing_has_no_ratio(run: ARun) -> None:
    step = events.Step(1, 20, 0, 4.0, 1, up_bytes={"ann": 500}, down_bytes={"ann": 500}, ratio_fp16=0.0)
    run.commit("ann", told=False)
    run.tell(step, 9.0)
    run.commit("ann")

    told = look(run)

    assert told.rounds[0].ratio is None
    assert ratio_of(told) == told.rounds[1].ratio


def test_a_round_that_the_diary_lacks_is_there_without_its_bytes(run: ARun) -> None:
    run.commit("ann", told=False)

    (one,) = look(run).rounds

    assert (one.loss, one.up, idle_of([one]), one.ratio) == (4.0, 0, None, None)


def test_the_best_evaluation_is_the_first_of_the_lowest_loss(run: ARun) -> None:
    for loss in (4.0, 2.5, 2.5, 3.0):
        run.commit("ann")
        run.evaluate(loss)

    told = look(run)

    assert told.best == (2, 2.5)


def test_a_round_has_rate_norm_and_tokens(run: ARun) -> None:
    run.commit("ann")

    told = look(run)

    assert (told.rounds[0].lr, told.rounds[0].grad_norm) == (pytest.approx(5e-5), 0.5)
    assert told.speeds == [(1.0, pytest.approx(100 / 9.0))]


def test_a_round_that_is_over_at_once_makes_no_spike_of_speed() -> None:
    seconds = [1.0] * 9 + [0.01]
    rounds = tuple(Round(n, n + 1, 0.0, taken, 4.0, ("ann",), tokens=100) for n, taken in enumerate(seconds))

    told = RunHistory(About("one"), "running", 10, 20, 0.0, 0.0, rounds)

    assert [speed for _, speed in told.speeds] == pytest.approx([100.0] * 9 + [500 / 4.01])
    assert told.recent_speed == pytest.approx(1000 / 9.01)


def test_a_second_look_finds_what_is_new_and_counts_nothing_twice(run: ARun) -> None:
    reader = run.reader()
    run.commit("ann", "bob")
    reader.look()
    run.commit("ann", "bob", late=("bob",))
    again = reader.look()

    assert again == look(run)
    assert reader.look() == again
    assert [part_of(again, peer).samples for peer in ("ann", "bob")] == [8, 4]
    assert part_of(again, "bob").left_out == 1
    assert sum(one.part for one in again.contributions) == pytest.approx(1.0)


def test_what_the_diary_says_before_the_ledger_shows_it_is_not_lost(run: ARun) -> None:
    """An event may be read in one look, and the ledger's row of it in the next."""
    reader = run.reader()
    run.commit("ann")
    ledger, reader.read_ledger = reader.read_ledger, lambda: None  # type: ignore[method-assign]
    reader.look()
    reader.read_ledger = ledger  # type: ignore[method-assign]

    assert reader.look().rounds[0].up == 20_000


def test_half_a_line_waits_and_a_line_cut_short_by_a_kill_is_passed_over(run: ARun) -> None:
    reader = run.reader()
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"v":1,"t":"2026-11-20T14:0')
    assert reader.look().stays == ()
    with (run.folder / "events.jsonl").open("a") as file:
        file.write("\n")
    run.join("ann", 5.0)

    assert [stay.peer for stay in reader.look().stays] == ["ann"]


def test_a_peer_that_left_and_came_back_has_two_stays(run: ARun) -> None:
    run.join("ann", 5.0)
    run.leave("ann", 20.0, "connection lost")
    run.join("ann", 40.0)

    first, second = look(run).stays

    assert (first.joined, first.left, first.reason) == (BEGAN + 5, BEGAN + 20, "connection lost")
    assert (second.joined, second.left) == (BEGAN + 40, None)
    assert look(run).present == ["ann"]


def test_a_peer_takes_part_once_it_is_ready(run: ARun) -> None:
    run.join("ann", 5.0)
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"v":1,"t":"2026-11-20T14:00:12Z","event":"peer_ready","peer":"ann","round":0}\n')

    (stay,) = look(run).stays

    assert (stay.joined, stay.ready) == (BEGAN + 5, BEGAN + 12)
    assert [(bar["start"], bar["wide"], bar["look"]) for bar in bars_of(stay, BEGAN, BEGAN + 30)] == [
        (5.0, 7.0, "pale"),
        (12.0, 18.0, ""),
    ]


def test_peers_of_a_hub_that_was_killed_left_when_it_was_started_again(run: ARun) -> None:
    run.join("ann", 5.0)
    run.start(round=3, seconds=60.0)

    (stay,) = look(run).stays

    assert (stay.left, "started again" in stay.reason) == (BEGAN + 60, True)


def test_nobody_is_in_a_run_that_is_over(run: ARun) -> None:
    run.join("ann", 5.0)
    run.commit("ann")
    run.finish(30.0)

    told = look(run)

    assert (told.state, told.reason, told.present) == ("finished", "every sample was counted", [])


def test_a_run_that_failed_says_so_and_why_above_its_figures(run: ARun) -> None:
    save_run(run.record.ended("failed", 0, None, "stopped by its host"))

    (kind, said), (behind, _) = blocks(look(run), "Summary")

    assert (kind, behind) == ("ending", "figures")
    assert said.endswith("ended without a result, step 0 of 20: stopped by its host.")


def test_nobody_is_in_a_run_whose_hub_was_killed(run: ARun) -> None:
    run.join("ann", 5.0)

    told = RunFolderReader(run.record, lambda _: False).look()

    assert (told.state, told.present) == ("died", [])


def test_whether_a_hub_is_there_is_asked_seldom_and_only_where_nothing_is_heard(run: ARun) -> None:
    asked: list[str] = []
    reader = RunFolderReader(run.record, lambda record: bool(asked.append(record.run)))
    reader.know(seen=1000.0)

    states = [reader.state(now) for now in (1010.0, 1031.0, 1040.0, 1062.0)]

    assert states == ["running", "died", "died", "died"]
    assert len(asked) == 2
    reader.know(seen=1070.0)  # it was started again
    assert reader.state(1071.0) == "running"


def test_a_round_without_new_gradients_does_not_count_the_last_wait_again(run: ARun) -> None:
    run.commit("ann")
    run.commit("ann", loss=None)

    told = look(run)

    assert idle_of(told.rounds[1:]) is None
    assert part_of(told, "ann").wait_s == 1.0


def test_no_secret_and_no_path_of_the_host_is_in_a_history(run: ARun, tmp_path: Path) -> None:
    run.commit("ann")
    said = repr(look(run))

    assert "smoke" in said
    for secret in (
        run.record.keys["token"],
        run.record.keys["stop"],
        run.record.keys["secret"],
        str(tmp_path),
    ):
        assert secret not in said


def test_a_run_whose_recipe_is_of_another_version_is_told_without_it(run: ARun) -> None:
    (run.folder / "recipe.json").write_text('{"version": 1, "name": "smoke", "compression": {"of_old": 1}}')
    run.commit("ann")

    told = look(run)

    assert (told.about.recipe, told.about.recipe_text, len(told.rounds)) == ("smoke", "", 1)


def test_a_folder_without_a_ledger_is_an_error(run: ARun) -> None:
    (run.folder / "ledger" / "ledger.db").rename(run.folder / "elsewhere")

    with pytest.raises(LedgerError):
        look(run)
