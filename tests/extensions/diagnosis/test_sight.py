"""A hub tells by the bytes of its connections what keeps a peer that a round has gone on without."""

from dataclasses import replace

import pytest
from simulated_rounds import SimulatedRounds
from test_slow_rounds import SWARM, WELL

from cocktail_cli.extensions.diagnosis.bodies import Culprit, Spent
from cocktail_cli.extensions.diagnosis.slow_rounds import Moving, PeerSample, Sight, SlowRounds
from transport.wire import Crossed

NOW = 100.0
QUIET = Crossed(
    received_at=NOW - 2.5,
    acknowledged_at=NOW - 0.6,
    partly=0,
    unacknowledged=0,
    caught_up_at=NOW,
    acknowledged=0,
    is_peers=True,
)
UPDATE = Moving(2.5, 16_000, 40_000)


def test_a_stopped_process_is_one_whose_machine_acknowledges_pings() -> None:
    early = replace(QUIET, acknowledged_at=NOW - 2.4)
    behind = replace(QUIET, caught_up_at=NOW - 2.4, unacknowledged=5_000)

    assert Sight.of([QUIET, early], 90.0, UPDATE, NOW) == Sight(2.5, NOW - 2.5, stopped=True)
    assert not Sight.of([early], 90.0, None, NOW).stopped, "no ping since its last word was acknowledged"
    assert not Sight.of([QUIET, behind], 90.0, None, NOW).stopped, "pings wait behind what it is sent"
    assert not Sight.of([QUIET, replace(early, received_at=NOW - 0.5)], 90.0, None, NOW).stopped
    assert not Sight.of([QUIET], NOW - 0.5, None, NOW).stopped, "a message has just come"


def test_nothing_is_said_of_a_process_behind_a_relay_or_on_a_wire_that_counts_nothing() -> None:
    assert Sight.of([replace(QUIET, is_peers=False)], 90.0, None, NOW) == Sight(2.5, NOW - 2.5)
    assert Sight.of([], 90.0, None, NOW) == Sight(10.0, 90.0)


def test_a_line_is_dark_where_nothing_is_acknowledged() -> None:
    dark = replace(QUIET, acknowledged_at=NOW - 2.5, unacknowledged=90, caught_up_at=NOW - 2.0)

    assert Sight.of([dark], 90.0, UPDATE, NOW) == Sight(2.5, NOW - 2.5, dark=True)


def test_an_update_of_which_more_comes_is_slow_and_one_that_rests_half_way_is_not() -> None:
    line = replace(QUIET, received_at=NOW - 0.4, partly=9_000, unacknowledged=90)

    assert Sight.of([QUIET, line], 90.0, UPDATE, NOW).up == Moving(2.5, 25_000, 40_000)
    assert Sight.of([QUIET, line], 90.0, UPDATE, NOW).down is None, "its acknowledgements wait behind it"
    assert Sight.of([replace(line, received_at=NOW - 2.0)], 90.0, UPDATE, NOW).up is None
    assert Sight.of([replace(line, partly=0)], 90.0, UPDATE, NOW).up is None, "its process has sent no more"


def test_what_a_peer_is_sent_is_slow_where_it_acknowledges_a_little_at_a_time() -> None:
    line = replace(QUIET, unacknowledged=30_000, caught_up_at=NOW - 2.2, acknowledged=8_000)

    ping = replace(line, unacknowledged=90)

    assert Sight.of([QUIET, line], NOW - 0.3, None, NOW).down == Moving(NOW - line.caught_up_at, 8_000)
    assert Sight.of([QUIET, ping], NOW - 0.3, None, NOW).down is None, "its acknowledgement may be on its way"


@pytest.mark.parametrize(
    ("sight", "cause", "evidence"),
    [
        (Sight(3.5, stopped=True), "stopped", "its process has said nothing for 3.5 s"),
        (
            Sight(0.2, up=Moving(4.0, 12_000, 90_000)),
            "upload",
            "12 of 90 kB of its update have come in 4.0 s",
        ),
        (
            Sight(0.2, down=Moving(4.0, 7_000)),
            "download",
            "7 kB of what it was sent are acknowledged in 4.0 s",
        ),
        (Sight(3.5, dark=True), "silent", "what it is sent is not acknowledged"),
        (Sight(0.2, up=Moving(2.5, 12_000, 90_000)), "upload", "in 2.5 s"),  # not twice a round, but seen
        (Sight(2.5), "", ""),
        (Sight(2.5, 2.0, stopped=True), "", ""),  # it has said something since the round was opened
        (Sight(0.2, up=Moving(0.6, 12_000, 90_000)), "", ""),
    ],
)
def test_the_first_round_that_goes_on_without_a_peer_says_why(
    sight: Sight, cause: str, evidence: str
) -> None:
    found = seen(sight)

    assert [(one.peer, one.cause) for one in found] == [("p2", cause)][: bool(cause)]
    assert all(evidence in one.evidence for one in found)


def test_what_was_named_from_outside_is_withdrawn_once_the_peer_says_what_kept_it() -> None:
    """A process that stands still for lack of memory looks from outside as one that was stopped."""
    slow, opened, _ = left_out(Sight(2.5, stopped=True))
    word = PeerSample("p2", opened + 6.0, spent=Spent(cycle=6000, memory=3000, faults=40))

    (news,) = slow.late("p2", word)

    assert news.cause == "memory"
    assert [one.cause for one in slow.culprits] == ["memory"]


def test_a_process_that_says_itself_that_it_was_stopped_is_named_once() -> None:
    slow, opened, _ = left_out(Sight(2.5, stopped=True))

    news = slow.late("p2", PeerSample("p2", opened + 6.0, spent=Spent(cycle=6000, stopped=5000)))

    assert news == []
    assert [one.cause for one in slow.culprits] == ["stopped"]


def seen(sight: Sight) -> list[Culprit]:
    """Return whom a hub names with the first round that goes on without p2."""
    return left_out(sight)[2]


def left_out(sight: Sight) -> tuple[SlowRounds, float, list[Culprit]]:
    """Have a round go on without p2, which is heard so long after its opening; return when that was, and the
    news."""
    sim, slow = SimulatedRounds(SWARM, noise=0.1), SlowRounds()
    for _ in range(WELL):
        slow.add(sim.round())
    sample = sim.round()
    gone = PeerSample("p2", sample.opened + 5.0, whole=False)
    since = replace(sight, heard=sample.opened + sight.heard)
    news = slow.add(replace(sample, peers={**sample.peers, "p2": gone}, sights={"p2": since}))
    return slow, sample.opened, news
