"""The host decides which peers are in a run, and its decisions survive the hub."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sim_swarm import STOP, TOKEN, SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport.membership.admission import KEY_TRANSITIONS, MOST, PATIENCE_S, KeyEvent, Standing
from transport.peer.peer_state import SessionState
from transport.protocol import events, messages
from transport.protocol.keys import short_key
from transport.protocol.run_url import to_base64

NEW = to_base64(b"a new token, yes")


def swarm_of(*names: str, **changes: object) -> SimSwarm:
    swarm = SimSwarm(settings=toy_settings(**({"samples": 400, "global_batch": 8} | changes)))
    for name in names:
        swarm.join(name)
    go_on(swarm)
    return swarm


def go_on(swarm: SimSwarm, steps: int = 6) -> None:
    for _ in range(steps):
        swarm.step()


def ordered(swarm: SimSwarm, order: Any, peer: str = "", **fields: str) -> dict[str, Any]:
    """Return the hub's answer to the host, given once its effects are in the ledger."""
    question = messages.AskAdmin(1, STOP, "toy-run", order, peer, **fields)
    swarm.act(swarm.hub.receive(b"host.1", question, swarm.now))
    swarm.said.clear()
    while swarm.jobs and not swarm.said:
        swarm.job()
    (answer,) = swarm.said
    assert isinstance(answer, messages.Status)
    return dict(json.loads(answer.status))


def refused(swarm: SimSwarm, question: messages.AskAdmin) -> str:
    sent = [a.message for a in swarm.hub.receive(b"host.1", question, swarm.now) if hasattr(a, "message")]  # type: ignore[union-attr]
    (answer,) = (m for m in sent if isinstance(m, messages.Refused))
    return f"{answer.code}: {answer.reason}"


def states(swarm: SimSwarm) -> dict[str, str]:
    return {row["name"]: row["state"] for row in ordered(swarm, "list")["peers"]}


def why(peer: SimPeer) -> str:
    return peer.state.refused.reason if peer.state.refused is not None else ""


def back(swarm: SimSwarm, name: str, key: str = "") -> SimPeer:
    """A new process of this peer."""
    peer = swarm.join(name, key)
    go_on(swarm)
    return peer


# ---- kicks and bans ----------------------------------------------------------------------------------------


def test_a_kicked_peer_learns_why_and_its_samples_are_leased_again() -> None:
    swarm = swarm_of("ann", "bob", samples=40)
    bob = swarm.peers[1]
    assert ordered(swarm, "kick", "bob", reason="too hot")["peers"] == ["bob"]
    session = {s.name: s.id for s in swarm.hub.members}
    assert list(session) == ["ann"]
    assert not [s for s in swarm.hub.rounds.leases._leases if s not in session.values()], (
        "no lease of his is left"
    )
    go_on(swarm)

    assert bob.state.link is SessionState.REFUSED
    assert why(bob) == "kicked by the run's host: too hot"
    left = [e for e in swarm.events if isinstance(e, events.PeerLeft)]
    assert [(e.peer, e.reason) for e in left] == [("bob", "kicked by the run's host: too hot")]
    assert swarm.settle().finished


def test_a_kicked_peer_may_come_back_and_a_banned_one_may_not() -> None:
    swarm = swarm_of("ann", "bob")
    ordered(swarm, "kick", "bob")
    again = back(swarm, "bob")
    assert not why(again)
    ordered(swarm, "ban", "bob", reason="lies")

    go_on(swarm)
    for peer in (again, back(swarm, "bob"), back(swarm, "another name", "bob")):
        assert why(peer) == "banned by the run's host: lies"
    assert states(swarm) == {"ann": states(swarm)["ann"], "bob": "banned"}


@pytest.mark.parametrize("word", ["bob", short_key("bob")])
def test_a_ban_outlives_the_hub_until_it_is_lifted(word: str) -> None:
    swarm = swarm_of("ann", "bob")
    ordered(swarm, "ban", word)
    swarm.restart_hub()
    go_on(swarm)
    assert why(back(swarm, "bob"))
    assert ordered(swarm, "unban", word)["peers"] == ["bob"]

    assert not why(back(swarm, "bob"))
    swarm.restart_hub()
    assert not why(back(swarm, "bob"))


def test_a_banned_session_that_the_ledger_still_has_cannot_resume() -> None:
    """The hub was killed between the two writes."""
    swarm = swarm_of("ann", "bob")
    sessions = dict(swarm.books.sessions)
    ordered(swarm, "ban", "bob")
    swarm.books.sessions = sessions
    bob = swarm.peers[1]
    swarm.restart_hub()
    go_on(swarm)

    assert why(bob)


def test_a_ban_ends_all_peers_of_a_key_and_a_kick_one_of_them() -> None:
    swarm = swarm_of("ann")
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        back(swarm, name, "a machine")

    assert ordered(swarm, "kick", "gpu-2")["peers"] == ["gpu-2"]
    assert ordered(swarm, "ban", "gpu-1")["peers"] == ["gpu-1", "gpu-3"]
    assert [s.name for s in swarm.hub.members] == ["ann"]


def test_an_ambiguous_name_is_refused() -> None:
    swarm = swarm_of("ann")
    for key in ("one", "two"):
        ordered(swarm, "ban", back(swarm, "bob", key).state.hello.name)
        go_on(swarm)

    assert "no peer is called 'eve'" in refused(swarm, messages.AskAdmin(1, STOP, "toy-run", "kick", "eve"))
    several = refused(swarm, messages.AskAdmin(1, STOP, "toy-run", "unban", "bob"))
    assert short_key("one") in several
    assert short_key("two") in several
    assert ordered(swarm, "unban", short_key("two"))["key"] == short_key("two")


