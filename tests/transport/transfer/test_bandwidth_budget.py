from dataclasses import replace
from math import ceil
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from transport.transfer import BandwidthBudget
from transport.transfer.bandwidth_budget import AIM, HIGH, LEAST_SHARE, LOW, MOST_SHARE, SHARE, SHORT, WINDOW

line = st.tuples(st.floats(0.2, 50), st.floats(1e4, 1e7), st.floats(1e4, 1e7))  # step, rates up and down


@given(line, st.integers(1, 4), st.floats(1.0, 100.0), st.integers(1, 8))
def test_how_many_steps_a_line_needs_depends_on_no_number_of_steps_and_falls_with_its_speed(
    measured: tuple[float, float, float], staleness: int, faster: float, steps: int
) -> None:
    step, up, down = measured

    def needs(up: float, down: float, steps: int = 1) -> float:
        budget = BandwidthBudget().opened(steps, staleness).computed(step, 0.1 * step)
        return budget.sent(10**6, 10**6 / up).received(10**6, 10**6 / down).needs(10**6)

    needed = needs(up, down)
    there, back = 0.1 * step + 10**6 / up, 10**6 / down
    taken = there + back
    assert abs(needed * AIM * step - taken) <= 1e-6 * taken
    assert needs(up, down, steps) == needed
    assert needs(faster * up, down) <= needed * (1 + 1e-9)
    assert needs(up, faster * down) <= needed * (1 + 1e-9)


def test_of_what_was_not_measured_nothing_is_known() -> None:
    new = BandwidthBudget()

    assert new.up == new.computed(1.0).up == new.sent(10**6, 1.0).up == 0
    assert new.computed(1.0).sent(10**6, 1.0).needs(10**6) == 0
    assert new.computed(1.0).sent(10**6, 1.0).received(10**6, 1.0).needs(0) == 0


@given(st.floats(0.1, 100), st.floats(1e4, 1e8))
def test_each_way_carries_its_share_of_the_compute_at_its_rate(seconds: float, rate: float) -> None:
    slot = BandwidthBudget().computed(seconds).sent(10**6, 10**6 / rate).received(10**6, 10**6 / (2 * rate))

    assert abs(slot.up - SHARE * seconds * rate) <= 2
    assert abs(slot.down - 2 * slot.up) <= 4


@given(st.floats(0.2, 50), st.floats(1e5, 1e7), st.floats(0.2, 5), st.floats(0, 0.5), st.floats(0.05, 0.95))
def test_what_goes_up_and_comes_down_fills_the_compute_whatever_else_a_round_does(
    seconds: float, rate: float, downs: float, other: float, start: float
) -> None:
    """`other`: of the compute, for encoding and the sum."""
    slot = replace(BandwidthBudget().computed(seconds).sent(10**6, 10**6 / rate), share=start)
    slot = slot.received(10**6, 10**6 / (downs * rate))
    used = []
    for _ in range(100):
        up, down = slot.up, slot.down
        took = seconds * other + up / rate + down / (downs * rate)
        slot = slot.sent(up, up / rate).received(down, down / (downs * rate)).ended(took)
        used.append(took / seconds)

    assert all(LOW <= part <= HIGH for part in used[-10:])


@given(st.integers(2, 4), st.floats(0.2, 50), st.floats(1e5, 1e7), st.floats(0.5, 5), st.floats(0, 0.5))
def test_with_rounds_in_flight_each_direction_gets_its_own_compute_and_commits_are_in_time(
    staleness: int, seconds: float, rate: float, downs: float, other: float
) -> None:
    """`other`: of the compute, for encoding and the sum, before the commit."""
    slot = BandwidthBudget().opened(1, staleness).computed(seconds).sent(10**6, 10**6 / rate)
    slot = slot.received(10**6, 10**6 / (downs * rate))
    for _ in range(100):
        up, down = slot.up / rate, slot.down / (downs * rate)
        committed = seconds * other + up
        slot = slot.sent(slot.up, up).received(slot.down, down).ended(committed + down, committed)

    assert committed <= HIGH * seconds
    assert committed + down <= HIGH * staleness * seconds
    assert (
        slot.share == MOST_SHARE
        or committed >= 0.8 * seconds
        or committed + down >= 0.8 * staleness * seconds
    )
    assert down <= seconds


