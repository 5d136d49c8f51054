"""What a round waits for is read first; all else in turn, within a rate while rounds go on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transport.hub.hub_threads import BESIDE_ROUNDS, BURST_S, LEAST, ROOM, ReaderThread, Reading


@contextmanager
def held(busy: bool) -> Iterator[tuple[ReaderThread, threading.Event, list[str]]]:
    """A reader at whose first job others pile up, until the event is set."""
    thread, gate, order = ReaderThread(lambda: busy), threading.Event(), list[str]()
    thread.submit(lambda: gate.wait(120))
    try:
        yield thread, gate, order
    finally:
        gate.set()
        thread.shutdown()


def until(order: list[str], many: int, look: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 10.0
    while len(order) < many:
        assert time.monotonic() < end, order
        look()
        time.sleep(0.001)


def reading(
    order: list[str], name: str, size: int = 1, *, urgent: bool = False, origin: str = "a"
) -> Reading:
    return Reading(lambda: order.append(name), size, urgent, origin, name[0])


def test_the_leases_of_a_round_go_before_what_others_asked_for_earlier() -> None:
    with held(busy=False) as (thread, gate, order):
        for n in range(5):
            thread.read(reading(order, f"x{n}"))
        thread.read(reading(order, "y0", origin="b"))
        thread.read(reading(order, "lease", urgent=True))
        gate.set()
        until(order, 7)
    assert order == ["lease", "x0", "y0", "x1", "x2", "x3", "x4"]


def test_what_a_session_has_asked_for_ends_with_it_and_an_error_concerns_nobody_else() -> None:
    with held(busy=False) as (thread, gate, order):
        thread.read(reading(order, "x0"))
        thread.read(reading(order, "y0"))
        thread.forget("a", "x")
        thread.read(Reading(lambda: 1 / 0, 1, True, "a", "z"))
        gate.set()
        until(order, 1)
    assert order == ["y0"]


def test_joiners_read_at_a_rate_beside_rounds_and_as_fast_as_they_can_without() -> None:
    size, many = BESIDE_ROUNDS // 16, 8  # half a second of it, of which BURST_S are at once
    took = {}
    for busy in (False, True):
        with held(busy) as (thread, gate, order):
            for n in range(many):
                thread.read(reading(order, f"x{n}", size))
            gate.set()
            began = time.monotonic()
            until(order, many, lambda: thread.replenish(0))
            took[busy] = time.monotonic() - began
    assert took[True] >= (many - 1) / 16 - BURST_S
    assert took[False] < took[True]


def test_no_more_is_read_than_newcomers_have_room_for_and_always_a_little() -> None:
    with held(busy=False) as (thread, gate, order):
        for n in range(64):
            thread.read(reading(order, f"x{n}", 1 << 20))
        gate.set()
        until(order, ROOM >> 20)
        thread.replenish(ROOM - (8 << 20))
        until(order, (ROOM >> 20) + 8)
        thread.replenish(1 << 40)  # they read nothing
        until(order, (ROOM + LEAST >> 20) + 8)
        thread.read(reading(order, "lease", 1 << 20, urgent=True))
        until(order, (ROOM + LEAST >> 20) + 9)

    assert order[-1] == "lease"
    assert order[:-1] == [f"x{n}" for n in range((ROOM + LEAST >> 20) + 8)]
