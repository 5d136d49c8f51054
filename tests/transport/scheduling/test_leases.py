from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transport.protocol import (
    SamplePool,
    SampleRanges,
    count_samples,
    minus,
    pack_ranges,
    ranges_of,
    sample_ids,
    unpack_ranges,
)
from transport.scheduling import Leases

id_sets = st.sets(st.integers(0, 200))


def compact(ids: Iterable[int]) -> SampleRanges:
    """Compute the ranges of `ids`, one by one."""
    pool = SamplePool()
    for i in sorted(ids):
        pool.put(((i, i + 1),))
    return pool.ranges


@given(id_sets)
def test_runs_are_the_set_they_were_made_of(ids: set[int]) -> None:
    runs = compact(ids)

    assert sample_ids(runs) == sorted(ids)
    assert ranges_of(sorted(ids)) == runs
    assert count_samples(runs) == len(ids)
    assert unpack_ranges(pack_ranges(runs)) == runs
    assert all(a[1] < b[0] for a, b in pairwise(runs)), "sorted, and neighbours are joined"
    assert sample_ids(minus((0, 201), runs)) == sorted(set(range(201)) - ids)


@given(id_sets, st.integers(0, 300))
def test_a_pool_gives_the_lowest_ids_and_removes_them_once(ids: set[int], n: int) -> None:
    pool = SamplePool(compact(ids))
    lowest = pool.lowest(n)
    pool.remove(ranges_of(lowest))

    assert lowest == sorted(ids)[:n]
    assert sample_ids(pool.ranges) == sorted(ids)[n:]
    assert pool.size == len(ids) - len(lowest)


@given(id_sets, id_sets)
def test_an_id_cannot_be_put_back_twice(a: set[int], b: set[int]) -> None:
    pool = SamplePool(compact(a))
    if a & b:
        with pytest.raises(ValueError, match="overlap"):
            pool.put(compact(b))
    else:
        pool.put(compact(b))
        assert sample_ids(pool.ranges) == sorted(a | b)


def test_a_second_claim_of_a_lease_is_ignored() -> None:
    leases = Leases(10)
    leases.grant(0, {"ann": ((0, 4),)})

    assert leases.claim("ann", [0, 5]) == [0]
    assert leases.claim("ann", [0]) == []


def test_a_claimed_lease_outlives_its_session() -> None:
    leases = Leases(10)
    leases.grant(0, {"ann": ((0, 4),)})
    leases.grant(1, {"ann": ((4, 8),)})
    leases.claim("ann", [0])

    assert leases.revoke("ann") == 4, "only what was not delivered goes back"
    leases.count("ann", [0])
    assert leases.places() == (6, 0, 4)


class Books(RuleBasedStateMachine):
    """Samples are in the pool, in one lease, or counted: whatever is done, and none twice."""

    def __init__(self) -> None:
        super().__init__()
        self.leases, self.round = Leases(40), 0
        self.claimed: list[tuple[str, list[int]]] = []
        self.counted: list[int] = []

    @rule(takers=st.lists(st.sampled_from("abcd "), max_size=20))
    def grant(self, takers: list[str]) -> None:
        """Lease the next samples, each to whom `takers` names; a space leaves it in the pool."""
        ids = self.leases.next(len(takers))
        by_taker = {who: [i for i, taker in zip(ids, takers, strict=False) if taker == who] for who in "abcd"}
        self.leases.grant(self.round, {who: ranges_of(mine) for who, mine in by_taker.items() if mine})
        self.round += 1

    @rule(who=st.sampled_from("abcd"), rounds=st.lists(st.integers(0, 20), max_size=4))
    def claim(self, who: str, rounds: list[int]) -> None:
        self.claimed.append((who, self.leases.claim(who, rounds)))

    @rule(count=st.booleans())
    def settle(self, count: bool) -> None:
        if self.claimed:
            who, rounds = self.claimed.pop(0)
            if count:
                self.counted += [i for r in rounds for i in sample_ids(self.leases.ids(who, r) or ())]
                self.leases.count(who, rounds)
            else:
                self.leases.refuse(who, rounds)

    @rule(who=st.sampled_from("abcd"))
    def revoke(self, who: str) -> None:
        self.leases.revoke(who)

    @invariant()
    def all_is_somewhere_once(self) -> None:
        free, held, counted = self.leases.places()
        assert free + held + counted == 40
        assert counted == len(self.counted) == len(set(self.counted))


TestBooks = Books.TestCase


@given(id_sets.filter(bool))
def test_leases_are_restored_after_a_restart(ids: set[int]) -> None:
    runs: SampleRanges = compact(ids)
    leases = Leases(201)
    leases.grant(3, {"ann": runs})

    assert leases.ids("ann", 3) == runs
    assert leases.places() == (201 - len(ids), len(ids), 0)
    with pytest.raises(ValueError, match="are not all among"):
        leases.grant(3, {"bob": runs})
