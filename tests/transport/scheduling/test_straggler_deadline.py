"""The rule that says how long a round waits for whom."""

from collections.abc import Callable
from math import inf
from random import Random
from statistics import median_low

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.scheduling.straggler_deadline import (
    BOUND,
    FIRST,
    FLOOR,
    FREE,
    KNOWN,
    MEDIANS,
    SHARE,
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
    """Measure members that are trusted, with an account that allows everything."""
    made = StragglerDeadline(cap)
    for session, history in arrivals.items():
        for seconds in history:
            made.note(session, seconds)
        made.closed(0.0, (), {session: history[-1]}, {session})
    made.accounts = {True: inf, False: inf}
    return made


@given(members, st.floats(0.1, 1e5), st.floats(0.0, 1e4))
def test_a_deadline_is_never_below_the_floor_or_three_medians_and_never_above_the_cap(
    arrivals: dict[str, list[float]], cap: float, at: float
) -> None:
    """Of members that are at most ten times slower than the median of all."""
    first, *missing = sorted(arrivals)
    made = pace(arrivals, cap)
    deadline = made.after_opening(missing, {first: at})

    known = {s: made._known[s].median for s in arrivals if s in made._known}
    most = BOUND * median_low(known.values())
    assert deadline <= cap
    assert deadline >= min(cap, max(FLOOR, *(MEDIANS * min(most, known[s]) for s in missing)))


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
        assert draw[at] < said.limit(draw[at - 1], said.median)


def test_before_anybody_is_known_a_round_waits_for_half_of_the_first_account() -> None:
    made = StragglerDeadline(CAP)

    assert made.after_opening(["b"], {"a": 1.0}) == FIRST / 2
    assert made.after_opening(["b"], {"a": 20.0}) == 60.0, "three times as long as the first"
    assert made.after_opening(["b"], {}) == CAP, "nobody is here: there is nothing to close with"
    made.closed(FIRST, ["b"], {"a": 1.0}, set())
    assert made.after_opening(["b"], {"a": 1.0}) == 1.0, "one account for all such rounds"


def test_nobody_who_has_not_delivered_is_waited_for_longer_than_those_took_that_have() -> None:
    made = pace({"old": [1.0] * 8, "also": [5.0] * 8})
    for _ in range(WINDOW):
        made.closed(15.0, ["new"], {"old": 1.0, "also": 5.0}, {"old", "also"})
        made.accounts = {True: inf, False: inf}
    assert made.after_opening(["new"], {"old": 1.0, "also": 5.0}) == MEDIANS * 5.0, "however often it missed"

    made.closed(6.0, [], {"old": 1.0, "also": 5.0, "new": 6.0}, {"old", "also", "new"})
    assert made.after_opening(["new"], {"old": 1.0, "also": 5.0}) > MEDIANS * 5.0, "its own times count now"


def test_a_slow_and_steady_member_is_waited_for_and_a_fast_one_is_missed_early() -> None:
    made = pace({"fast": [1.0] * 8, "also": [1.1] * 8, "slow": [10.0] * 8})

    assert made.after_opening(["slow"], {"fast": 1.0, "also": 1.1}) == pytest.approx(30.0)
    assert made.after_opening(["fast"], {"also": 1.1}) == pytest.approx(3.0)
    assert made.after_opening(["fast"], {"also": 1.1, "slow": 10.0}) == 10.0, "that is over"


def test_who_takes_ever_longer_costs_thirty_medians_of_all_at_most() -> None:
    made = pace({"fast": [1.0] * 8, "also": [1.0] * 8, "slow": [1e5] * 8})

    assert made.after_opening(["slow"], {"fast": 1.0, "also": 1.0}) == MEDIANS * BOUND


# ---- waiting in vain ---------------------------------------------------------------------------------------


def rounds_with(idle: Callable[[int], list[str]], rounds: int, usual: float) -> float:
    """Play rounds of two honest members beside others that deliver nothing. Returns by what they lengthen."""
    made, took = pace({"a": [usual] * 8, "b": [usual] * 8}), 0.0
    made.accounts = {True: 0.0, False: 0.0}
    for number in range(rounds):
        missing, here = idle(number), {"a": usual, "b": usual}
        closed = max(usual, made.after_opening(missing, here)) if missing else usual
        made.closed(closed, missing, here, {"a", "b"})
        took += closed
    return took / (rounds * usual)


@settings(max_examples=25)
@given(st.floats(0.01, 100.0), st.integers(1, 300))
def test_members_that_never_deliver_take_a_twentieth_of_the_time_however_many_they_are(
    usual: float, many: int
) -> None:
    names = [f"m{n}" for n in range(many)]

    assert rounds_with(lambda number: names, 80, usual) <= 1 / (1 - SHARE) + 1e-6
    assert rounds_with(lambda number: [f"new-{number}"], 80, usual) <= 1 / (1 - SHARE) + 1e-6


def test_a_member_that_delivers_and_then_stalls_is_charged_to_the_same_account() -> None:
    usual = 0.1
    made, took = pace({"a": [usual] * 8, "b": [usual] * 8, "m": [usual] * 8}), 0.0
    made.accounts = {True: 0.0, False: 0.0}
    for number in range(200):
        here = {"a": usual, "b": usual} | ({"m": usual} if number % 2 else {})
        missing = ["m"] if number % 2 == 0 else []
        closed = max(usual, made.after_opening(missing, here)) if missing else usual
        made.closed(closed, missing, here, {"a", "b", "m"})
        took += closed

    assert took <= 200 * usual * 1.35, "half its medians more in every second round, and a twentieth"


def test_the_account_holds_so_much_that_one_stall_costs_what_it_did_and_is_filled_again() -> None:
    made = pace({"a": [10.0] * 8, "b": [10.0] * 8})
    made.accounts = {True: 0.0, False: 0.0}
    for _ in range(100):
        made.closed(10.0, (), {"a": 10.0, "b": 10.0}, {"a", "b"})

    assert made.accounts[True] == pytest.approx(100 * 10.0 * SHARE)
    assert made.after_opening(["b"], {"a": 10.0}) == 30.0
    made.closed(30.0, ["b"], {"a": 10.0}, {"a"})
    assert made.accounts[True] == pytest.approx(100 * 10.0 * SHARE + 30.0 * SHARE - 15.0), (
        "beyond its own 1.5 medians"
    )


def test_a_wait_that_was_not_in_vain_costs_nothing() -> None:
    made = pace({"a": [1.0] * 8, "slow": [9.0] * 8})
    made.accounts = {True: 2.0, False: 2.0}
    made.closed(9.0, (), {"a": 1.0, "slow": 9.0}, {"a", "slow"})

    assert made.accounts[True] == pytest.approx(2.0 + 9.0 * SHARE)


def test_an_erratic_member_is_waited_for_longer_but_only_ten_medians_of_all() -> None:
    erratic = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 2.0]

    assert summary(erratic) == Arrivals(2.0, pytest.approx(1.4826))
    assert Arrivals(2.0, 1.5).limit(2.0, 2.0) == 2.0 + 6 * 1.5
    assert Arrivals(2.0, 1.5).limit(2.0, 0.8) == BOUND * 0.8


