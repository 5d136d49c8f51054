import tracemalloc
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from transport.peer import Elsewhere, PeerState, SessionState
from transport.peer.peer_state import KEPT
from transport.protocol import ProtocolError, decode_to_peer, encode, messages

HELLO = messages.Hello(messages.PROTOCOL, "token", "run", "ann")


def welcome(session: str = "s1", round: int = 0, resumed: bool = False) -> messages.Welcome:
    return messages.Welcome(messages.PROTOCOL, "run", "ann", session, "{}", "00", [], round, 1.0, resumed)


def opened(round: int, samples: int = 4, exchange: bool = True) -> messages.Round:
    return messages.Round(round, round, 9, ["ann"], samples, exchange)


def joined() -> PeerState:
    state = PeerState(HELLO)
    assert state.connected(0.0) == [HELLO]
    assert state.receive(welcome(), 0.1) == []
    return state


def test_a_ping_is_answered_and_counts_as_a_sign_of_life() -> None:
    state = joined()

    assert state.receive(messages.Ping(7.0), 50.0) == [messages.Pong(7.0)]
    assert state.silent_until() == 56.0


def test_what_is_said_offline_is_said_when_the_hub_is_back() -> None:
    state = joined()
    state.disconnected()

    assert state.ready(messages.Ready(0, 5)) == []
    assert state.connected(1.0) == [messages.Resume(messages.PROTOCOL, "run", "ann", "s1", -1, True, [])]
    assert state.receive(welcome(resumed=True), 1.1) == [messages.Ready(0, 5)]


def test_a_report_is_said_again_until_its_round_is_committed() -> None:
    state = joined()
    state.receive(opened(3), 1.0)
    assert state.take_round() == opened(3)
    report = messages.Report(3, 5, [2])
    assert state.report(report) == [report]
    state.disconnected()
    (resume,) = state.connected(2.0)

    assert resume == messages.Resume(messages.PROTOCOL, "run", "ann", "s1", 3, False, [3])
    assert state.receive(welcome(resumed=True), 2.1) == [report]
    assert state.receive(messages.Committed(3, 10, "00", ["ann"]), 2.2) == []
    state.disconnected()
    assert state.connected(3.0) == [messages.Resume(messages.PROTOCOL, "run", "ann", "s1", -1, False, [3])]
    assert state.receive(welcome(resumed=True), 3.1) == []


def test_a_report_whose_packet_came_too_late_is_said_once_more() -> None:
    state = joined()
    state.receive(opened(2), 1.0)
    state.take_round()
    report = messages.Report(2, 5, [1])
    state.report(report)

    assert state.receive(messages.Committed(2, 10, "00", ["bob"]), 1.0) == [report]
    assert state.receive(messages.Committed(2, 10, "00", ["bob"]), 1.1) == []


def test_a_delivered_lease_is_not_held_any_more_and_a_refused_one_is() -> None:
    state = joined()
    for r in (1, 2):
        state.receive(opened(r), 1.0)
        state.take_round()
    state.report(messages.Report(2, 5, [1]))
    state.receive(messages.Committed(2, 10, "00", ["bob"]), 1.0)
    state.disconnected()
    (late,) = state.connected(2.0)
    state.receive(welcome(resumed=True), 2.0)
    state.report(messages.Report(3, 5, [1, 2]))
    state.receive(messages.Committed(3, 10, "00", ["ann"]), 2.1)
    state.disconnected()
    (done,) = state.connected(3.0)

    assert isinstance(late, messages.Resume)
    assert late.holds == [1, 2]
    assert isinstance(done, messages.Resume)
    assert done.holds == []


def test_a_round_announced_again_asks_for_the_update_again_and_is_not_taken_twice() -> None:
    state = joined()
    state.receive(opened(3), 1.0)
    state.take_round()
    report = messages.Report(3, 5, [])
    state.report(report)

    assert state.receive(opened(3), 2.0) == [report]
    assert state.offer_again
    assert state.take_round() is None


def test_a_round_that_went_on_without_this_peer_is_still_taken() -> None:
    state = joined()
    state.receive(opened(3), 1.0)
    state.receive(messages.Committed(3, 10, "00", ["bob"]), 2.0)

    assert state.take_round() == opened(3), "its lease is this peer's to deliver"


def test_an_unknown_session_is_begun_anew_with_one_hello() -> None:
    state = joined()
    state.receive(opened(3), 1.0)
    state.take_round()
    state.report(messages.Report(3, 5, [2]))
    gone = messages.Refused("session", "the hub does not know this session any more")

    assert state.receive(gone, 2.0) == [HELLO]
    assert state.receive(gone, 2.0) == [], "the answer to what else was said in the old session"
    assert state.receive(welcome("s2", 7), 2.1) == []
    assert (state.sessions, state.newest) == (2, 6)
    assert state.take_round() is None


def test_a_refusal_is_final() -> None:
    state = PeerState(HELLO)
    state.connected(0.0)
    state.receive(messages.Refused("full", "the run has its 4 peers"), 0.1)
    state.disconnected()

    assert state.link is SessionState.REFUSED
    assert state.refused is not None
    assert state.refused.code == "full"


