"""A peer is its CURVE key: what it was given is of no use to anybody else."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from sim_swarm import SimSwarm
from toy_swarm import ToyWork, toy_settings

from transport import PeerLink, RunURL
from transport.actions import Outbox
from transport.membership import Roster
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, decode_to_peer, encode, messages, short_key
from transport.wire import Connected, DealerWire, Received, routes_to


@pytest.fixture
def url(tmp_path: Path) -> Iterator[RunURL]:
    with HubSwarm(toy_settings(), ToyWork(), tmp_path, 0) as swarm:
        yield swarm.url


def answer_to(url: RunURL, message: messages.Message, keys: CurveKeys) -> messages.ToPeer:
    """Return the hub's answer to a message on a new connection with these keys."""
    wire, end = DealerWire(routes_to(url), url.key, keys), time.monotonic() + 5.0
    try:
        wire.dial(0)
        while time.monotonic() < end:
            for event in wire.poll(0.05):
                if isinstance(event, Connected):
                    wire.send(0, [encode(message)])
                elif isinstance(event, Received):
                    return decode_to_peer(event.frames[0])
        raise TimeoutError
    finally:
        wire.close()


def test_a_stolen_session_is_of_no_use_without_its_key(url: RunURL) -> None:
    keys, thief = CurveKeys.generate(), CurveKeys.generate()
    link = PeerLink(url, PeerIdentity("ann", keys=keys))
    session = link.connect().session
    resume = messages.Resume(messages.PROTOCOL, url.run, "ann", session)

    for message in (resume, messages.Attach(session)):
        refused = answer_to(url, message, thief)
        assert isinstance(refused, messages.Refused)
        assert refused.code == "session"
    assert isinstance(answer_to(url, resume, keys), messages.Welcome)
    link.close()


def test_messages_on_another_keys_connection_are_not_the_peers() -> None:
    swarm = SimSwarm()
    ann = swarm.join("ann")
    swarm.step()
    assert ann.cable is not None
    of_mallory = ann.cable.name.replace(b"ann", b"mallory")
    swarm.act(swarm.hub.receive(of_mallory, messages.Leave("bye"), swarm.now))

    assert [s.name for s in swarm.hub.members] == ["ann"]


@pytest.mark.parametrize(("key", "name"), [("ann", "ann"), ("mallory", "ann-2")])
def test_a_lost_session_is_ended_by_its_own_peer_alone(key: str, name: str) -> None:
    swarm = SimSwarm()
    ann = swarm.join("ann")
    swarm.step()
    swarm.kill(ann)
    again = swarm.join("ann", key)
    swarm.step()

    assert again.state.welcome is not None
    assert again.state.welcome.name == name


def test_a_session_belongs_to_its_key_after_the_hub_was_restarted_too() -> None:
    swarm = SimSwarm()
    ann = swarm.join("ann")
    for _ in range(5):
        swarm.step()
    swarm.restart_hub()
    ann.key = "mallory"
    swarm.step()

    assert ann.state.sessions == 2, "it is a new peer to this hub"
    assert {s.key for s in swarm.hub.members} == {"ann", "mallory"}


def test_a_key_is_shown_as_sixteen_digits() -> None:
    ann, bob = CurveKeys.generate(), CurveKeys.generate()

    assert short_key(ann.public) != short_key(bob.public)
    assert len(short_key(ann.public)) == 16


@pytest.mark.parametrize(("alone", "named"), [(True, "ann"), (False, "ann-2")])
def test_a_lost_session_ends_when_its_peer_returns_but_not_for_a_second_peer(alone: bool, named: str) -> None:
    """A restarted hub hears first from another peer than the one whose session it remembers."""
    members = Roster(toy_settings(), Outbox(), lambda _: 0, 0.0)
    hello = messages.Hello(messages.PROTOCOL, "token", "toy-run", "ann", alone=alone)
    members.begin(b"key.1", hello, 0.0)
    members.lost(b"key.1", 1.0)

    assert members.begin(b"key.2", hello, 1.0).name == named
    assert len(members.sessions) == (1 if alone else 2)
