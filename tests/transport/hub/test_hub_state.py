from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_swarm import STOP, SimSwarm
from toy_swarm import toy_settings

from transport import actions as do
from transport.membership import SESSION_TRANSITIONS, SessionEvent, State
from transport.protocol import events, messages
from transport.scheduling import PHASES, Phase

WORDS = ["step"] * 6 + ["up", "up", "down", "down", "work", "work", "job", "job"]
WORDS += [
    "cut",
    "cut unnoticed",
    "kill",
    "kill unnoticed",
    "join",
    "leave",
    "second",
    "minute",
    "restart",
    "reject",
    "kick",
    "ban",
]
DECISIONS = st.tuples(st.sampled_from(WORDS), st.integers(0, 5))


def play(swarm: SimSwarm, history: list[tuple[str, int]]) -> None:
    """Let a history happen."""
    for what, who in history:
        peer = swarm.peers[who % len(swarm.peers)]
        if what == "step":
            swarm.step()
        elif what == "up":
            swarm.up(peer)
        elif what == "down":
            swarm.down(peer)
        elif what == "work":
            peer.work()
        elif what == "job":
            swarm.job()
        elif what in ("cut", "cut unnoticed"):
            swarm.cut(peer, noticed=what == "cut")
        elif what in ("kill", "kill unnoticed"):
            swarm.kill(peer, noticed=what == "kill")
        elif what == "join" and len(swarm.peers) < 8:
            swarm.join()
        elif what == "leave":
            swarm.leave(peer)
        elif what == "second":
            swarm.pass_time(1.0)
        elif what == "minute":
            for _ in range(30):
                swarm.pass_time(2.0)
        elif what == "restart":
            swarm.restart_hub()
        elif what == "reject":
            swarm.reject = f"p{who}"
        elif what in ("kick", "ban"):
            order = messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", what, peer.state.hello.name)  # type: ignore[arg-type]
            swarm.act(swarm.hub.receive(b"host.1", order, swarm.now))


PACES = (1.0, 1.0, 30.0, 0.0)  # the third gets leases that span rounds; of the last nothing is known


def lives_through(swarm: SimSwarm, peers: int, history: list[tuple[str, int]], which: str = "") -> None:
    """Whatever happens, the run ends, and each sample is counted once."""
    for i in range(peers):
        swarm.join().compute_s = PACES[i]
    play(swarm, history)
    swarm.reject = ""
    if swarm.ended is None:
        swarm.join()
    ended = swarm.settle()

    whole = sorted(swarm.trained) == list(range(13))
    assert whole if ended.finished else len(set(swarm.trained)) == len(swarm.trained), which
    assert ended.finished or ended.exit_code == 7, which


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([0, 1, 3]), st.integers(1, 4), st.lists(DECISIONS, max_size=60))
def test_whatever_happens_each_sample_is_counted_once_and_the_run_ends(
    staleness: int, peers: int, history: list[tuple[str, int]]
) -> None:
    swarm = SimSwarm(staleness)
    lives_through(swarm, peers, history)

    committed = [e.round for e in swarm.events if isinstance(e, events.RoundCommitted)]
    assert len(set(committed)) == len(committed), "no round is announced twice"
    assert {row.fingerprint - row.round for row in swarm.books.rounds if row.fingerprint} <= {1000}


def drawn_history(random: Random) -> list[tuple[str, int]]:
    """A long one, in which some things happen often and others hardly."""
    weights = [random.random() ** 2 for _ in WORDS]
    return [(random.choices(WORDS, weights)[0], random.randint(0, 5)) for _ in range(random.randint(0, 150))]


def seeded_history(seed: int) -> None:
    """One long history, drawn from its seed without shrinking: cheap, so many. The laws hold after it."""
    random = Random(seed)
    swarm = SimSwarm(random.choice([0, 1, 3]))
    peers = random.randint(1, 4)
    lives_through(swarm, peers, drawn_history(random), f"seed {seed}")


@pytest.mark.slow
def test_a_hundred_histories() -> None:
    """`scripts/chaos --histories` plays more of them."""
    for seed in range(100):
        seeded_history(seed)


def swarm_of(peers: int, staleness: int = 1, **changes: object) -> SimSwarm:
    swarm = SimSwarm(
        staleness, toy_settings(**({"samples": 40, "global_batch": 8, "step_timeout": 60.0} | changes))
    )
    for _ in range(peers):
        swarm.join()
    return swarm


def until(swarm: SimSwarm, there: object, steps: int = 500) -> None:
    for _ in range(steps):
        if callable(there) and there():
            return
        swarm.step()
    raise AssertionError(f"never came to it: {swarm.hub.rounds.phase} {swarm.hub.rounds.exchange}")