def test_eight_peers_whose_transfers_vary_by_a_tenth_wait_less_than_a_twentieth_of_the_time() -> None:
    random, rate, took = Random(1), 1e6, []
    peers = [BandwidthBudget().computed(1.0).sent(10**6, 1.0).received(10**6, 1.0) for _ in range(8)]
    for _ in range(200):
        ups = [peer.up / rate * random.gauss(1.0, 0.1) for peer in peers]
        size = min(peer.down for peer in peers)
        downs = [size / rate * random.gauss(1.0, 0.1) for _ in peers]
        took.append(max(1.0, max(ups) + max(downs)))
        for i, (up, down) in enumerate(zip(ups, downs, strict=True)):
            peers[i] = peers[i].sent(peers[i].up, up).received(size, down).ended(up + down)

    assert sum(took[100:]) < 100 / 0.95


def test_who_waits_for_others_sends_no_less_for_it() -> None:
    slot = BandwidthBudget().computed(1.0).sent(10**6, 0.1).received(10**6, 0.1)

    assert slot.ended(120) == slot
    assert slot.ended(0.7).share == slot.share, "what fits is more than there is to send"
    assert slot.sent(slot.up, 0.35).ended(0.7).share > slot.share


@given(st.floats(1.05, 8), st.floats(0.2, 5), st.floats(0, 0.2), st.integers(5, 60))
def test_where_the_sparsest_packets_did_not_fit_longer_rounds_are_filled_within_twenty(
    need: float, seconds: float, other: float, rounds: int
) -> None:
    """A round takes `need` times its compute, then has twice as many local steps as it takes."""
    sparsest, rate = 10**6, 2e6 / (seconds * need * (1 - other))
    slot = BandwidthBudget().computed(seconds)
    for round in range(rounds + 20):
        slot = slot.opened(1 if round < rounds else 2 * ceil(need), 1)
        size = max(slot.up, sparsest)
        took = seconds * need * other + 2 * size / rate
        slot = slot.sent(size, size / rate).received(size, size / rate).ended(took)

    assert LOW <= took / slot.round_s <= HIGH
    assert size > sparsest


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3)), max_size=50))
def test_whatever_is_measured_a_direction_has_its_part_of_the_compute(
    rounds: list[tuple[float, float, float]],
) -> None:
    slot = BandwidthBudget().computed(1.0)
    for up, down, took in rounds:
        slot = slot.sent(10**6, up).received(10**6, down).ended(took)

    assert LEAST_SHARE <= slot.share <= MOST_SHARE


def test_one_odd_time_says_nothing() -> None:
    slot = BandwidthBudget()
    for _ in range(WINDOW - 1):
        slot = slot.computed(1.0).sent(10**6, 1.0)

    assert slot.computed(60.0).sent(10**6, 90.0).up == slot.up


def test_a_short_packet_is_no_word_on_a_thin_line_but_finds_one_that_has_become_wide() -> None:
    known = BandwidthBudget().computed(1.0)

    assert known.sent(SHORT - 1, 0.1).up == 0
    for _ in range(WINDOW):
        known = known.sent(10**6, 100.0)  # 10 kB a second
    wide = known
    for _ in range(WINDOW):
        wide = wide.sent(SHORT - 1, 0.1)

    assert known.sent(SHORT - 1, 10.0).up == known.up
    assert wide.up > 10 * known.up


def test_what_took_no_time_was_not_measured() -> None:
    assert BandwidthBudget().computed(1.0).sent(10**6, 0.0).up == 0