def test_the_end_is_remembered_and_a_goodbye_is_heard_after_it() -> None:
    state = joined()
    state.receive(messages.Over("every sample was counted", True), 1.0)
    assert state.link is SessionState.OVER
    assert not state.parted
    assert state.leave(messages.Leave("done")) == [messages.Leave("done")]
    state.receive(messages.Over("left: done", True), 1.1)

    assert state.parted
    assert state.over == messages.Over("every sample was counted", True)


def test_evaluations_are_said_again_until_a_later_round_opens() -> None:
    state = joined()
    part = messages.Evaluated(3, 0, 1.0, 10)
    state.evaluated(part)
    state.disconnected()
    state.connected(1.0)
    assert state.receive(welcome(resumed=True), 1.0) == [part]
    state.receive(opened(4), 2.0)
    state.disconnected()
    state.connected(3.0)

    assert state.receive(welcome(resumed=True), 3.0) == []


def test_what_means_nothing_in_a_state_is_ignored_and_counted() -> None:
    state = PeerState(HELLO)
    state.connected(0.0)
    state.receive(opened(1), 0.1)
    state.receive(messages.Committed(1, 1, "", []), 0.1)

    assert (state.ignored, state.take_round(), [*state.commits]) == (2, None, [])


def test_commits_in_any_order_are_remembered_up_to_a_number() -> None:
    state = joined()
    for round in range(10_000, 9_000, -1):
        state.receive(messages.Committed(round, 1, "00", []), 0.2)

    assert len(state.commits) == 64


def test_what_was_exchanged_for_a_round_is_void_where_an_extension_says_so() -> None:
    state = joined()
    state.voids = lambda old, new: old.extra != new.extra
    one, another = ({"an extension": body} for body in (b"bob", b"cat"))
    state.receive(replace(opened(3), extra=one), 1.0)
    state.take_round()
    state.report(messages.Report(3, 5, []))

    assert state.receive(replace(opened(3), extra=one), 2.0) == [messages.Report(3, 5, [])]
    assert state.offer_again
    assert not state.settled(3)
    assert state.receive(replace(opened(3), extra=another), 3.0) == []
    assert state.settled(3)
    again = state.take_anew()
    assert again is not None
    assert again.extra == another
    assert not state.settled(3), "it is known now"


def test_a_silent_hub_is_doubted_sooner_where_the_run_may_be_elsewhere() -> None:
    state = joined()
    alone = state.silent_until() - state.heard
    state.elsewhere = Elsewhere("there:2", "k" * 43, lambda: None)
    doubted = state.silent_until() - state.heard

    assert (alone, doubted) == pytest.approx((6.0, 4.0))


def full(make: Callable[[int, int], messages.Message]) -> bytes:
    """A frame with as many names as its receiver reads, but for less than half."""
    sizes = (1 << shift for shift in range(13, -1, -1))
    return next(encode(message) for message in (make(1, size) for size in sizes) if readable(message))


def readable(message: messages.Message) -> bool:
    data = encode(message)
    try:
        decode_to_peer(data)
    except ProtocolError:
        return False
    return len(data) <= messages.MAX_CONTROL


def names(count: int) -> list[str]:
    return [f"{number:x}" for number in range(count)]


FULL: dict[str, Callable[[int, int], messages.Message]] = {
    "members": lambda n, size: messages.Round(n, n, 9, names(size), 1, True),
    "body": lambda n, size: messages.Round(n, n, 9, [], 1, True, extra={"an extension": b"x" * size}),
    "accepted": lambda n, size: messages.Committed(n, 0, "", names(size)),
    "refused": lambda n, size: messages.Committed(n, 0, "", [], dict.fromkeys(names(size), "")),
    "digest": lambda n, size: messages.Committed(n, 0, "x" * size, []),
    "bodies": lambda n, size: messages.Extension(f"{n:x}", b"x" * size),
    "over": lambda n, size: messages.Over("x" * size, False),
}


def test_all_that_a_hub_can_have_a_peer_remember_of_full_messages_has_a_bound() -> None:
    """A hub sends far more of each kind than a run has."""
    state = PeerState(HELLO)
    state.connected(0.0)
    state.receive(welcome(), 0.1)
    tracemalloc.start()
    for make in FULL.values():
        data = full(make)
        for number in range(12):
            message = decode_to_peer(data)  # anew: nothing is shared
            if hasattr(message, "round"):
                message = replace(message, round=number)  # type: ignore[arg-type]
            state.receive(message, 1.0)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert state.ignored == 0, "every one of them was heard"
    assert kept < 24 << 20


def test_a_hub_that_stands_still_for_many_rounds_is_remembered_with_the_newest_ones() -> None:
    state = joined()
    for number in range(3 * KEPT):
        state.receive(opened(number), 1.0)
        state.receive(messages.Committed(number, 10, "00", ["bob"]), 1.0)

    assert sorted(state.commits) == list(range(2 * KEPT, 3 * KEPT))
    assert list(state.rounds) == list(range(2 * KEPT, 3 * KEPT))
