"""Samples of the parent's leases: delivered once, under numbers that are never used twice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from transport.protocol import sample_ids
from transport.protocol.sample_ranges import at_positions
from transport.scheduling.leases import Leases
from transport.tree import LeasedSample, ParentLeases


def samples_of(count: int) -> list[LeasedSample]:
    return [LeasedSample(i, 1, 1.0) for i in range(count)]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sets(st.integers(0, 8)), st.booleans(), st.booleans()), max_size=12
    )
)
def test_parent_and_inner_hub_agree_on_what_was_delivered(
    rounds: list[tuple[int, set[int], bool, bool]],
) -> None:
    """Whatever children deliver, and whether the packet is accepted or refused: the parent counts what was
    trained and reported since, each sample once; all others are in its pool or a lease."""
    root, mine = Leases(200), ParentLeases(term=3)
    counted, seen = set[int](), set[int]()
    for round, (size, trained, accepted, renewed) in enumerate(rounds):
        ids = root.next(size)
        if ids:
            root.grant(round, {"h0": tuple((i, i + 1) for i in ids)})
        numbers = sample_ids(mine.add(round, samples_of(len(ids))))
        assert seen.isdisjoint(numbers)
        seen |= set(numbers)
        mine.trained([numbers[i] for i in trained if i < len(numbers)])
        delivers, partly = mine.delivered()
        claims = root.claim("h0", delivers, partly)
        assert claims == delivers
        new = [i for r in claims for i in sample_ids(root.claimed("h0", r))]
        if accepted:
            assert counted.isdisjoint(new)
            counted |= set(new)
            root.count("h0", claims)
            mine.accepted(delivers)
        else:
            root.refuse("h0", claims)
        if renewed:
            root.revoke("h0")
            mine.clear()
            assert mine.delivered() == ([], {})
        assert root.counted == len(counted)
        assert sum(root.places()) == 200


def test_a_lease_that_is_over_has_no_samples() -> None:
    """Numbers of an ended lease are nobody's, and work on them is reported to nobody."""
    leases = ParentLeases(term=1)
    ((first, stop),) = leases.add(0, samples_of(4))
    assert leases.sample(first) == (0, 1, 1.0)
    leases.trained([first, first + 2])
    assert leases.delivered() == ([0], {0: ((0, 1), (2, 3))})
    leases.accepted([0])
    assert leases.sample(first) is None
    leases.trained([stop - 1])
    assert leases.delivered() == ([], {})


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4))
def test_positions_that_do_not_ascend_claim_nothing(positions: list[tuple[int, int]]) -> None:
    """Positions come from a socket: those that ascend name samples, all others none."""
    ids = ((10, 14), (20, 23))
    every, found = sample_ids(ids), sample_ids(at_positions(ids, tuple(positions)))
    flat = [end for run in positions for end in run]
    ascend = all(a < b for a, b in pairwise(flat))
    assert found == ([every[i] for i in sample_ids(positions) if i < len(every)] if ascend else [])
