"""The loss curve that a hub tells with its status: all of the run, in few points."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from transport.ledger import EvaluationRow, Ledger, Recovered, RoundRow
from transport.scheduling import RoundHistory
from transport.scheduling.exchange import POINTS, Curve


@given(some.integers(1, 3000))
def test_a_curve_spans_the_run_evenly_in_few_points(rounds: int) -> None:
    steps = [step for step, _ in Curve((r, 0.5 * r) for r in range(rounds)).points]
    gaps = {later - step for step, later in pairwise(steps)}

    assert steps[0] == 0
    assert min(rounds, POINTS // 2) <= len(steps) <= POINTS
    assert len(gaps) <= 1
    assert rounds - steps[-1] <= max(gaps, default=1)


def test_its_points_are_the_runs_own() -> None:
    assert Curve([(1, 5.0), (2, 4.5)]).points == [(1, 5.0), (2, 4.5)]


def test_a_hub_that_was_started_again_has_the_curves_from_the_start() -> None:
    history = RoundHistory(Recovered(losses=((1, 5.0), (2, 4.5)), held_out=((0, 6.0),)))
    history.evaluated(2, 4.75)

    assert history.curve.points == [(1, 5.0), (2, 4.5)]
    assert history.held_out.points == [(0, 6.0), (2, 4.75)]
    assert history.eval_loss == 4.75


def test_the_ledger_has_the_losses_of_rounds_and_of_evaluations(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="amber-otter-42", samples=9) as ledger:
        for r, loss in enumerate((5.0, None, 4.5)):
            ledger.commit(RoundRow(r, r + 1, 1.0, 2.0, 7, ("ann",), ("ann",), loss, 10), b"packet", ())
        ledger.evaluated(EvaluationRow(0, 0, 6.0, 10, False))
        recovered = ledger.recover()

    assert recovered.losses == ((1, 5.0), (3, 4.5))
    assert recovered.held_out == ((0, 6.0),)
