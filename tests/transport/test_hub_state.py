from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_swarm import SimSwarm

from transport import events

DECISIONS = st.tuples(
    st.sampled_from(
        ["step"] * 6
        + ["up", "up", "down", "down", "work", "work", "job", "job"]
        + [
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
            "skew",
        ]
    ),
    st.integers(0, 5),
)


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
            swarm.pass_time(60.0)
        elif what == "restart":
            swarm.restart_hub()
        elif what == "reject":
            swarm.reject = f"p{who}"
        elif what == "skew":
            pass


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1), st.integers(1, 4), st.lists(DECISIONS, max_size=60))
def test_whatever_happens_each_sample_is_counted_once_and_the_run_ends(
    staleness: int, peers: int, history: list[tuple[str, int]]
) -> None:
    swarm = SimSwarm(staleness)
    for _ in range(peers):
        swarm.join()
    play(swarm, history)
    swarm.reject = ""
    if swarm.ended is None:
        swarm.join()
    ended = swarm.settle()

    assert (
        sorted(swarm.trained) == list(range(13))
        if ended.finished
        else len(set(swarm.trained)) == len(swarm.trained)
    )
    assert ended.finished or ended.exit_code == 7
    committed = [e.round for e in swarm.events if isinstance(e, events.RoundCommitted)]
    assert len(set(committed)) == len(committed), "no round is announced twice"
