"""An extension of a hub reads reports and adds to rounds; a peer's body reaches nobody else."""

import json

import pytest
from msgspec.structs import replace
from sim_swarm import SimPeer, SimSwarm
from toy_extension import UNREADABLE, WELL, Health, readable
from toy_swarm import toy_settings

from transport.hub import Late
from transport.protocol import events, messages
from transport.scheduling import HubExtension


class Speaker(SimPeer):
    says = WELL

    def report(self, opened: messages.Round) -> messages.Report:
        return replace(super().report(opened), extra={"health": self.says, "unknown": b"x"})


class Speakers(SimSwarm):
    def new_peer(self, name: str) -> SimPeer:
        peer = Speaker(self, name, self.staleness)
        peer.state.hello = replace(peer.state.hello, extra={"health": b"as ever", "unknown": b"x"})
        return peer


@pytest.fixture
def swarm() -> Speakers:
    usual = {"samples": 200, "global_batch": 4, "step_timeout": 20.0, "peer_timeout": 90.0}
    made = Speakers(1, toy_settings(**usual, start_timeout=300.0), extensions=[Health])
    for _ in range(3):
        made.join()
    return made


def health(swarm: SimSwarm) -> Health:
    (found,) = swarm.hub.rounds.extensions
    assert isinstance(found, Health)
    return found


def test_what_a_peer_reports_comes_back_to_it_with_its_next_round_and_is_in_the_status(
    swarm: Speakers,
) -> None:
    liar = swarm.peers[1]
    assert isinstance(liar, Speaker)
    liar.says = b"so so"
    while len(health(swarm).accepted) < 4:
        swarm.step()

    assert json.loads(swarm.hub.status(swarm.now))["health"] == {"p0": "well", "p1": "so so", "p2": "well"}
    ex = swarm.hub.rounds.exchange
    assert ex is not None
    bodies = {session.name: health(swarm).announce(ex, session) for session in swarm.hub.members}
    assert bodies == {"p0": WELL, "p1": b"so so", "p2": WELL}
    assert swarm.settle(20_000).finished


def test_the_halves_of_an_extension_meet_in_the_handshake_and_talk_beside_the_rounds(swarm: Speakers) -> None:
    peer = swarm.peers[0]
    heard = list[bytes]()
    swarm.chat(peer)
    assert peer.state.welcome is not None
    assert peer.state.welcome.extra == {"health": b"welcome as ever"}
    peer.say([messages.Extension("health", b"so so")])
    swarm.chat(peer)
    peer.state.listen({"health": heard.append})
    assert heard == [b"heard so so"], "what came before it listened is not lost"
    peer.say([messages.Extension("health", WELL)])
    swarm.chat(peer)

    assert heard == [b"heard so so", b"heard well"]
    assert health(swarm).said["p0"] == WELL


@pytest.mark.parametrize("said", [("health", UNREADABLE), ("another", WELL), ("", WELL)])
def test_what_the_hub_cannot_read_or_knows_no_extension_for_is_ignored_and_counted(
    swarm: Speakers, said: tuple[str, bytes]
) -> None:
    swarm.chat(swarm.peers[0])
    swarm.peers[0].say([messages.Extension(*said)])
    swarm.chat(swarm.peers[0])

    assert swarm.hub.members.ignored == 1
    assert health(swarm).said["p0"] == b"as ever"
    assert swarm.settle(20_000).finished


def test_a_hello_whose_body_cannot_be_read_begins_a_session(swarm: Speakers) -> None:
    peer = swarm.new_peer("p3")
    peer.state.hello = replace(peer.state.hello, extra={"health": UNREADABLE})
    swarm.peers.append(peer)
    peer.dial()
    swarm.chat(peer)

    assert swarm.hub.members.ignored == 1
    assert peer.state.welcome is not None
    assert peer.state.welcome.extra == {"health": b"welcome "}
    assert swarm.settle(20_000).finished


def test_a_restarted_hub_hears_again_what_peers_have_said_of_themselves(swarm: Speakers) -> None:
    while len(health(swarm).accepted) < 2:
        swarm.step()
    swarm.restart_hub()
    assert health(swarm).said == {}
    for peer in swarm.peers:
        peer.dial()
        swarm.chat(peer)

    assert health(swarm).said.keys() == {"p0", "p1", "p2"}
    assert swarm.settle(20_000).finished


def test_a_peer_ignores_and_counts_what_it_cannot_read_or_does_not_know(swarm: Speakers) -> None:
    state = swarm.peers[0].state
    swarm.chat(swarm.peers[0])
    state.listen({"health": readable})
    for name, body in (("health", UNREADABLE), ("another", WELL)):
        state.receive(messages.Extension(name, body), swarm.now)

    assert state.ignored == 2


