"""A packet that cannot be used is a strike against its sender's key, and the third one bans it."""

from pathlib import Path

from sim_swarm import STOP, TOKEN, SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport import actions as do
from transport.hub import HubState
from transport.ledger import KnownPeer, Ledger, Recovered
from transport.membership import STRIKES
from transport.protocol import events, messages


def told(swarm: SimSwarm, kind: type[events.Event]) -> list[events.Event]:
    return [e for e in swarm.events if isinstance(e, kind)]


def lies(swarm: SimSwarm, times: int) -> SimPeer:
    """A peer called eve whose packets cannot be used, until so many were found out."""
    eve, before = swarm.join("eve"), struck(swarm)
    swarm.reject = "eve"
    for _ in range(300):
        swarm.step()
        if struck(swarm) == before + times:
            break
    assert struck(swarm) == before + times
    return eve


def struck(swarm: SimSwarm) -> int:
    """Count the strikes of eve."""
    known = swarm.hub.admission.known.get("eve")
    return known.strikes if known is not None else 0


def test_strikes_belong_to_a_key_over_sessions_and_those_of_a_member_over_restarts() -> None:
    swarm = SimSwarm(settings=toy_settings(samples=4000))
    swarm.join("ann")
    honest = swarm.join("eve")
    while "eve" not in swarm.books.peers:
        swarm.step()
    swarm.leave(honest)
    swarm.step()
    swarm.kill(honest)
    first = lies(swarm, 1)
    swarm.leave(first)
    swarm.step()
    swarm.kill(first)
    swarm.kill(lies(swarm, 1))
    for _ in range(20):
        swarm.job()
    assert swarm.books.peers["eve"].strikes == STRIKES - 1
    swarm.restart_hub()
    third = lies(swarm, 1)
    for _ in range(20):
        swarm.step()

    assert third.state.refused is not None
    assert third.state.refused.reason == "3 unusable packets, the last: unusable"
    assert (swarm.books.peers["eve"].standing, swarm.books.peers["eve"].strikes) == ("banned", 3)
    assert swarm.join("eve").key == "eve"
    swarm.step()
    assert swarm.peers[-1].state.refused is not None, "another session is no new beginning"


def test_the_host_forgives_by_lifting_the_ban() -> None:
    known = KnownPeer("eve", "eve", "banned", "3 unusable packets", 3)
    hub = HubState(toy_settings(), TOKEN, STOP, 0.0, Recovered(peers=(known,)))
    hub.receive(b"host.1", messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", "unban", "eve"), 1.0)
    said = hub.receive(b"eve.2", messages.Hello(messages.PROTOCOL, TOKEN, "toy-run", "eve"), 2.0)

    assert any(isinstance(a, do.Send) and isinstance(a.message, messages.Welcome) for a in said)
    assert hub.admission.known["eve"].strikes == 0


def test_a_strike_does_not_readmit_a_kicked_peer() -> None:
    hub = HubState(toy_settings(), TOKEN, STOP, 0.0, Recovered(peers=(KnownPeer("eve", "eve", "banned"),)))

    assert not hub.admission.strike("eve", "eve", "why")
    assert not hub.admission.strike("bob", "bob", "why")
    assert set(hub.admission.known) == {"eve"}


def test_a_ledger_stores_strikes(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy-run", samples=4) as ledger:
        ledger.stand(KnownPeer("eve", "eve", "member", "", 2))
    with Ledger(tmp_path, run="toy-run", samples=4) as ledger:
        assert ledger.recover().peers == (KnownPeer("eve", "eve", "member", "", 2),)
