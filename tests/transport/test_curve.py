"""The loss curve that a hub tells with its status: all of the run, in few points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from transport.history import POINTS, Curve


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
