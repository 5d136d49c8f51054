"""Rounds with members that are slow, stall or come back: the hub's state machine on a simulated clock."""

import json
from dataclasses import replace
from random import Random

import pytest
from sim_swarm import SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport.ledger import RoundRow
from transport.membership import State
from transport.protocol import events
from transport.scheduling import Phase
from transport.scheduling.rounds import LAST_BACK_S
from transport.scheduling.straggler_deadline import FIRST, SHARE, StragglerDeadline

TOOK = (1.0, 1.0, 7200.0, 1.0, -3600.0, 0.0)  # seconds by the wall clock, set forth and back


def swarm_of(peers: int, staleness: int = 0, **changes: object) -> SimSwarm:
    settings = {"samples": 4000, "global_batch": 8, "step_timeout": 60.0, "peer_timeout": 300.0} | changes
    swarm = SimSwarm(staleness, toy_settings(**({"first_peers": peers, "first_s": 1e6} | settings)))
    for _ in range(peers):
        swarm.join()
    while swarm.hub.rounds.phase is not Phase.OPEN:
        for peer in swarm.peers:
            talk(swarm, peer)
        swarm.job()
    return swarm


def talk(swarm: SimSwarm, peer: SimPeer) -> None:
    """This peer hears and says what it can, and its training thread does one thing."""
    swarm.chat(peer)
    peer.work()
    swarm.chat(peer)


def play_round(swarm: SimSwarm, seconds: dict[SimPeer, float], wait: float = 100.0) -> float:
    """One round, in which each peer's update comes so long after the opening. Returns how long it took."""
    while swarm.jobs:
        swarm.job()
    assert swarm.hub.rounds.phase is Phase.OPEN
    started = swarm.now
    todo = sorted(seconds.items(), key=lambda item: item[1])
    while swarm.hub.rounds.phase is Phase.OPEN and swarm.now < started + wait:
        while todo and swarm.now >= started + todo[0][1] - 1e-9:
            peer, _ = todo.pop(0)
            talk(swarm, peer)  # hears of the round, reports
            peer.work()  # uploads
        if swarm.hub.rounds.phase is Phase.OPEN:
            swarm.pass_time(0.25)
    took = swarm.now - started
    while swarm.jobs:
        swarm.job()
    for peer in seconds:
        swarm.chat(peer)
        if peer.round is not None and peer.round.round < swarm.hub.rounds.round:
            peer.state.rounds, kept = type(peer.state.rounds)(), peer.state.rounds
            peer.work()  # learns what became of its update; the next round is for its own time
            peer.state.rounds = kept
    return took


def warnings(swarm: SimSwarm) -> list[str]:
    return [e.message for e in swarm.events if isinstance(e, events.Warned)]


def test_a_peer_that_stalls_costs_a_round_three_medians_and_not_the_cap() -> None:
    swarm = swarm_of(3)
    a, b, c = swarm.peers
    usual = [play_round(swarm, {a: 2.0, b: 2.0, c: 2.0}) for _ in range(4)]
    stalled = play_round(swarm, {a: 2.0, b: 2.0})
    after = play_round(swarm, {a: 2.0, b: 2.0})

    assert usual == [2.0] * 4
    assert stalled == pytest.approx(6.0)
    assert after == 2.0, "it is not a member before it is heard of again"
    assert warnings(swarm) == ["round 4 goes on without p2 (silent for 6 s), 6 s after it was opened"]


def test_before_arrivals_are_known_a_round_waits_for_half_a_minute() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    play_round(swarm, {a: 1.0, b: 1.0})

    assert play_round(swarm, {a: 1.0}) == pytest.approx(FIRST / 2)


def test_a_newcomer_is_waited_for_as_long_as_the_others_take_until_it_has_delivered() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 2.0, b: 2.0})
    c = swarm.join()
    talk(swarm, c)
    play_round(swarm, {a: 2.0, b: 2.0})

    assert play_round(swarm, {a: 2.0, b: 2.0, c: 30.0}) == pytest.approx(6.0)
    assert play_round(swarm, {a: 2.0, b: 2.0, c: 3.0}) == 2.0, "it is not a member again at once"
    took = []
    for _ in range(100):
        took.append(play_round(swarm, {a: 2.0, b: 2.0, c: 5.0}))
        if took[-1] < 5.0:  # it is late: what it has missed is over
            for _ in range(2):
                talk(swarm, c)

    rounds = [e for e in swarm.events if isinstance(e, events.RoundCommitted)]
    first = next(n for n, one in enumerate(rounds) if "p2" in one.accepted)
    assert max(took) <= 6.0
    assert sum(t - 2.0 for t in took[: first - 6]) <= 2.0 * (first - 6) * 2 * SHARE, (
        "a part of the time, until then"
    )
    assert sum("p2" in one.accepted for one in rounds[-20:]) >= 18, "then it is a member like the others"