@pytest.mark.parametrize("secret", [TOKEN, "", "another"])
def test_only_the_host_is_asked_and_obeyed(secret: str) -> None:
    swarm = swarm_of("ann")
    for order in ("list", "kick", "ban"):
        assert "only the run's host" in refused(swarm, messages.AskAdmin(1, secret, "toy-run", order, "ann"))

    assert states(swarm) == {"ann": "training"}


# ---- the token ---------------------------------------------------------------------------------------------


def test_a_new_token_refuses_newcomers_and_keeps_members() -> None:
    """Keys are free: who has only shown the old token is no member, before an update of it is in the run."""
    swarm = swarm_of("ann", "bob")
    go_on(swarm, 20)
    assert {known.name for known in swarm.books.peers.values()} == {"ann", "bob"}
    swarm.join("cem")
    go_on(swarm, 1)
    ordered(swarm, "token", token=NEW)
    swarm.kill(swarm.peers.pop())
    for _ in range(4):
        swarm.pass_time(1.0)
    assert "no longer" in why(back(swarm, "cem")), "it had delivered nothing"
    swarm.cut(swarm.peers[1])
    for _ in range(4):
        swarm.pass_time(1.0)  # his session is over
    go_on(swarm)

    assert swarm.peers[1].state.sessions == 2, "who has delivered may come back"
    assert "no longer" in why(back(swarm, "eve"))
    ordered(swarm, "kick", "bob")
    assert "no longer" in why(back(swarm, "bob")), "a kick makes a stranger of him"
    eve = SimPeer(swarm, "eve", 1)
    eve.state.hello = type(eve.state.hello)(1, NEW, "toy-run", "eve")
    swarm.peers.append(eve)
    go_on(swarm)
    assert eve.state.link is SessionState.JOINED


def test_a_malformed_token_is_refused() -> None:
    swarm = swarm_of("ann")

    assert "16 bytes" in refused(swarm, messages.AskAdmin(1, STOP, "toy-run", "token"))
    assert swarm.hub.admission.token == TOKEN


# ---- the host's approval -------------------------------------------------------------------------------


def test_a_newcomer_waits_for_approval_and_gets_nothing_before() -> None:
    swarm = swarm_of("ann", join="approve")
    ann = swarm.peers[0]
    assert ann.state.link is SessionState.GREETING
    assert short_key("ann") in ann.state.waits
    asks = [e for e in swarm.events if isinstance(e, events.PeerAsks)]
    assert [(e.peer, e.key) for e in asks] == [("ann", short_key("ann"))]
    assert states(swarm) == {"ann": "wants in"}
    assert swarm.hub.members.sessions == {}

    assert ordered(swarm, "approve", "ann")["peers"] == ["ann"]
    go_on(swarm)
    assert ann.state.link is SessionState.JOINED
    swarm.restart_hub()
    assert back(swarm, "ann").state.link is SessionState.JOINED, "who was approved need not ask again"


def test_the_host_denies_and_the_next_time_approves() -> None:
    swarm = swarm_of("ann", join="approve")
    ordered(swarm, "deny", "ann", reason="who are you?")
    go_on(swarm)
    assert why(swarm.peers[0]) == "the run's host says no: who are you?"
    again = back(swarm, "ann")
    ordered(swarm, "approve", short_key("ann"))
    go_on(swarm)

    assert again.state.link is SessionState.JOINED


def test_a_peer_that_is_banned_while_waiting_does_not_wait_again() -> None:
    swarm = swarm_of("ann", join="approve")
    ordered(swarm, "ban", "ann")
    go_on(swarm)

    assert why(swarm.peers[0])
    assert why(back(swarm, "ann"))


def test_the_hosts_own_peers_need_no_approval() -> None:
    swarm = swarm_of("ann", join="approve", own_key="ann")

    assert swarm.peers[0].state.link is SessionState.JOINED


def test_few_connections_wait_for_approval_and_none_forever() -> None:
    names = [f"p{i}" for i in range(MOST + 2)]
    swarm = swarm_of(*names, join="approve", peer_timeout=1e9, start_timeout=1e9)
    assert len(swarm.hub.admission.asking) == MOST
    assert "others wait" in why(swarm.peers[-1])
    for _ in range(int(PATIENCE_S / 100) + 1):
        swarm.now += 100.0
        swarm.hub.members._ticked = swarm.now  # the hub was awake
        swarm.act(swarm.hub.tick(swarm.now))
    go_on(swarm)

    assert swarm.hub.admission.asking == {}
    assert "within an hour" in why(swarm.peers[0])


def test_a_waiting_connection_that_closes_or_falls_silent_is_dropped() -> None:
    swarm = swarm_of("ann", "bob", join="approve", peer_timeout=10.0)
    swarm.kill(swarm.peers[0])
    for _ in range(15):
        swarm.pass_time(1.0)

    assert states(swarm) == {}


def test_waiting_connections_hear_of_a_new_token_and_of_the_end() -> None:
    swarm = swarm_of("ann", join="approve")
    ordered(swarm, "token", token=NEW)
    go_on(swarm)
    assert "no longer" in why(swarm.peers[0])
    swarm = swarm_of("ann", join="approve")
    swarm.act(swarm.hub.receive(b"host.1", messages.AskStop(1, STOP, "toy-run", True), swarm.now))
    go_on(swarm)

    assert swarm.peers[0].state.refused is not None
    assert swarm.peers[0].state.refused.code == "over"


def test_the_table_names_every_standing_and_every_event() -> None:
    assert set(KEY_TRANSITIONS) == set(Standing)
    assert {act for row in KEY_TRANSITIONS.values() for act in row} == set(KeyEvent)
