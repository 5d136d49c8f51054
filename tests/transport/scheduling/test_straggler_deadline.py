"""The rule that says how long a round waits for whom."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.scheduling.straggler_deadline import (
    BOUND,
    FLOOR,
    KNOWN,
    MEDIANS,
    WINDOW,
    Arrivals,
    StragglerDeadline,
    summary,
)

CAP = 600.0
times = st.floats(0.0, 1e4)
histories = st.lists(times, min_size=KNOWN, max_size=WINDOW)
members = st.dictionaries(st.sampled_from("abcdef"), histories, min_size=2)


def pace(arrivals: dict[str, list[float]], cap: float = CAP) -> StragglerDeadline:
    made = StragglerDeadline(cap)
    for session, history in arrivals.items():
        for seconds in history:
            made.note(session, seconds)
    return made


@given(members, st.floats(0.1, 1e5), st.floats(0.0, 1e4))
def test_a_deadline_is_never_below_the_floor_or_three_medians_and_never_above_the_cap(
    arrivals: dict[str, list[float]], cap: float, at: float
) -> None:
    first, *missing = sorted(arrivals)
    deadline = pace(arrivals, cap).after_opening(missing, {first: at})

    least = [summary(arrivals[s]) for s in missing]
    assert deadline <= cap
    assert deadline >= min(cap, max(FLOOR, *(MEDIANS * h.median for h in least if h is not None)))


@given(members, st.floats(0.0, 1e4), st.floats(1.0, 100.0))
def test_slower_arrivals_never_move_the_deadline_forward(
    arrivals: dict[str, list[float]], at: float, times_slower: float
) -> None:
    first, *missing = sorted(arrivals)
    made = pace(arrivals)

    assert made.after_opening(missing, {first: at * times_slower}) >= made.after_opening(missing, {first: at})


@given(histories, st.floats(1.0, 50.0))
def test_half_a_window_of_slower_arrivals_sets_the_limit(before: list[float], times_slower: float) -> None:
    slow = times_slower * max(before)
    said = summary([*before, *[slow] * (WINDOW // 2)][-WINDOW:])

    assert said is not None
    assert said.median == slow


@given(st.integers(0, 1000), st.floats(0.01, 100.0))
def test_jitter_of_forty_percent_never_reaches_a_limit(seed: int, usual: float) -> None:
    random = Random(seed)
    draw = [usual * random.uniform(0.6, 1.4) for _ in range(200)]

    for at in range(WINDOW, 200):
        said = summary(draw[at - WINDOW : at])
        assert said is not None
        assert draw[at] < said.limit(said.median)


def test_with_too_little_history_the_cap_holds() -> None:
    made = pace({"old": [1.0] * 8, "new": [1.0] * (KNOWN - 1)})

    assert made.after_opening(["new"], {"old": 1.0}) == CAP
    assert made.after_opening(["old", "stranger"], {"new": 1.0}) == CAP
    assert made.after_opening(["old"], {}) == CAP, "nobody is here: there is nothing to close with"
    made.note("new", 1.0)
    assert made.after_opening(["new"], {"old": 1.0}) == 3.0
    made.forget("new")
    assert made.after_opening(["new"], {"old": 1.0}) == CAP


def test_a_slow_and_steady_member_is_waited_for_and_a_fast_one_is_missed_early() -> None:
    made = pace({"fast": [1.0] * 8, "also": [1.1] * 8, "slow": [40.0] * 8})

    assert made.after_opening(["slow"], {"fast": 1.0, "also": 1.1}) == pytest.approx(120.0)
    assert made.after_opening(["fast"], {"also": 1.1, "slow": 40.0}) == pytest.approx(3.0)


def test_an_erratic_member_is_waited_for_longer_but_only_ten_medians_of_all() -> None:
    erratic = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 2.0]

    assert summary(erratic) == Arrivals(2.0, pytest.approx(1.4826))
    assert Arrivals(2.0, 1.5).limit(2.0) == 2.0 + 6 * 1.5
    assert Arrivals(2.0, 1.5).limit(0.8) == BOUND * 0.8


def test_a_slow_round_extends_the_deadline_in_proportion() -> None:
    made = pace({s: [10.0] * 8 for s in "abc"})

    assert made.after_opening(["c"], {"a": 10.0, "b": 11.0}) == pytest.approx(31.5)
    assert made.after_opening(["c"], {"a": 40.0, "b": 44.0}) == pytest.approx(126.0), "an evaluation, say"
    assert made.after_opening(["c"], {"a": 2.0, "b": 2.0}) == 30.0, "a fast round takes nothing away"


def test_a_member_that_became_slower_is_cut_off_four_times_at_most_for_each_factor_of_three() -> None:
    for factor, most in ((2.9, 0), (8.0, 4), (20.0, 8), (70.0, 12)):
        made = pace({"a": [10.0] * 8, "b": [10.0] * 8})
        cut = []
        for _ in range(40):
            deadline = made.after_opening(["b"], {"a": 10.0})
            cut.append(deadline < factor * 10.0)
            made.note("a", 10.0)
            made.note("b", min(deadline, factor * 10.0))

        if factor < CAP / 10:
            assert sum(cut) <= most, f"{factor} times slower: {cut}"
            assert not any(later and not earlier for earlier, later in pairwise(cut)), "and then never"