def test_idle_newcomers_take_a_twentieth_of_the_time_and_hold_no_sample_at_the_end() -> None:
    """They say that they are ready, answer pings, and never deliver; each has a new key."""
    swarm = swarm_of(2, samples=1600, peer_timeout=30.0)
    a, b = swarm.peers
    for _ in range(10):
        play_round(swarm, {a: 1.0, b: 1.0})
    began, done = swarm.now, swarm.hub.rounds.round
    idle: list[SimPeer] = []
    while swarm.hub.rounds.phase is not Phase.ENDED and swarm.now < began + 1000.0:
        if len(idle) < 40:
            idle.append(swarm.join(f"idle-{len(idle)}"))
        for one in idle:
            swarm.chat(one)
            if one.state.welcome is not None and one.session != one.state.sessions:
                one.session = one.state.sessions
                one.ready()
            if one.state.rounds and max(one.state.rounds) < swarm.hub.rounds.round:
                one.state.rounds.clear()
                one.ready()  # as if it were back
        play_round(
            swarm, {a: 1.0, b: 1.0}, wait=30.0
        ) if swarm.hub.rounds.leases.counted < 1600 else swarm.step()

    rounds = swarm.hub.rounds.round - done
    opened = [event for event in swarm.events if isinstance(event, events.RoundOpened)]
    members = {name for event in opened for name in event.members}
    assert sum(name.startswith("idle-") for name in members) >= 30, "they were admitted, and asked"
    assert swarm.hub.rounds.leases.done, "no sample stays with them"
    assert (swarm.now - began) / rounds < 1.0 / (1 - SHARE) + 0.3, "ticks of .25 s among it"


def test_a_peer_ten_times_slower_but_steady_is_never_cut_off() -> None:
    swarm = swarm_of(3)
    a, b, slow = swarm.peers
    random = Random(1)
    for _ in range(20):
        play_round(
            swarm, {a: random.uniform(0.7, 1.3), b: random.uniform(0.7, 1.3), slow: random.uniform(7, 13)}
        )

    rounds = [e for e in swarm.events if isinstance(e, events.RoundCommitted)]
    assert [r.accepted for r in rounds] == [("p0", "p1", "p2")] * 20
    assert warnings(swarm) == []


def test_a_round_that_is_slow_for_all_drops_no_member() -> None:
    swarm = swarm_of(3)
    a, b, c = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 2.0, b: 2.0, c: 2.0})

    assert play_round(swarm, {a: 9.0, b: 10.0, c: 25.0}) == 25.0
    assert warnings(swarm) == []


def test_a_stalled_peer_comes_back_with_its_late_report_and_loses_no_work() -> None:
    swarm = swarm_of(2, samples=80, step_timeout=30.0)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 1.0, b: 1.0})
    play_round(swarm, {a: 1.0})
    play_round(swarm, {a: 1.0})
    assert [s.state for s in swarm.hub.members if s.name == "p1"] == [State.BEHIND]
    ended = swarm.settle()

    last = [e for e in swarm.events if isinstance(e, events.RoundCommitted)][-1]
    assert ended.finished
    assert last.accepted == ("p0", "p1")
    assert sorted(swarm.trained) == list(range(80))


def test_a_peer_whose_report_came_in_time_and_its_packet_did_not_is_a_member_again() -> None:
    swarm = swarm_of(2, samples=400)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 1.0, b: 1.0})
    swarm.job()
    talk(swarm, b)  # its report; the packet is on a slow line
    assert play_round(swarm, {a: 1.0}) == pytest.approx(3.0)
    swarm.chat(b)

    assert [s.state for s in swarm.hub.members] == [State.TRAINING, State.READY]


def test_a_late_report_that_was_lost_with_its_connection_is_made_good_by_the_next_one() -> None:
    swarm = swarm_of(2, samples=400)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 1.0, b: 1.0})
    play_round(swarm, {a: 1.0})
    swarm.chat(b)  # hears that the round was opened and committed
    b.work()  # its late report is on the cable
    swarm.cut(b)
    b.dial()
    swarm.chat(b)

    assert [s.state for s in swarm.hub.members] == [State.TRAINING, State.READY]


def test_the_time_that_a_hub_was_suspended_is_in_no_arrival() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 1.0, b: 1.0})
    swarm.pass_time(3600.0)
    play_round(swarm, {a: 1.0, b: 1.0})

    assert warnings(swarm) == []
    assert play_round(swarm, {a: 1.0}) < 10.0


def test_after_a_restart_of_the_hub_a_silent_peer_costs_what_its_last_rounds_took() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 2.0, b: 2.0})
    swarm.books.rounds = [replace(row, opened=1e9, committed=1e9 + 2.0) for row in swarm.books.rounds]
    swarm.restart_hub()
    for peer in (a, b):
        peer.dial()
        talk(swarm, peer)

    assert play_round(swarm, {a: 2.0}) == pytest.approx(6.0), "three medians, not the cap"


def test_a_restarted_hub_waits_for_peers_that_trained_and_no_others() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    play_round(swarm, {a: 1.0, b: 1.0})
    swarm.chat(swarm.join("c"))  # welcomed, and still fetching
    while swarm.jobs:
        swarm.job()
    swarm.restart_hub()
    phases = []
    for peer in (a, b):
        peer.dial()
        talk(swarm, peer)
        swarm.job()
        phases.append(swarm.hub.rounds.phase is Phase.OPEN)

    assert phases == [False, True]
    assert {s.name for s in swarm.hub.members} == {"p0", "p1"}, "c had no work: it begins anew"


