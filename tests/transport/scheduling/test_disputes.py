"""Who is right about x' is what the ledger says, and nobody is dropped before it has told."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from transport.scheduling.disputes import REMEMBERED, REST, Disputes

TRUTH, LIE = 7, 8


def test_those_who_agree_wait_for_nobody_and_what_they_say_is_known() -> None:
    disputes = Disputes({})
    assert disputes.reported(3, {"ann": TRUTH, "bob": TRUTH}, {"ann": 1, "bob": 9}) == set()
    disputes.agree(3, TRUTH, 2)
    assert disputes.known(3) == TRUTH
    assert disputes.next_replay(0.0) is None
    assert disputes.deadline() == inf


def test_until_the_replay_the_round_goes_on_with_those_of_whom_the_run_has_most() -> None:
    disputes = Disputes({})
    waiting = disputes.reported(3, {"ann": TRUTH, "eve": LIE, "eva": LIE}, {"ann": 50, "eve": 1, "eva": 1})
    assert waiting == {"eve", "eva"}
    assert disputes.waits("eve")
    assert not disputes.waits("ann")
    assert disputes.next_replay(10.0) == 3
    verdict = disputes.replayed(TRUTH, 12.0)
    assert verdict.false == {"eve", "eva"}
    assert not verdict.differs_from_all
    assert disputes.known(3) == TRUTH
    assert not disputes.waits("eve"), "it is dropped by who asked"


def test_the_replay_decides_against_those_with_most_updates_too() -> None:
    disputes = Disputes({})
    disputes.reported(3, {"ann": TRUTH, "eve": LIE}, {"ann": 1, "eve": 50})
    disputes.next_replay(0.0)
    assert disputes.replayed(TRUTH, 1.0).false == {"eve"}


def test_a_newcomer_that_contradicts_what_was_agreed_waits_and_may_be_right() -> None:
    disputes = Disputes({})
    disputes.agree(3, LIE, 1)
    assert disputes.claims("ann", 3, TRUTH)
    assert disputes.waits("ann")
    disputes.next_replay(0.0)
    verdict = disputes.replayed(TRUTH, 1.0)
    assert verdict.false == set()
    assert disputes.known(3) == TRUTH


def test_a_replay_that_fails_judges_by_what_was_agreed() -> None:
    disputes = Disputes({3: TRUTH})
    disputes.claims("eve", 3, LIE)
    disputes.next_replay(0.0)
    assert disputes.replayed(None, 1.0).false == {"eve"}
    assert disputes.known(3) == TRUTH


def test_the_run_is_in_doubt_only_where_several_agree_on_what_the_replay_denies_and_nobody_says_it() -> None:
    for keys, saying, doubt in ((2, {}, True), (1, {}, False), (2, {"ann": TRUTH}, False)):
        disputes = Disputes({})
        disputes.agree(3, LIE, keys)
        disputes.claims("eve", 3, 99)
        for session, said in saying.items():
            disputes.claims(session, 3, said)
        disputes.next_replay(0.0)
        assert disputes.replayed(TRUTH, 1.0).differs_from_all is doubt


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_replays_take_a_tenth_of_the_time_however_many_lies_there_are(seconds: list[float]) -> None:
    disputes, now, worked = Disputes({}), 0.0, 0.0
    for number, took in enumerate(seconds):
        disputes.agree(number, TRUTH, 1)
        disputes.claims("eve", number, LIE)
        now = max(now, disputes.deadline())
        assert disputes.next_replay(now) == number
        assert disputes.next_replay(now) is None, "one at a time"
        now, worked = now + took, worked + took
        disputes.replayed(TRUTH, now)
    assert worked <= (max(now, disputes._next_at)) / (1 + REST) + 1e-6


@given(st.lists(st.integers(0, 500), max_size=300))
def test_it_remembers_the_newest_rounds_and_forgets_who_is_gone(rounds: list[int]) -> None:
    disputes = Disputes({})
    for round in sorted(rounds):
        disputes.agree(round, TRUTH, 1)
    assert len(disputes._agreed) <= REMEMBERED + 1
    for round in sorted(disputes._agreed):
        disputes.claims("eve", round, LIE)
    disputes.gone("eve")
    assert disputes.next_replay(0.0) is None
    assert disputes._claims == {}