def told(swarm: SimSwarm, kind: type[events.Event]) -> list[events.Event]:
    return [e for e in swarm.events if isinstance(e, kind)]


def test_a_run_of_one_peer_delivers_each_lease_one_round_later() -> None:
    swarm = swarm_of(1)
    ended = swarm.settle()
    rounds = told(swarm, events.RoundCommitted)

    assert ended.finished
    assert [r.counted for r in rounds] == [0, 8, 16, 24, 32, 40]
    assert [r.step for r in rounds] == [0, 1, 2, 3, 4, 5]
    assert [r.exchange for r in told(swarm, events.RoundOpened)] == [True] * 6


def test_without_staleness_each_round_delivers_its_own_lease() -> None:
    swarm = swarm_of(2, staleness=0, min_peers=2)
    ended = swarm.settle()

    assert ended.finished
    assert [r.counted for r in told(swarm, events.RoundCommitted)] == [8, 16, 24, 32, 40]


def test_the_first_round_waits_for_guests_and_says_so_but_not_for_ever() -> None:
    for comes in (True, False):
        swarm = swarm_of(1, guests=1, first_peers=2, start_timeout=100.0)
        pass_seconds(swarm, 90)
        assert swarm.hub.rounds.round == 0
        assert swarm.hub.rounds.state_word == "waiting"
        assert warnings_of(swarm) == ["waiting for 1 peer: none has come yet"]
        if comes:
            swarm.join()
        else:
            pass_seconds(swarm, 20)
        ended = swarm.settle()

        assert ended.finished
        gave_up = "the first step waits no longer for 1 of its peers (2 min)"
        assert (gave_up in warnings_of(swarm)) == (not comes)


def pass_seconds(swarm: SimSwarm, seconds: int) -> None:
    """Let time pass in which peers answer the hub's pings."""
    for _ in range(seconds):
        swarm.pass_time(1.0)
        for _ in range(3):
            swarm.step()


def warnings_of(swarm: SimSwarm) -> list[str]:
    return [event.message for event in swarm.events if isinstance(event, events.Warned)]


def test_no_round_opens_below_min_peers_and_the_run_ends_with_code_7() -> None:
    swarm = swarm_of(2, min_peers=3, start_timeout=100.0)
    ended = swarm.settle()

    assert told(swarm, events.RoundOpened) == []
    assert (ended.finished, ended.exit_code) == (False, 7)
    assert ended.reason == "2 peers were ready, 3 needed, for 100 s"


def test_the_deadline_goes_on_without_the_slow_one_and_it_delivers_later() -> None:
    swarm = swarm_of(2, min_peers=2)
    until(swarm, lambda: swarm.hub.rounds.round == 2 and swarm.hub.rounds.phase is Phase.OPEN)
    fast, slow = swarm.peers
    for _ in range(29):
        swarm.pass_time(1.0)
        swarm.chat(fast)
        swarm.chat(slow)
        fast.work()
    assert swarm.hub.rounds.phase is Phase.OPEN, "before the deadline it waits"
    swarm.pass_time(1.0)
    assert swarm.hub.rounds.phase is Phase.CLOSED
    ended = swarm.settle()

    third = told(swarm, events.RoundCommitted)[2]
    assert (third.members, third.accepted) == (("p0", "p1"), ("p0",))
    assert [e.message for e in told(swarm, events.Warned)] == [
        "round 2 goes on without p1 (answers, but its update has not come), 30 s after it was opened"
    ]
    assert told(swarm, events.PeerLeft) == []
    assert ended.finished


@pytest.mark.parametrize("staleness", [1, 3])
def test_who_says_what_is_not_x_is_dropped_and_the_run_goes_on(staleness: int) -> None:
    """With rounds in flight, of the x' that they have. The replay decides, whoever has more updates in the
    run."""
    swarm = swarm_of(3, staleness, min_peers=1)
    until(swarm, lambda: swarm.hub.rounds.round == 3)
    known = [row.fingerprint for row in swarm.books.rounds]
    assert known == [1000, 1001, 1002][: 4 - staleness] + [0] * (staleness - 1)
    for liar in swarm.peers[:2]:
        liar.skew = 1
    ended = swarm.settle()

    assert ended.finished
    assert [peer.state.refused and peer.state.refused.code for peer in swarm.peers] == [
        "state",
        "state",
        None,
    ]
    assert {row.fingerprint - row.round for row in swarm.books.rounds if row.fingerprint} == {1000}
    assert {w.peer for w in told(swarm, events.Warned) if "it is dropped" in w.message} == {"p0", "p1"}