def test_a_slow_round_extends_the_deadline_in_proportion() -> None:
    made = pace({s: [10.0] * 8 for s in "abc"})

    assert made.after_opening(["c"], {"a": 10.0, "b": 11.0}) == pytest.approx(31.5)
    assert made.after_opening(["c"], {"a": 40.0, "b": 44.0}) == pytest.approx(126.0), "an evaluation, say"
    assert made.after_opening(["c"], {"a": 2.0, "b": 2.0}) == 30.0, "a fast round takes nothing away"


@pytest.mark.parametrize("factor", [2.9, 8.0, 15.0])
def test_a_member_that_became_slower_is_cut_off_a_few_times_and_then_waited_for(factor: float) -> None:
    """When its late report comes is what is waited for, once the account can pay it; its own times count
    then."""
    made = pace({"a": [10.0] * 8, "b": [10.0] * 8})
    made.accounts = {True: 0.0, False: 0.0}
    cut = []
    for _ in range(1000):
        deadline = made.after_opening(["b"], {"a": 10.0})
        late = deadline < factor * 10.0
        cut.append(late)
        here = {"a": 10.0} if late else {"a": 10.0, "b": factor * 10.0}
        made.closed(min(deadline, factor * 10.0), ["b"] if late else [], here, {"a", "b"})
        if late:
            made.came_late("b", factor * 10.0)

    first = cut.index(False)
    assert first <= (factor * FREE) / SHARE + 2, "by then a twentieth of the time is as much"
    assert not any(cut[first:]), "and then never"
