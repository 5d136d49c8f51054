"""Two hubs of one run: the one that was started later is the hub, the other is told so and ignored."""

import shutil
import time
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from memory_sockets import MemoryPeerWire
from test_peer_state import joined
from toy_swarm import ToyPeer, ToyWork, toy_settings
from waiting import until

from transport import Ledger, PeerLink
from transport.actions import Send
from transport.hub import HubState
from transport.ledger import KnownPeer, Recovered
from transport.peer import LinkLimits, PeerIdentity, SessionState
from transport.protocol import LinkLost, RoundCommitted, Warned, events, messages


def of_term(term: int, session: str = "s1") -> messages.Welcome:
    return messages.Welcome(messages.PROTOCOL, "run", "ann", session, "{}", "00", [], 0, 1.0, True, term)


def test_each_opening_for_writing_is_a_term(tmp_path: Path) -> None:
    terms = []
    for write in (True, False, True, False):
        with Ledger(tmp_path, run="run", samples=1, write=write) as ledger:
            terms.append((ledger.term, ledger.recover().term))

    assert terms == [(1, 1), (1, 1), (2, 2), (2, 2)]


def test_a_welcome_of_a_lower_term_is_ignored_and_the_peer_dials_again() -> None:
    state = joined()
    state.disconnected()
    state.connected(1.0)
    state.receive(of_term(3), 1.1)
    state.disconnected()
    (resume,) = state.connected(2.0)
    state.receive(of_term(2, "other"), 2.1)

    assert isinstance(resume, messages.Resume)
    assert resume.term == 3
    assert (state.link, state.replaced) == (SessionState.OFFLINE, "it is of term 2, the newest met is 3")
    assert state.welcome == of_term(3)
    state.connected(3.0)
    state.receive(of_term(4), 3.1)
    assert (state.link, state.replaced, state.term) == (SessionState.JOINED, "", 4)


def test_a_hub_that_is_shown_a_higher_term_warns_once_and_gives_no_session() -> None:
    """A session's secret proves the term of the hub that gave it, to a hub of the same host."""
    ann = KnownPeer("key-of-ann", "ann", "member")
    newer = HubState(toy_settings(), "token", "secret", 0.0, Recovered(term=3, peers=(ann,)))
    hub = HubState(toy_settings(), "token", "secret", 0.0, Recovered(term=2, peers=(ann,)))
    newer.receive(b"key-of-ann.1", messages.Hello(messages.PROTOCOL, "token", "toy-run", "ann"), 1.0)
    (session,) = newer.members.sessions
    said = messages.Resume(messages.PROTOCOL, "toy-run", "ann", session, -1, True, [], 3)
    actions = [action for _ in range(2) for action in hub.receive(b"key-of-ann.1", said, 1.0)]
    warned = [a.event for a in actions if isinstance(getattr(a, "event", None), Warned)]
    sent = [a.message for a in actions if hasattr(a, "message")]

    assert len(warned) == 1
    assert "another hub of this run has been started since (term 3, this one is of term 2)" in str(warned[0])
    assert {m.code for m in sent if isinstance(m, messages.Refused)} == {"term"}
    assert not hub.members.sessions
    assert hub.receive(b"d", messages.Hello(messages.PROTOCOL, "token", "toy-run", "bob"), 2.0), (
        "who has met no other is taken"
    )


@pytest.mark.parametrize("term", [3, 2**40])
@pytest.mark.parametrize("who", [b"eve.1", b"key-of-ann.1"])
def test_a_term_that_nobody_has_given_causes_no_warning(who: bytes, term: int) -> None:
    """Also one that a member claims, with the secret of a session that it has of this very hub."""
    ann = KnownPeer("key-of-ann", "ann", "member")
    hub = HubState(toy_settings(), "token", "secret", 0.0, Recovered(term=2, peers=(ann,)))
    hub.receive(who, messages.Hello(messages.PROTOCOL, "token", "toy-run", "ann"), 1.0)
    (session,) = hub.members.sessions
    said = hub.receive(
        who, messages.Resume(messages.PROTOCOL, "toy-run", "ann", session, -1, True, [], term), 1.0
    )

    assert [
        a.message.code for a in said if isinstance(a, Send) and isinstance(a.message, messages.Refused)
    ] == ["term"]
    assert not any(isinstance(getattr(a, "event", None), Warned) for a in said)
    assert not hub.handshake.replaced


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.peer.connection_manager.LAST_RETRY", 0.1)
    monkeypatch.setattr("transport.peer.peer_link.LOST_S", 0.05)


def test_of_two_hubs_on_copies_of_one_ledger_the_older_is_ignored_and_told_so(
    tmp_path: Path, quick: None
) -> None:
    settings = toy_settings(samples=4000, grace_s=10.0, linger_s=0.1)
    with Ledger(tmp_path / "old", run=settings.run, samples=settings.samples) as ledger:
        ledger.stand(KnownPeer("a-key", "ann", "member"))
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    Ledger(tmp_path / "new", run=settings.run, samples=settings.samples).close()  # one term more
    with (
        HubSwarm(settings, ToyWork(), tmp_path / "old") as old,
        HubSwarm(settings, ToyWork(), tmp_path / "new") as new,
    ):
        said: list[str] = []
        old.hub._state.admission.token = new.hub._state.admission.token  # the keys of one run
        old.hub._state.handshake.secret = new.hub._state.handshake.secret
        wire = MemoryPeerWire(new.wire)
        link = PeerLink(new.url, PeerIdentity("ann"), LinkLimits(flows=1), wire=wire, notify=said.append)
        toy = ToyPeer(link, before_exchange=lambda _: time.sleep(0.01))
        thread = toy.start()
        until(lambda: any(isinstance(e, RoundCommitted) for e in new.events))
        wire.hub = old.wire  # a name that points to the wrong machine, say
        wire.cut(0)
        wire.cut(1)
        until(lambda: any("is ignored" in line for line in said))
        wire.hub = new.wire
        until(lambda: "connected to" in said[-1])
        before = sum(isinstance(e, RoundCommitted) for e in new.events)
        until(lambda: sum(isinstance(e, RoundCommitted) for e in new.events) > before)
        link.leave_requested.set()
        thread.join(120)

    assert (new.ledger.term, old.ledger.term) == (3, 2)
    assert sum("is ignored: another hub of this run has been started since" in line for line in said) == 1
    warnings = [e.message for e in old.events if isinstance(e, Warned)]
    assert ["(term 3, this one is of term 2)" in w for w in warnings] == [True], warnings
    assert not any(isinstance(e, events.PeerJoined | RoundCommitted) for e in old.events)
    assert toy.error is None


def test_a_peer_that_only_finds_the_old_hub_gives_up_with_the_reason(tmp_path: Path, quick: None) -> None:
    settings = toy_settings(linger_s=0.1)
    with HubSwarm(settings, ToyWork(), tmp_path) as swarm:
        wire = MemoryPeerWire(swarm.wire)
        link = PeerLink(swarm.url, PeerIdentity("ann"), LinkLimits(flows=1, patience=0.5), wire=wire)
        link.connect(30.0)
        swarm.hub._state.handshake.term = 0
        wire.cut(0)
        with pytest.raises(LinkLost, match="another hub of this run has been started since"):
            link.next_round()
        link.close()
