"""The congestion window on a simulated line with a deep queue."""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.transfer import FIRST_FRAGMENT, MIN_FRAGMENT
from transport.transfer.congestion_window import (
    CLEAN_S,
    HELD_S,
    MAX_FRAGMENT,
    QUEUE_S,
    THIN_FRAGMENT,
    THIN_S,
    CongestionWindow,
    Sent,
)

MBIT = 1e6 / 8  # bytes a second


@dataclass
class Seen:
    """Observations over a stretch of time on the line."""

    rate: float  # bytes a second
    queue: float  # seconds the last byte of a fragment waited for the line at most
    under: int  # fragments under way at most


class Line:
    """A bottleneck of `rate` with an endless queue, then a round trip. There is always more to do."""

    def __init__(self, rate: float, rtt: float, credit: int = 32) -> None:
        self.rate, self.rtt, self.now, self.busy = rate, rtt, 0.0, 0.0
        self.stalls: Iterator[tuple[float, float]] = iter(())  # when the other side does nothing: from, until
        self.stall = (0.0, 0.0)
        self.fragment = 0  # 0: what the window says; an upload keeps what it began with
        self.window = CongestionWindow()
        self.window.most = credit * MAX_FRAGMENT
        self.window.clean(rtt, 0.0)
        self.on_it: list[tuple[float, int, Sent]] = []
        self.numbers = itertools.count()

    def run(self, seconds: float) -> Seen:
        end, done, queue, most = self.now + seconds, 0, 0.0, 0
        while self.now < end:
            while self.window.room:
                # its end finds no room over there
                trips = 2 if self.fragment and not self.window.under else 1
                sent = self.window.sent(1, self.fragment or self.window.fragment, 0, self.now)
                queue = max(queue, self.busy - self.now)
                self.busy = max(self.busy, self.now) + sent.size / self.rate
                came = self.answers(self.busy + trips * self.rtt)
                heapq.heappush(self.on_it, (came, next(self.numbers), sent))
            most = max(most, len(self.on_it))
            self.now, _, sent = heapq.heappop(self.on_it)
            self.window.answered(sent, sent.size, self.now, more=True)
            done += sent.size
        return Seen(done / seconds, queue, most)

    def answers(self, there: float) -> float:
        """When the other side answers what comes at this time: at once, or all together after a stall."""
        while self.stall[1] <= there:
            self.stall = next(self.stalls, (math.inf, math.inf))
        begins, ends = self.stall
        return ends if begins <= there else there


