"""The order of a stage's work: nothing twice or early, no more held than allowed, no bubble but the ramp."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.compute import StageSchedule, Work

SECONDS = {Work.FORWARD: 1.0, Work.LOSS: 0.0, Work.BACK: 2.0}  # the head is part of no stage's time here


def simulate(
    stages: int, count: int, in_flight: int, latency: float = 0.0
) -> tuple[float, list[list[tuple]]]:
    """Run a ring of stages that compute and lines that delay: seconds until all gradients are done, and the
    order of each stage's work."""
    schedules = [StageSchedule(count, in_flight, number == 0) for number in range(stages)]
    done: list[list[tuple]] = [[] for _ in schedules]
    free = [0.0] * stages
    # when, stage, work that arrives, micro-batch
    events = [(0.0, number, -1, -1) for number in range(stages)]
    now = 0.0
    while events:
        now, number, work, micro_batch = heapq.heappop(events)
        if work >= 0:
            schedules[number].arrived(Work(work), micro_batch)
        if free[number] > now:
            heapq.heappush(events, (free[number], number, -1, -1))
            continue
        taken = schedules[number].take()
        if taken is None:
            continue
        kind, batch = taken
        done[number].append(taken)
        assert schedules[number].held <= in_flight
        free[number] = ends = now + SECONDS[kind]
        heapq.heappush(events, (ends, number, -1, -1))
        if kind is Work.FORWARD:
            following = (number + 1) % stages
            heapq.heappush(
                events, (ends + latency, following, Work.FORWARD if following else Work.LOSS, batch)
            )
        elif kind is Work.LOSS or number > 0:
            heapq.heappush(events, (ends + latency, (number - 1) % stages, Work.BACK, batch))
    assert all(schedule.finished for schedule in schedules)
    return now, done


@given(st.integers(2, 5), st.integers(1, 9), st.integers(1, 12), st.sampled_from([0.0, 0.3, 7.0]))
def test_every_micro_batch_passes_every_stage_once_in_order(
    stages: int, count: int, in_flight: int, latency: float
) -> None:
    """Whatever the lines delay, each kind of work is done once for each micro-batch, in their order."""
    _, done = simulate(stages, count, in_flight, latency)
    for number, works in enumerate(done):
        for kind in Work:
            batches = [batch for work, batch in works if work is kind]
            assert batches == (list(range(count)) if number == 0 or kind is not Work.LOSS else [])


@given(st.integers(2, 5), st.integers(1, 20))
def test_no_time_is_lost_beside_the_ramp(stages: int, count: int) -> None:
    """Without latency and with thrice as many micro-batches in flight as stages a step takes what 1F1B does,
    (count + stages - 1) times a micro-batch in one stage, and at most one of these more."""
    seconds, _ = simulate(stages, count, 3 * stages)
    assert seconds <= 3.0 * (count + stages)


@pytest.mark.parametrize("latency", [1.0, 3.0])
def test_more_micro_batches_in_flight_hide_latency(latency: float) -> None:
    """Where enough are in flight a latency is paid once up and down the ring, not for each micro-batch."""
    stages, count = 4, 64
    seconds, _ = simulate(stages, count, 64, latency)
    assert seconds <= 3.0 * (count + stages - 1) + 2 * stages * latency + 3 * stages
    assert simulate(stages, count, stages, latency)[0] > 1.2 * seconds


def test_what_arrives_twice_is_done_once() -> None:
    """`arrived` says whether it is new; a number beyond the step is refused."""
    schedule = StageSchedule(2, 2, first=False)
    assert schedule.arrived(Work.FORWARD, 0)
    assert not schedule.arrived(Work.FORWARD, 0)
    assert schedule.take() == (Work.FORWARD, 0)
    assert not schedule.arrived(Work.FORWARD, 0)
    assert schedule.take() is None
    with pytest.raises(ValueError, match="micro-batch 2 of 2"):
        schedule.arrived(Work.BACK, 2)
