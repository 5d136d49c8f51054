"""The way to x': fewest bytes, nothing twice, nothing left out, no loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.ledger import HEADER_SIZE
from transport.peer import NEXT, CatchUp, CatchUpSource, CatchUpState
from transport.peer.catch_up import AHEAD, MOST, PLANS, RANGE, CatchUpEvent, Range, ways
from transport.protocol import messages

MB = 1 << 20


def welcome(round: int, log: int, *snapshots: tuple[int, int, int]) -> messages.Welcome:
    offers = [messages.SnapshotOffer(s, size, "00", before) for s, size, before in snapshots]
    return messages.Welcome(
        messages.PROTOCOL, "run", "ann", "s", "{}", "00", [], round, 1.0, False, 1, log, offers
    )


@pytest.mark.parametrize(
    ("base", "own", "log", "way", "start"),
    [
        (400 * MB, None, 100 * MB, CatchUpSource.SNAPSHOT, 80),  # 500 of the base, 410 + 20
        (0, None, 100 * MB, CatchUpSource.BASE, 0),  # the base is on the disk: 100
        (0, None, 900 * MB, CatchUpSource.SNAPSHOT, 80),  # but not if the log is long
        (0, 90, 100 * MB, CatchUpSource.OWN, 90),
        (400 * MB, 1, 100 * MB, CatchUpSource.OWN, 1),
        (0, 0, 100 * MB, CatchUpSource.OWN, 0),  # as many: no weights to read again
        (0, 101, 100 * MB, CatchUpSource.BASE, 0),  # of another ledger, whose rounds are not ours
    ],
)
def test_the_way_of_fewest_bytes_is_gone(
    base: int, own: int | None, log: int, way: CatchUpSource, start: int
) -> None:
    plan = CatchUp(welcome(100, log, (80, 410 * MB, log * 8 // 10)), base, own).plan

    assert (plan.way, plan.start) == (way, start)


@given(
    st.integers(0, 1000),
    st.integers(0, 10**9),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=2),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 1000),
)
def test_no_other_way_is_cheaper(
    round: int, log: int, snapshots: list[tuple[int, int, int]], base: int, own: int | None
) -> None:
    there = welcome(round, log, *snapshots)

    assert CatchUp(there, base, own).plan.bytes == min(plan.bytes for plan in ways(there, base, own))


def test_a_snapshot_that_does_not_fit_on_the_disk_is_left_where_the_base_does() -> None:
    there = welcome(100, 100, (80, 50, 80))

    assert CatchUp(there, 400).plan.way is CatchUpSource.SNAPSHOT
    assert CatchUp(there, 0, room=49).plan.way is CatchUpSource.BASE
    assert CatchUp(there, 400, room=10).plan.way is CatchUpSource.SNAPSHOT, (
        "neither fits: whoever fetches will say so"
    )


@given(
    st.integers(0, 300),
    st.integers(0, 10**9),
    st.lists(st.tuples(st.sampled_from(["ask", "apply", "commit"]), st.integers(1, 60)), max_size=60),
)
def test_every_packet_is_asked_for_once_in_order_and_not_too_far_ahead(
    round: int, log: int, history: list[tuple[str, int]]
) -> None:
    machine = CatchUp(welcome(round, log), 0)
    machine.weights_here()
    machine.longest = lambda _: max(1, log // max(1, round))
    asked, applied, newest = [0], 0, round - 1

    def ask() -> bool:
        range = machine.next_range()
        if range is not None:
            assert range.start == asked[-1]
            asked.append(range.stop)
            machine.range_came(range, max(1, log // max(1, round)) * (range.stop - range.start))
        return range is not None

    for what, count in [*history, ("commit", 1)]:
        if what == "commit":
            newest += count
            machine.heard(newest)
        for _ in range(count):
            if what == "ask":
                ask()
            elif what == "apply" and applied < asked[-1]:
                machine.apply(applied)
                applied += 1
        size = max(1, log // max(1, round))
        assert (asked[-1] - applied) * size < AHEAD + 2 * max(RANGE, size)
    while machine.state is not CatchUpState.READY:
        machine.heard(newest)
        ask()
        while applied < asked[-1]:
            machine.apply(applied)
            applied += 1

    assert applied == newest + 1 == machine.target


def test_a_packet_larger_than_all_that_may_lie_ahead_is_fetched_while_another_is_applied() -> None:
    machine = CatchUp(welcome(9, 9 * AHEAD), 0)
    machine.weights_here()
    before = machine.next_range()
    machine.longest = lambda _: AHEAD
    ranges = [machine.next_range() for _ in range(3)]

    assert before is None, "the model is not known, and so not whether a packet can be so long"
    assert [r and r.name for r in ranges] == ["packets/0-1", "packets/1-2", None]


def test_ranges_that_wait_are_counted_by_what_they_may_have_until_they_are_here() -> None:
    """A hub that says that its packets are short cannot have many long ones kept here."""
    machine = CatchUp(welcome(10**6, 10**6), 0)
    machine.weights_here()
    ranges = list(iter(machine.next_range, None))

    assert sum(range.most for range in ranges) <= AHEAD
    for range in ranges[:2]:
        machine.range_came(range, 100)
    assert machine.next_range() is not None, "the rest of their bounds is free again"
    machine.range_came(ranges[2], ranges[2].most)
    assert machine.next_range() is None


def test_a_range_that_is_too_long_is_asked_for_in_halves_down_to_one_packet_that_has_its_own_bound() -> None:
    machine = CatchUp(welcome(8, 8 * 1000), 0)
    machine.weights_here()
    asked = machine.next_range()
    assert asked is not None
    parts = [asked]
    while parts[0].stop - parts[0].start > 1:
        parts = [*machine.shorter(parts[0]), *parts[1:]]
    assert [part.name for part in parts] == ["packets/0-1", "packets/1-2", "packets/2-4", "packets/4-8"]
    assert machine.shorter(parts[0]) == [], "the model is not known: nothing longer can be asked for"
    machine.longest = lambda _: 10 * MOST

    (again,) = machine.shorter(parts[1])
    assert again == Range(1, 2, 10 * MOST + HEADER_SIZE)
    assert machine.shorter(again) == [], "no packet is longer: it is the hub's fault"


def test_on_a_disk_without_room_one_range_is_asked_for_at_a_time() -> None:
    machine = CatchUp(welcome(10**6, 10**9), 0)
    machine.weights_here()

    first = machine.next_range(room=MOST)
    assert first is not None
    assert machine.next_range(room=MOST) is None
    machine.range_came(first, 10)
    for round in range(first.stop):
        machine.apply(round)
    assert machine.next_range(room=MOST) is not None


def test_a_snapshot_that_is_gone_means_a_newer_one_then_the_base_and_no_loop() -> None:
    machine = CatchUp(welcome(10, 1000, (5, 1, 900)), 10**6)
    seen = [machine.plan]
    again = True
    while again:
        newer = 10 + len(seen)
        again = machine.gone(lambda n=newer: welcome(n, 1000, (5, 1, 900), (n, 1, 990)))  # type: ignore[misc]
        seen += [machine.plan] if again else []

    assert [(p.way, p.start) for p in seen] == [
        (CatchUpSource.SNAPSHOT, 5),
        (CatchUpSource.SNAPSHOT, 11),
        (CatchUpSource.SNAPSHOT, 12),
        (CatchUpSource.BASE, 0),
    ]
    assert len(seen) == PLANS + 1
    assert machine.state is CatchUpState.FAILED


def test_rounds_committed_after_the_last_packet_are_fetched_too() -> None:
    machine = CatchUp(welcome(0, 0), 0)
    machine.weights_here()
    machine.heard(-1)
    assert machine.state is CatchUpState.READY
    machine.heard(1)

    assert machine.state is CatchUpState.PACKETS
    assert [machine.next_range(), machine.next_range()] != [None, None]


def test_progress_knows_rate_and_time_left_and_says_so_when_the_run_is_faster() -> None:
    machine = CatchUp(welcome(100, 50 * MB), 50 * MB)
    machine.progress(0.0)
    machine.weights_came(10 * MB)
    half = machine.progress(10.0)
    machine.weights_came(20 * MB)
    machine.heard(199)  # 50 MB more meanwhile
    behind = machine.progress(20.0)

    assert (half.done, half.total, half.rate, half.eta) == (10 * MB, 100 * MB, 1.0 * MB, 90.0)
    assert (behind.total, behind.eta) == (150 * MB, None)


def test_each_state_can_be_left_but_failed() -> None:
    assert [state for state, row in NEXT.items() if not row] == [CatchUpState.FAILED]
    assert {kind for row in NEXT.values() for kind in row} == set(CatchUpEvent)


def test_a_hub_that_announces_rounds_without_bytes_is_not_asked_for_all_of_them_at_once() -> None:
    machine = CatchUp(welcome(2**62, 0), 0)
    machine.weights_here()
    ranges = [machine.next_range() for _ in range(2000)]

    assert ranges[-1] is None
