"""The choice of who aggregates follows from what devices wait for, once, in the first rounds."""

from __future__ import annotations

import pytest

from transport.aggregators.aggregation_choice import EARLY, GAIN, AggregationChoice, Way
from transport.diagnosis import SlowestLine


def play(
    choice: AggregationChoice, by_hub: SlowestLine | None, by_peers: SlowestLine, able: int, rounds: int = 40
) -> list[bool]:
    """Return who has aggregated in each round. A line is known five rounds after a change of who does."""
    found, known = [], 0
    for _ in range(rounds):
        found.append(choice.peers_aggregate(able))
        known += 1
        slowest = None if known < 5 else by_peers if found[-1] else by_hub
        if choice.note(slowest, moving=False):
            known = 0
    return found


def line(name: str, waiting: float) -> SlowestLine:
    return SlowestLine(name, waiting, 1e5)


@pytest.mark.parametrize("bound", ["the hub's up", "the hub's down"])
def test_peers_aggregate_where_the_hubs_line_bounds_the_rounds_and_they_are_faster(bound: str) -> None:
    choice = AggregationChoice()
    found = play(choice, line(bound, 0.8), line("each peer's up", 0.3), able=4)
    assert found == [False] * 5 + [True] * 35
    assert choice.way is Way.PEERS


def test_the_hub_aggregates_again_where_that_was_no_slower() -> None:
    """Steps that are 5 % faster are not worth the trust in peers."""
    waiting = 1 - (1 - 0.8) * (GAIN - 0.05)
    found = play(AggregationChoice(), line("the hub's down", 0.8), line("p1's up", waiting), able=4)
    assert found == [False] * 5 + [True] * 5 + [False] * 30


@pytest.mark.parametrize("bound", ["the compute", "each peer's up", "p1's down"])
def test_nothing_is_tried_where_another_line_bounds_the_rounds(bound: str) -> None:
    choice = AggregationChoice()
    assert not any(play(choice, line(bound, 0.8), line(bound, 0.1), able=4))
    assert choice.way is Way.HUB


def test_nothing_is_tried_with_one_aggregator_or_late() -> None:
    hubs, peers = line("the hub's down", 0.8), line("the compute", 0.0)
    assert not any(play(AggregationChoice(), hubs, peers, able=1))
    assert not any(play(AggregationChoice(), None, peers, able=4))
    late = AggregationChoice(round=EARLY)
    late.peers_aggregate(4)
    assert not late.note(None, moving=False)
    assert late.way is Way.HUB


def test_a_trial_is_judged_after_error_feedback_has_moved() -> None:
    choice = AggregationChoice()
    choice.peers_aggregate(4)
    assert choice.note(line("the hub's up", 0.8), moving=False)
    for _ in range(100):
        assert not choice.note(line("the hub's up", 0.9), moving=True)
        assert choice.way is Way.TRYING
    assert choice.note(line("the hub's up", 0.9), moving=False)
    assert choice.way is Way.HUB


def test_a_restarted_hub_goes_on_with_those_that_aggregated() -> None:
    """They have the error feedback."""
    assert AggregationChoice(round=7, aggregators=3).peers_aggregate(3)
    assert not AggregationChoice(round=7).peers_aggregate(3)