def test_whom_an_extension_lets_have_no_lease_is_in_no_round_until_it_does(swarm: Speakers) -> None:
    found = health(swarm)
    found.unwell = {"p1"}
    while len(found.accepted) < 5:
        swarm.step()
    assert set().union(*found.leased[2:]) == {"p0", "p2"}
    found.unwell.clear()

    assert swarm.settle(20_000).finished
    assert "p1" in set().union(*found.leased)
    assert sorted(swarm.trained) == list(range(200))


def test_a_run_whose_peers_all_get_no_lease_says_why_and_ends(swarm: Speakers) -> None:
    health(swarm).unwell = {"p0", "p1", "p2"}
    ended = swarm.settle(20_000)

    why = "p0 (it is unwell), p1 (it is unwell), p2 (it is unwell)"
    assert (ended.finished, ended.exit_code) == (False, 7)
    assert ended.reason == f"0 peers were ready, 1 needed, for 300 s: {why}"
    warned = [event.message for event in swarm.events if isinstance(event, events.Warned)]
    assert warned == [f"waiting for 1 peer: {why}"]


def test_whose_update_an_extension_refuses_reads_why_and_is_struck_out(swarm: Speakers) -> None:
    liar = swarm.peers[2]
    assert isinstance(liar, Speaker)
    liar.says = b"I lie"

    assert swarm.settle(20_000).finished
    refusals = [one.refused["p2"] for one in liar.state.commits.values() if "p2" in one.refused]
    assert set(refusals) == {"it says that it lies"}
    assert {e.peer for e in swarm.events if isinstance(e, events.PeerLeft) and e.how == "removed"} == {"p2"}
    assert all("p2" not in accepted for accepted in health(swarm).accepted)


def test_what_an_extension_tells_of_a_round_follows_the_rounds_event_which_has_its_fields(
    swarm: Speakers,
) -> None:
    assert swarm.settle(20_000).finished
    rounds = [
        event for event in swarm.events if isinstance(event, events.RoundCommitted | events.OfExtension)
    ]

    assert len(rounds) == 2 * len(health(swarm).accepted)
    for number, (committed, of) in enumerate(zip(rounds[::2], rounds[1::2], strict=True)):
        assert isinstance(committed, events.RoundCommitted)
        assert committed.extra == {"rounds": number + 1}
        assert isinstance(of, events.OfExtension)
        assert of.told == f"round {committed.round}"


def test_an_extension_hears_each_report_before_its_packet_and_those_that_come_too_late(
    swarm: Speakers,
) -> None:
    found, late = health(swarm), swarm.peers[2]
    while len(found.accepted) < 4:
        swarm.step()
    opened = found.reports[-1][1] + 1
    while swarm.hub.rounds.round <= opened:  # p2 says nothing in this one
        before, swarm.peers = swarm.fingerprint(), swarm.peers[:2]
        swarm.step()
        if swarm.fingerprint() == before:
            swarm.pass_time(1.0)
    swarm.peers = [*swarm.peers[:2], late]
    heard = len(found.reports)
    while "p2" not in [name for name, *_ in found.reports[heard:]]:
        swarm.step()

    assert {name for name, round, _ in found.reports[:heard] if round == opened} == {"p0", "p1"}
    name, round, _ = next(one for one in found.reports[heard:] if one[0] == "p2")
    assert (name, round) == ("p2", opened)
    assert swarm.settle(20_000).finished


def test_an_extension_that_overrides_nothing_changes_nothing() -> None:
    """No message of its run has a body, and its status has no figures."""
    ended = []
    for extensions in ([], [lambda hub: HubExtension()]):
        swarm = SimSwarm(1, extensions=extensions)
        for _ in range(2):
            swarm.join()
        swarm.settle(20_000)
        ended.append((swarm.events, json.loads(swarm.hub.status(swarm.now))))

    assert ended[0] == ended[1]


@pytest.mark.parametrize(
    ("dialled", "address"), [(True, "10.0.0.1:29500"), (True, ""), (False, "10.0.0.1:2")]
)
def test_what_peers_reach_each_other_for_begins_with_the_first_that_others_may_reach(
    dialled: bool, address: str
) -> None:
    """And the hub then tries that address, as the extension dials."""

    class Dialling(HubExtension):
        name, dials = "dialling", True

    swarm = SimSwarm(1, extensions=[Late("dialling", lambda hub: Dialling(), dialled)])
    for at in ("", address):
        peer = SimPeer(swarm, f"p{len(swarm.peers)}", swarm.staleness)
        peer.state.hello = replace(peer.state.hello, address=at)
        swarm.peers.append(peer)
        peer.dial()
        assert swarm.hub.rounds.extensions == []
        swarm.chat(peer)

    begun = [type(one) for one in swarm.hub.rounds.extensions]
    assert begun == ([Dialling] if dialled and address else [])
    assert [session.dialled for session in swarm.hub.members] == [False, bool(begun)]
