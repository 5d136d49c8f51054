"""What newcomers say waits for its share of the hub's thread: bounded for each, and for all together."""

from collections.abc import Iterator

from transport.hub.newcomer_queue import BURST_S, FEW, HELD, SHARE, TALK, WAITING, NewcomerQueue, Waiting
from transport.protocol import messages


def said(payer: str, origin: str = "home", size: int = 100) -> Waiting:
    return Waiting(payer.encode(), messages.Pong(0.0), [], size, origin, payer)


def taken(queue: NewcomerQueue) -> Iterator[Waiting]:
    while queue.waiting_bytes:
        yield queue.take()


def test_who_has_more_waiting_than_a_line_holds_is_hung_up_on_and_nobody_else() -> None:
    queue = NewcomerQueue()
    for _ in range(WAITING):
        assert queue.put(said("loud"), 0.0) is None
        assert queue.put(said("calm"), 0.0) is None if queue.waiting_bytes < 2000 else True
    assert queue.put(said("loud"), 0.0) == "loud"
    left = {one.payer for one in taken(queue)}
    assert left == {"calm"}


def test_all_of_them_hold_a_bounded_number_of_bytes_and_a_crowd_gives_way_first() -> None:
    queue, dropped = NewcomerQueue(), set()
    queue.put(said("home", size=HELD // 3), 0.0)
    for n in range(20):
        gone = queue.put(said(f"k{n}", "crowd", size=HELD // 8), 0.0)
        dropped |= {gone} - {None}
    assert dropped
    assert "home" not in dropped
    assert sum(one.size for one in taken(queue)) <= HELD


def test_who_says_most_is_hung_up_on_where_all_of_them_say_too_much_in_a_second() -> None:
    queue, dropped = NewcomerQueue(), list[str]()
    for n in range(3 * TALK):
        queue.put(said("honest"), 0.0) if n < FEW else None
        gone = queue.put(said(f"k{n % 40}", "crowd"), 0.0001 * n)
        dropped += [gone] if gone else []
        for _ in taken(queue):
            pass
    assert dropped
    assert "honest" not in dropped


def test_their_messages_take_a_share_of_the_time_however_many_they_are() -> None:
    queue, now, worked = NewcomerQueue(), 0.0, 0.0
    while now < 60.0:
        queue.put(said("k", size=1), now)
        now = max(now, queue.open_at(now))
        queue.take()
        queue.took(0.003, now)
        now, worked = now + 0.003, worked + 0.003
    assert worked <= 60.0 * SHARE + BURST_S + 0.01
    assert worked >= 60.0 * SHARE * 0.9