def test_a_peer_that_died_with_the_hub_does_not_hold_up_those_that_are_back() -> None:
    swarm = swarm_of(3, recover_s=10.0)
    a, b, c = swarm.peers
    play_round(swarm, {a: 1.0, b: 1.0, c: 1.0})
    swarm.restart_hub()
    c.dead = True
    for peer in (a, b):
        peer.dial()
        talk(swarm, peer)
    started = swarm.now
    while swarm.hub.rounds.phase is not Phase.OPEN and swarm.now < started + 10.0:
        swarm.pass_time(0.25)
        while swarm.jobs:
            swarm.job()

    assert swarm.now - started == pytest.approx(LAST_BACK_S, abs=0.5)
    assert "p2" in {s.name for s in swarm.hub.members}, "it may still come back"


def test_a_clock_that_was_set_changes_no_arrival_time() -> None:
    made = StragglerDeadline(60.0)
    rows = [RoundRow(r, r, 5e6, 5e6 + took, 0, ("ann",), ("ann",), None, 0) for r, took in enumerate(TOOK)]
    made.recover("s", "ann", rows)
    made.recover("t", "bob", rows)

    assert made.after_opening(["s"], {"t": 1.0}) == 3 * 1.0
    assert made.after_opening(["t"], {"s": 1.0}) == 3 * 1.0, "it was in none of them: as long as others take"


def test_a_slow_peer_that_falls_silent_is_not_waited_for_as_long_as_it_used_to_take() -> None:
    swarm = swarm_of(2, peer_timeout=30.0)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 9.0, b: 9.0})

    assert play_round(swarm, {a: 9.0}) == pytest.approx(10.0), "a third of peer_timeout, not three medians"
    assert "p1 (silent for 10 s)" in warnings(swarm)[-1]


def test_the_host_is_told_once_for_which_peers_a_round_waits() -> None:
    swarm = swarm_of(2, min_peers=2, peer_timeout=5.0)
    a, b = swarm.peers
    play_round(swarm, {a: 1.0, b: 1.0})
    swarm.kill(b)
    for _ in range(80):
        swarm.pass_time(0.25)
        talk(swarm, a)
        swarm.job()
    c = swarm.join("p1")
    talk(swarm, c)

    told = [said for said in warnings(swarm) if said.startswith("waiting")]
    assert told == ["waiting for 1 peer: p1 (connection lost)"]
    assert swarm.hub.rounds.phase is not Phase.WAITING


def test_a_committed_round_reports_its_straggler_deadline() -> None:
    swarm = swarm_of(2)
    a, b = swarm.peers
    for _ in range(4):
        play_round(swarm, {a: 2.0, b: 2.0})
    play_round(swarm, {a: 2.0})

    commits = [e for e in swarm.events if isinstance(e, events.RoundCommitted)]
    assert commits[-1].deadline == pytest.approx(6.0)
    assert commits[-1].seconds == pytest.approx(6.0)


@pytest.mark.slow
def test_forty_long_histories_with_measured_deadlines() -> None:
    """Stalls and jitter of all sizes; every sample is counted once, and rounds do close without somebody."""
    cut = 0
    for seed in range(40):
        random = Random(seed)
        settings = toy_settings(
            samples=60, global_batch=4, eval=True, eval_every=3, step_timeout=60.0, peer_timeout=90.0
        )
        swarm = SimSwarm(seed % 2, settings)
        peers = [swarm.join() for _ in range(random.randint(2, 4))]
        for _ in range(random.randint(0, 400)):
            peer = random.choice(peers)
            what = random.random()
            if what < 0.02:
                swarm.cut(peer)
            elif what < 0.3:
                swarm.pass_time(random.choice([0.1, 0.5, 1.0]))
                for other in peers:
                    swarm.chat(other)
            else:
                peer.dial()
                talk(swarm, peer)
                swarm.job()
        ended = swarm.settle()

        assert ended.finished, f"seed {seed}"
        assert sorted(swarm.trained) == list(range(60)), f"seed {seed}"
        cut += any("goes on without" in said for said in warnings(swarm))
    assert cut > 4, "deadlines have been met in these histories"


def test_the_speed_of_a_run_is_that_of_its_last_commits_and_not_of_its_wait() -> None:
    swarm = SimSwarm(1)
    swarm.pass_time(200.0)
    for _ in range(2):
        swarm.join()
    commits: list[tuple[float, int]] = []  # when, and the tokens until then
    while swarm.hub.rounds.phase is not Phase.ENDED:
        swarm.step()
        found = [event.tokens for event in swarm.events if isinstance(event, events.RoundCommitted)]
        if len(found) > len(commits):
            commits.append((swarm.now, sum(found)))
        swarm.pass_time(0.5)

    (began, first), (ended, last) = commits[0], commits[-1]
    assert last > first > 0
    told = json.loads(swarm.hub.status(ended))["tokens_per_s"]
    assert told == pytest.approx((last - first) / (ended - began), abs=0.1)