def test_a_lie_costs_no_round_the_time_of_a_replay() -> None:
    swarm = swarm_of(3, min_peers=1, samples=400)
    until(swarm, lambda: swarm.hub.rounds.round == 3)
    swarm.peers[1].skew = 1
    replays = [job for job in swarm.jobs if isinstance(job, do.FindFingerprint)]
    while not replays and swarm.hub.rounds.round < 40:  # the thread of the replay is busy all the time
        swarm.step()
        kept = [job for job in swarm.jobs if isinstance(job, do.FindFingerprint)]
        replays += kept
        swarm.jobs = type(swarm.jobs)(job for job in swarm.jobs if job not in kept)
    asked_at = swarm.hub.rounds.round
    until(swarm, lambda: swarm.hub.rounds.round >= asked_at + 10)

    members = {session.name for session in swarm.hub.members}
    assert members == {"p0", "p1", "p2"}, "nobody is judged before the replay has told"
    assert all("p1" not in row.accepted for row in swarm.books.rounds[asked_at + 2 :]), (
        "but who differs waits"
    )
    swarm.jobs.extend(replays)
    assert swarm.settle().finished
    assert swarm.peers[1].state.refused is not None


def test_a_run_stops_where_the_replay_differs_from_what_several_agree_on_and_nobody_says_it() -> None:
    swarm = swarm_of(2, min_peers=1, samples=400)
    for peer in swarm.peers:
        peer.skew = 1  # as where their arithmetic is another than the hub's
    until(swarm, lambda: swarm.hub.rounds.round == 3)
    swarm.join().skew = 2
    ended = swarm.settle()

    assert (ended.finished, ended.exit_code) == (False, 1)
    assert ended.reason.startswith("x' of round")
    assert ended.reason.endswith("is not what the ledger says")


def test_several_who_agree_on_a_lie_are_dropped_where_one_newcomer_says_the_truth() -> None:
    swarm = swarm_of(2, min_peers=1, samples=400)
    for peer in swarm.peers:
        peer.skew = 1
    until(swarm, lambda: swarm.hub.rounds.round == 3)
    honest = swarm.join()
    ended = swarm.settle()

    assert ended.finished
    assert honest.state.refused is None
    assert all(peer.state.refused is not None for peer in swarm.peers[:2])


def test_a_newcomer_with_another_base_is_refused_and_the_others_go_on() -> None:
    swarm = swarm_of(2)
    until(swarm, lambda: swarm.hub.rounds.round == 2)
    wrong = swarm.join()
    wrong.skew = 7
    ended = swarm.settle()

    assert ended.finished
    assert wrong.state.refused is not None
    assert wrong.state.refused.code == "state"
    assert "is not the one of the run" in wrong.state.refused.reason


def test_an_unusable_packet_costs_its_sender_three_strikes() -> None:
    swarm = swarm_of(2, min_peers=2, samples=400)
    swarm.reject = "p1"
    until(swarm, lambda: told(swarm, events.PeerLeft))

    (left,) = told(swarm, events.PeerLeft)
    assert (left.peer, left.reason) == ("p1", "3 unusable packets, the last: unusable")
    refused = [c.refused for c in swarm.peers[1].state.commits.values() if c.refused]
    assert refused == [{"p1": "unusable"}] * 2, "it hears of each strike with the commit, not at the end only"
    warned = [w.message for w in told(swarm, events.Warned) if w.peer == "p1"]
    assert warned == ["its packet cannot be used: unusable"], "the host hears of it once"
    until(swarm, lambda: swarm.peers[1].state.refused is not None)
    assert swarm.peers[1].state.refused.code == "kicked"
    assert swarm.peers[1].state.refused.reason == left.reason
    assert len(told(swarm, events.RoundCommitted)) >= 2, "the rounds went on without its packets"


def test_the_last_evaluation_is_assigned_to_the_peers_that_are_left() -> None:
    swarm = swarm_of(4, min_peers=4, eval=True)
    until(swarm, lambda: swarm.hub.rounds.phase is Phase.FINAL)
    first = swarm.hub.rounds.evaluations.now
    assert first is not None
    assert (first.parts, first.opinions) == (2, 2)
    swarm.kill(swarm.peers[0])
    swarm.kill(swarm.peers[2])
    swarm.kill(swarm.peers[3])
    ended = swarm.settle()

    assert ended.finished
    done = [e for e in told(swarm, events.EvaluationDone) if e.final]
    assert [(e.tokens, e.loss) for e in done] == [(2, 2.0)], "all parts by the one that stayed"


