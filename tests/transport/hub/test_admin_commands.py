"""The host decides which peers are in a run, and its decisions survive the hub."""

import json
from dataclasses import replace
from typing import Any

import pytest
from sim_swarm import STOP, TOKEN, SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport.ledger import KnownPeer
from transport.membership import KEY_TRANSITIONS, KeyEvent, Standing
from transport.peer import SessionState
from transport.protocol import encode, events, messages, short_key, to_base64

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
    question = messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", order, peer, **fields)
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

    assert "no peer is called 'eve'" in refused(
        swarm, messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "kick", "eve")
    )
    several = refused(swarm, messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "unban", "bob"))
    assert short_key("one") in several
    assert short_key("two") in several
    assert ordered(swarm, "unban", short_key("two"))["key"] == short_key("two")


@pytest.mark.parametrize("secret", [TOKEN, "", "another"])
def test_only_the_host_is_asked_and_obeyed(secret: str) -> None:
    swarm = swarm_of("ann")
    for order in ("list", "kick", "ban"):
        assert "only the run's host" in refused(
            swarm, messages.AskAdmin(messages.PROTOCOL, secret, "toy-run", order, "ann")
        )

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
    eve.state.hello = type(eve.state.hello)(messages.PROTOCOL, NEW, "toy-run", "eve")
    swarm.peers.append(eve)
    go_on(swarm)
    assert eve.state.link is SessionState.JOINED


def test_a_malformed_token_is_refused() -> None:
    swarm = swarm_of("ann")

    assert "16 bytes" in refused(swarm, messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "token"))
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


def test_few_connections_wait_for_approval_and_none_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.membership.admission.MOST", 3)
    names = [f"p{i}" for i in range(5)]
    swarm = swarm_of(*names, join="approve", peer_timeout=1e9, start_timeout=1e9)
    assert len(swarm.hub.admission.asking) == 3
    assert "others wait" in why(swarm.peers[-1])
    for _ in range(3600 // 100 + 1):
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
    swarm.act(
        swarm.hub.receive(b"host.1", messages.AskStop(messages.PROTOCOL, STOP, "toy-run", True), swarm.now)
    )
    go_on(swarm)

    assert swarm.peers[0].state.refused is not None
    assert swarm.peers[0].state.refused.code == "over"


def test_the_table_names_every_standing_and_every_event() -> None:
    assert set(KEY_TRANSITIONS) == set(Standing)
    assert {act for row in KEY_TRANSITIONS.values() for act in row} == set(KeyEvent)


# ---- pages of the list -------------------------------------------------------------------------------------

FRAME = 1 << 20  # bytes that a peer takes


def crowded(keys: int, reason: str = "") -> SimSwarm:
    """A run of two peers in which so many keys have been before, some of them banned."""
    swarm = swarm_of("ann", "bob")
    standing = {True: Standing.BANNED.value, False: Standing.MEMBER.value}
    for number in range(keys):
        key = f"{number:043d}"
        known = KnownPeer(key, f"s-{number}", standing[number % 50 == 0], reason)
        swarm.hub.admission.known[key] = known
    return swarm


def pages(swarm: SimSwarm) -> list[dict[str, Any]]:
    found = [ordered(swarm, "list")]
    while more := found[-1]["more"]:
        found.append(ordered(swarm, "list", more))
    return found


@pytest.mark.parametrize(("keys", "reason"), [(0, ""), (511, ""), (7000, ""), (700, "\u0416\x1b" * 1000)])
def test_the_list_comes_in_pages_that_fit_into_a_frame_and_names_each_key_once(
    keys: int, reason: str
) -> None:
    swarm = crowded(keys, reason)
    found = pages(swarm)
    rows = [row for page in found for row in page["peers"]]

    assert all(len(encode(messages.Status(json.dumps(page)))) < FRAME for page in found)
    assert len({row["name"] for row in rows}) == len(rows) == keys + 2
    assert [row["name"] for row in rows[:2]] == ["ann", "bob"], "those that are here come first"
    assert [page["left"] for page in found] == [
        keys + 2 - sum(len(page["peers"]) for page in found[: number + 1]) for number in range(len(found))
    ]
    assert len(found) > 1 or keys + 2 <= 512


def test_keys_that_come_and_go_between_two_pages_cost_no_other_its_row() -> None:
    swarm = crowded(2000)
    first = ordered(swarm, "list")
    for number in range(0, 2000, 3):
        del swarm.hub.admission.known[f"{number:043d}"]
    swarm.hub.admission.known["x" * 43] = KnownPeer("x" * 43, "new", Standing.MEMBER.value)
    rows, more = [*first["peers"]], first["more"]
    while more:
        page = ordered(swarm, "list", more)
        rows, more = [*rows, *page["peers"]], page["more"]
    names = [row["name"] for row in rows]

    assert len(set(names)) == len(names)
    assert {f"s-{number}" for number in range(2000) if number % 3} | {"new"} <= set(names)


@pytest.mark.parametrize("word", ["7 x", "-2 x", "x", "1000000000000000000000 y"])
def test_a_page_that_begins_nowhere_is_refused(word: str) -> None:
    question = messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "list", word)

    assert refused(swarm_of("ann"), question) == f"unknown: no page of the list begins after {word!r}"


def test_one_of_twenty_thousand_is_found_by_name_and_by_key_and_many_of_one_name_by_key() -> None:
    swarm = crowded(20_000)
    assert ordered(swarm, "ban", "s-19999")["peers"] == ["s-19999"]
    assert ordered(swarm, "unban", short_key(f"{100:043d}"))["peers"] == ["s-100"]
    for key, known in [*swarm.hub.admission.known.items()]:
        swarm.hub.admission.known[key] = replace(known, name="s")
    said = refused(swarm, messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "kick", "s"))

    assert said.endswith(" and 19,593 more")
    assert len(said) < 300
    assert ordered(swarm, "kick", short_key(f"{7:043d}"))["did"] == "kicked"


def test_a_status_of_thousands_of_sessions_fits_into_a_frame_and_says_how_many_there_are() -> None:
    swarm = swarm_of("ann")
    here = next(iter(swarm.hub.members))
    for number in range(3000):
        name = f"\u0416{number:039d}"
        session = replace(here, id=f"id-{number}", name=name, hardware="\u0416" * 128, conn=None)
        swarm.hub.members.sessions[session.id] = session
    status = json.loads(text := swarm.hub.status(swarm.now, recipe=True))

    assert len(encode(messages.Status(text))) < FRAME
    assert status["peer_count"] == 3001
    assert 100 < len(status["peers"]) < 3001
    assert status["peers"][0]["name"] == "ann"