@pytest.mark.parametrize("rtt", [0.002, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("mbit", [1, 5, 20, 100, 500])
def test_it_fills_the_line_and_not_the_queue(mbit: float, rtt: float) -> None:
    line = Line(mbit * MBIT, rtt)
    line.run(30.0 if mbit == 1 else 10.0)  # it finds out
    seen = line.run(40.0)

    held = 32 * MAX_FRAGMENT / rtt  # more than the credit is never under way
    assert seen.rate > 0.92 * min(mbit * MBIT, held)
    assert seen.queue < max(0.16, 0.5 * rtt + 0.1) or mbit == 1, "two of the smallest fragments take longer"
    assert seen.under <= 64


def test_it_begins_small_and_grows_to_a_fast_line_within_a_second() -> None:
    line = Line(500 * MBIT, 0.05)

    assert line.window.limit == 2 * FIRST_FRAGMENT
    line.run(1.0)
    assert line.run(1.0).rate > 0.95 * 500 * MBIT
    assert line.window.fragment == MAX_FRAGMENT


@pytest.mark.parametrize("seed", range(4))
def test_answers_that_come_in_bursts_are_not_taken_for_a_faster_line(seed: int) -> None:
    """A busy computer on the other side answers nothing for a while, and then everything at once."""
    random = Random(seed)
    line, begins = Line(20 * MBIT, 0.05), itertools.accumulate(random.expovariate(2) for _ in range(1000))
    line.stalls = ((at, at + random.uniform(0.02, 0.3)) for at in begins)
    line.run(10.0)
    seen = line.run(60.0)

    assert line.window.rate < 1.25 * 20 * MBIT
    assert seen.queue < 0.16, "what heartbeats wait for"


def test_a_line_that_becomes_slower_has_its_queue_back_within_seconds() -> None:
    line = Line(100 * MBIT, 0.04)
    line.run(20.0)
    line.rate = 20 * MBIT
    line.run(6.0)
    seen = line.run(20.0)

    assert seen.queue < 0.2
    assert seen.rate > 0.92 * 20 * MBIT


def test_a_line_that_was_slow_is_filled_again_though_fragments_stay_as_large_as_they_were() -> None:
    line = Line(50 * MBIT, 0.042)
    line.fragment = FIRST_FRAGMENT
    line.run(2.0)
    line.rate = 2 * MBIT
    line.run(5.0)
    line.rate = 50 * MBIT
    line.run(3.0)

    assert line.run(1.0).rate > 0.9 * 50 * MBIT


def test_one_fragment_that_is_held_up_does_not_hold_the_others_up() -> None:
    window, now = CongestionWindow(), 0.0
    window.most = 1 << 20
    window.clean(0.1, 0.0)
    window.sent(1, FIRST_FRAGMENT, 0, 0.0)
    while now < CLEAN_S:
        assert window.room
        sent = window.sent(2, FIRST_FRAGMENT, 0, now)
        now += 0.1
        window.answered(sent, FIRST_FRAGMENT, now, more=True)
    assert not window.room, "it waits for a clean round trip"
    window.look(now + HELD_S - 0.1)
    assert not window.room
    window.look(now + HELD_S)

    assert window.room
    sent = window.sent(2, FIRST_FRAGMENT, 0, now + HELD_S)
    window.answered(sent, FIRST_FRAGMENT, now + HELD_S + 0.1, more=True)
    assert window.room, "and does not at once wait for it again"


@pytest.mark.parametrize("rtt", [0.005, 0.3])
def test_a_round_trip_that_changes_is_found_out(rtt: float) -> None:
    line = Line(50 * MBIT, 0.03)
    line.run(15.0)
    line.rtt = rtt
    line.run(20.0)
    seen = line.run(20.0)

    assert seen.rate > 0.9 * 50 * MBIT
    assert seen.queue < 0.5 * rtt + 0.13


def test_small_transfers_do_not_teach_that_the_line_is_slow() -> None:
    line = Line(500 * MBIT, 0.05)
    line.run(5.0)
    for _ in range(100):
        line.now += 1.0
        sent = line.window.sent(1, 1000, 0, line.now)
        line.window.answered(sent, 1000, line.now + 0.05, more=False)

    assert line.window.rate > 0.9 * 500 * MBIT


def test_packets_of_one_fragment_teach_that_a_line_has_become_slower() -> None:
    line = Line(50 * MBIT, 0.02)
    line.run(5.0)
    slow = 0.2 * MBIT
    for _ in range(3):
        line.now += 2.5
        sent = line.window.sent(1, 32 * 1024, 0, line.now)
        line.now += 32 * 1024 / slow
        line.window.answered(sent, 32 * 1024, line.now, more=False)

    assert line.window.rate < 1.3 * slow
    assert line.window.fragment == THIN_FRAGMENT


@given(st.floats(THIN_FRAGMENT / THIN_S, 1e9))
def test_no_message_waits_for_longer_than_a_quarter_second_behind_a_fragment(rate: float) -> None:
    window = CongestionWindow()
    window.most = 1 << 30
    window.answered(window.sent(1, 1 << 20, 0, 0.0), 1 << 20, (1 << 20) / rate, more=True)

    assert window.fragment <= THIN_S * window.rate * (1 + 1e-9)
    assert window.fragment >= MIN_FRAGMENT or window.rate * THIN_S < MIN_FRAGMENT


def test_what_is_lost_makes_room_and_ends_the_wait_for_a_clean_answer() -> None:
    window = CongestionWindow()
    window.most = 1 << 20
    window.clean(0.1, 0.0)
    sent = [window.sent(1, FIRST_FRAGMENT, 0, 0.0) for _ in range(2)]
    assert not window.room
    window.answered(sent[0], FIRST_FRAGMENT, 100.0, more=True)
    assert window.limit < THIN_FRAGMENT, "all is let come in"
    window.lost(sent[1])

    assert window.room
    assert window.limit == 2 * THIN_FRAGMENT
    assert window.under == 0
    assert QUEUE_S < 0.1