def test_an_evaluation_that_lost_a_part_is_done_again_in_the_next_round() -> None:
    swarm = swarm_of(2, min_peers=1, eval=True, eval_every=100)
    until(swarm, lambda: swarm.hub.rounds.phase is Phase.OPEN and len(swarm.hub.rounds.exchange.members) >= 1)  # type: ignore[union-attr]
    swarm.kill(swarm.peers[0])
    ended = swarm.settle()

    evaluations = [e for e in told(swarm, events.EvaluationDone) if not e.final]
    assert ended.finished
    assert len(evaluations) == 1


def test_an_evaluation_under_way_when_the_run_ends_is_not_told_after_its_end() -> None:
    swarm = swarm_of(1, eval=True, eval_every=1)
    until(swarm, lambda: swarm.hub.rounds.evaluations.now is not None)
    ev, cable = swarm.hub.rounds.evaluations.now, swarm.peers[0].cable
    assert ev is not None
    assert cable is not None
    swarm.apply(lambda _: swarm.hub.rounds.end("by the host", 0))
    swarm.act(swarm.hub.receive(cable.name, messages.Evaluated(ev.round, 0, 2.0, 1), swarm.now))

    assert isinstance(swarm.events[-1], events.RunEnded)
    assert told(swarm, events.EvaluationDone) == []


def test_a_name_is_unique_among_the_living_and_free_again_after_a_loss() -> None:
    swarm = swarm_of(0)
    names = []
    for i in range(3):
        peer = swarm.join("an odd/näme!")
        swarm.step()
        assert peer.state.welcome is not None
        names.append(peer.state.welcome.name)
        if i == 0:
            swarm.kill(peer)

    assert names == ["an-odd-näme", "an-odd-näme", "an-odd-näme-2"]


def test_a_hub_that_slept_does_not_blame_its_peers() -> None:
    swarm = swarm_of(2, peer_timeout=30.0)
    until(swarm, lambda: swarm.hub.rounds.round == 1)
    swarm.pass_time(3600.0)

    assert told(swarm, events.PeerLeft) == []


def test_a_silent_peer_is_gone_after_peer_timeout_with_its_name_and_reason() -> None:
    swarm = swarm_of(2, peer_timeout=10.0)
    until(swarm, lambda: swarm.hub.rounds.round == 1)
    for _ in range(15):
        swarm.pass_time(1.0)
        swarm.chat(swarm.peers[0])

    left = told(swarm, events.PeerLeft)
    assert [(e.peer, e.reason) for e in left] == [("p1", "silent for 10 s")]


def test_the_host_stops_after_the_exchange_in_flight_or_at_once() -> None:
    for now in (False, True):
        swarm = swarm_of(1)
        until(swarm, lambda s=swarm: s.hub.rounds.round == 2 and s.hub.rounds.phase is Phase.OPEN)  # type: ignore[misc]
        stop = messages.AskStop(messages.PROTOCOL, STOP, "toy-run", now)
        swarm.act(swarm.hub.receive(b"a stranger", stop, swarm.now))
        ended = swarm.settle()

        assert (ended.finished, ended.exit_code, ended.reason) == (False, 0, "stopped by its host")
        assert swarm.hub.rounds.state_word == "stopped", "not all steps are done"
        assert ended.rounds == (2 if now else 3)


def test_a_pause_is_a_stop_whose_run_may_go_on_and_its_peers_are_told_so() -> None:
    swarm = swarm_of(2)
    until(swarm, lambda: swarm.hub.rounds.round == 2 and swarm.hub.rounds.phase is Phase.OPEN)
    swarm.act(
        swarm.hub.receive(
            b"the host", messages.AskStop(messages.PROTOCOL, STOP, "toy-run", pause=True), swarm.now
        )
    )
    ended = swarm.settle()

    assert (ended.exit_code, ended.reason, ended.rounds) == (events.PAUSED, "paused by its host", 3)
    assert swarm.hub.rounds.over.resumable
    assert swarm.hub.rounds.state_word == "paused"


def test_the_tables_name_every_state() -> None:
    assert set(PHASES) == set(Phase)
    assert set(SESSION_TRANSITIONS) == set(State)
    assert {kind for row in SESSION_TRANSITIONS.values() for kind in row} == set(SessionEvent)
    assert all(to in PHASES for row in PHASES.values() for to in row)


def test_a_peer_whose_lease_the_next_hub_lacks_begins_anew_at_once() -> None:
    """A standby may take over without the newest lease; the peer is told, and does not wait for silence."""
    swarm = SimSwarm()
    peer = swarm.join()
    while not peer.pending:
        swarm.step()
    for session in swarm.books.sessions.values():
        session.leases.clear()
    swarm.restart_hub()
    peer.dial()
    swarm.chat(peer)

    assert peer.state.sessions == 2
