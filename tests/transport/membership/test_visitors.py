"""A person who looks at a run is `deciding`, and nobody counts as joined before they have agreed."""

import json
from typing import Any

from sim_swarm import STOP, TOKEN, SimSwarm
from toy_swarm import toy_settings

from transport.membership.admission import MOST
from transport.protocol import events, messages

ASKS = messages.Deciding(messages.PROTOCOL, TOKEN, "toy-run", "ann", "RTX 3090")


def swarm_with(conn: bytes = b"ann.1", message: messages.Message = ASKS) -> SimSwarm:
    swarm = SimSwarm(settings=toy_settings())
    swarm.act(swarm.hub.receive(conn, message, swarm.now))  # type: ignore[arg-type]
    return swarm


def status(swarm: SimSwarm) -> dict[str, Any]:
    return dict(json.loads(swarm.hub.status(swarm.now)))


def states(swarm: SimSwarm) -> dict[str, str]:
    found = status(swarm)
    return {peer["name"]: peer["state"] for peer in found["peers"] + found["others"]}


def told(swarm: SimSwarm) -> list[str]:
    return [type(event).__name__ for event in swarm.events]


def test_a_visitor_is_deciding_and_has_not_joined() -> None:
    swarm = swarm_with()

    assert states(swarm) == {"ann": "deciding"}
    assert status(swarm)["peers"] == []
    assert told(swarm) == ["PeerDeciding"]


def test_a_visitor_who_joins_with_the_same_key_is_no_longer_deciding() -> None:
    swarm = swarm_with(b"ann.0")
    swarm.join("ann")
    for _ in range(4):
        swarm.step()

    assert states(swarm)["ann"] != "deciding"
    assert "PeerJoined" in told(swarm)
    assert "PeerDeclined" not in told(swarm)


def test_a_visitor_who_declines_or_hangs_up_is_gone_and_the_host_is_told() -> None:
    for leave in (True, False):
        swarm = swarm_with()
        if leave:
            swarm.act(swarm.hub.receive(b"ann.1", messages.Leave("declined"), swarm.now))
        else:
            swarm.act(swarm.hub.lost(b"ann.1", swarm.now))

        assert states(swarm) == {}
        assert told(swarm) == ["PeerDeciding", "PeerDeclined"]


def test_a_silent_visitor_is_gone_after_the_timeout_of_a_peer() -> None:
    swarm = swarm_with()
    for _ in range(40):
        swarm.act(swarm.hub.tick(swarm.now))
        swarm.now += 1.0

    assert states(swarm) == {}


def test_a_visitor_without_the_token_is_not_shown() -> None:
    swarm = swarm_with(message=messages.Deciding(messages.PROTOCOL, "another", "toy-run", "ann"))

    assert states(swarm) == {}
    assert told(swarm) == []


def test_visitors_are_bounded() -> None:
    swarm = swarm_with()
    for number in range(2 * MOST):
        asks = messages.Deciding(messages.PROTOCOL, TOKEN, "toy-run", f"guest-{number}")
        swarm.act(swarm.hub.receive(b"guest%d.1" % number, asks, swarm.now))

    assert len(states(swarm)) == MOST


def test_the_host_finds_visitors_in_its_list() -> None:
    swarm = swarm_with()
    question = messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "list")
    swarm.act(swarm.hub.receive(b"host.1", question, swarm.now))
    while swarm.jobs and not swarm.said:
        swarm.job()
    rows = json.loads(swarm.said[-1].status)["peers"]  # type: ignore[union-attr]

    assert [(row["name"], row["state"]) for row in rows if row["name"]] == [("ann", "deciding")]


def test_the_states_of_peers_that_are_not_in_the_run_any_more() -> None:
    swarm = SimSwarm(settings=toy_settings(samples=400, global_batch=8))
    ann, bob, cat = (swarm.join(name) for name in ("ann", "bob", "cat"))
    for _ in range(20):
        swarm.step()
    swarm.leave(ann)
    swarm.kill(bob)
    for _ in range(5):
        swarm.step()
    swarm.pass_time(5.0)

    found = states(swarm)
    assert (found["ann"], found["bob"]) == ("left", "lost")
    assert found["cat"] not in ("left", "lost", "done")
    shares = [peer["share"] for peer in status(swarm)["peers"] + status(swarm)["others"]]
    assert abs(sum(shares) - 1) < 0.001, "of all that was trained, by those who are gone too"
    assert cat in swarm.peers


def test_who_leaves_before_any_work_has_only_looked_and_has_no_row() -> None:
    swarm = SimSwarm(settings=toy_settings(samples=400, global_batch=8))
    ann, looker = swarm.join("ann"), swarm.join("doctor")
    for _ in range(4):
        swarm.up(looker)
        swarm.down(looker)
    assert states(swarm)["doctor"] == "syncing"
    swarm.leave(looker)
    for _ in range(20):
        swarm.up(looker)
        ann.dial()
        swarm.chat(ann)

    assert [*states(swarm)] == ["ann"]
    assert "PeerLeft" in told(swarm), "the host is told all the same"


def test_status_has_the_median_gradient_norm_and_the_samples_counted() -> None:
    swarm = SimSwarm(settings=toy_settings(samples=32, global_batch=8))
    for name, norm in (("ann", 0.5), ("bob", 0.7), ("cat", 9.0), ("dan", 0.0)):
        swarm.join(name).grad_norm = norm
    assert (status(swarm)["grad_norm"], status(swarm)["samples"]) == (None, 0)
    swarm.settle()

    assert (status(swarm)["grad_norm"], status(swarm)["samples"]) == (0.7, 32)
    committed = [event for event in swarm.events if isinstance(event, events.RoundCommitted)]
    assert committed[1].grad_norm == {"ann": 0.5, "bob": 0.7, "cat": 9.0}


def test_once_the_run_is_over_peers_are_done_and_not_lost() -> None:
    swarm = SimSwarm(settings=toy_settings(samples=32, global_batch=8))
    for name in ("ann", "bob"):
        swarm.join(name)
    swarm.settle()

    assert set(states(swarm).values()) == {"done"}
    assert status(swarm)["state"] == "finished"
    assert isinstance(swarm.events[-1], events.RunEnded)
