import io
import json
import threading
import time
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from toy_swarm import PLENTY, ToyPeer, ToyWork, toy_fingerprint, toy_settings, trained
from waiting import until

from transport import Ledger, PeerLink
from transport.ledger import read_packets
from transport.peer import LinkLimits
from transport.protocol import (
    Leaving,
    LinkLost,
    RefusedByHub,
    RoundCommitted,
    SessionRenewed,
    events,
    messages,
)

QUICK = {"ping_s": 0.02, "grace_s": 0.1}


def away_for_too_long(swarm: HubSwarm, link: PeerLink) -> None:
    """The link's connections end, and it cannot dial before the hub has given its session up."""
    wire = swarm.wires[link]
    dial, away = wire.dial, threading.Event()
    wire.dial = lambda flow: dial(flow) if not away.is_set() else wire.inbox.put((flow, b"", None))  # type: ignore[method-assign]
    away.set()
    for flow in (0, 1):
        wire.cut(flow)
    until(lambda: any(isinstance(e, events.PeerLeft) for e in swarm.events))
    away.clear()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("peers", [1, 3])
def test_a_run_counts_every_sample_once(tmp_path: Path, staleness: int, peers: int) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(min_peers=peers, eval=True, eval_every=2), work, tmp_path) as swarm:
        all_of_them = [ToyPeer(swarm.link(f"p{i}"), staleness) for i in range(peers)]
        swarm.train(*all_of_them)

    assert trained(work) == list(range(40))
    assert all(peer.packets == work.packets for peer in all_of_them)
    evaluations = [e for e in swarm.events if isinstance(e, events.EvaluationDone)]
    assert [e.step for e in evaluations] == [0, 2, 4, 5]
    assert [e.final for e in evaluations] == [False, False, False, True]
    with Ledger(tmp_path, write=False) as ledger:
        assert ledger.verify(complete=True).missing == 0
        assert [p for _, p in ledger.packets()] == work.packets


def test_the_weights_are_the_tokens_of_what_is_delivered(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(min_peers=2), work, tmp_path) as swarm:
        swarm.train(*(ToyPeer(swarm.link(name), 1) for name in ("ann", "bob")))
    rounds = [[w for _, _, w in json.loads(p)[1]] for p in work.packets]

    assert rounds[0] == [1.0, 1.0], "nothing trained yet: equal"
    assert rounds[1:] == [[40.0, 40.0]] * 5


def test_a_late_joiner_catches_up_from_the_log_and_takes_part(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(samples=400), work, tmp_path) as swarm:
        first = ToyPeer(swarm.link("ann"))
        first.before_exchange = lambda _: time.sleep(0.001)
        first.start()
        until(lambda: len(work.packets) >= 8)
        late = ToyPeer(swarm.link("bob"))
        log = swarm.link("reader")
        log.connect()
        records = log.fetch("packets/2-6", PLENTY)
        assert isinstance(records, bytes)
        assert list(read_packets(io.BytesIO(records))) == list(enumerate(work.packets))[2:6]
        with pytest.raises(KeyError, match="rounds 0-999 are not committed"):
            log.fetch("packets/0-999", PLENTY)
        log.leave("read enough")
        swarm.train(first, late)

    assert late.rounds[0] >= 8
    assert late.packets == first.packets == work.packets
    assert trained(work) == list(range(400))


def test_connections_that_are_cut_at_any_time_cost_nothing(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(samples=400, **(QUICK | {"grace_s": 5.0})), work, tmp_path) as swarm:
        peers = [ToyPeer(swarm.link(name, LinkLimits(patience=10.0, flows=2))) for name in ("ann", "bob")]
        for peer in peers:
            peer.start()
        for i in range(40):
            time.sleep(0.003)
            swarm.wires[peers[i % 2].link].cut(i % 3)
        swarm.train(*peers)

    assert [(peer.error, peer.renewed) for peer in peers] == [(None, 0)] * 2
    assert trained(work) == list(range(400))


def test_a_peer_dropped_while_away_goes_on_in_a_new_session(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(samples=160, **QUICK), work, tmp_path) as swarm:
        peer = ToyPeer(swarm.link("ann"))
        peer.start()
        until(lambda: len(work.packets) >= 3)
        away_for_too_long(swarm, peer.link)
        swarm.train(peer)

    assert (peer.error, peer.renewed) == (None, 1)
    assert trained(work) == list(range(160))


def test_a_leave_ends_a_wait_at_once(tmp_path: Path) -> None:
    with HubSwarm(toy_settings(), ToyWork(), tmp_path) as swarm:
        link = swarm.link("ann")
        link.connect()
        timer = threading.Timer(0.05, link.leave_requested.set)
        timer.start()
        started = time.monotonic()

        assert link.next_round() == messages.Over("asked to leave", False)
        assert time.monotonic() - started < 10.0
        with pytest.raises(Leaving, match="while waiting for the object eval"):
            link.fetch("eval", PLENTY)
        link.leave("bye")


def test_a_hub_that_never_comes_back_is_given_up_after_the_patience(tmp_path: Path) -> None:
    with HubSwarm(toy_settings(linger_s=0.0), ToyWork(), tmp_path) as swarm:
        link = swarm.link("ann", LinkLimits(patience=0.2, flows=1))
        link.connect()
        swarm.wire.close()

        with pytest.raises(LinkLost, match="has not answered for 0 s"):
            link.next_round()


def test_an_update_that_is_too_large_puts_its_sender_out(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(max_update=1000), work, tmp_path) as swarm:
        link = swarm.link("ann")
        link.connect()
        link.ready(0, work.fingerprint(0))
        opened = link.next_round()
        assert isinstance(opened, messages.Round)
        with pytest.raises(RefusedByHub, match="2000 bytes, the limit of this run is 1000"):
            link.exchange(0, b"x" * 2000, messages.Report(0, work.fingerprint(0), []))


def test_a_packet_that_cannot_be_used_puts_its_sender_out(tmp_path: Path) -> None:
    work = ToyWork(reject="bob")
    with HubSwarm(toy_settings(min_peers=1, first_peers=2, samples=80), work, tmp_path) as swarm:
        ann, bob = ToyPeer(swarm.link("ann")), ToyPeer(swarm.link("bob"))
        swarm.train(ann, bob)

    assert isinstance(bob.error, RefusedByHub)
    assert bob.error.code == "kicked"
    assert str(bob.error) == "3 unusable packets, the last: not a packet"
    assert bob.refused == ["not a packet"] * 2
    assert swarm.left("bob") == [str(bob.error)], "its own words are the hub's"
    assert trained(work) == list(range(80))


def test_what_goes_wrong_in_the_owners_work_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    class Broken(ToyWork):
        def tokens(self, ids: object) -> int:
            raise ZeroDivisionError("the owner's bug")

    class Full(ToyWork):
        def tokens(self, ids: object) -> int:
            raise OSError(28, "No space left on device")

    for work, code, reason in ((Broken(), 1, "ZeroDivisionError"), (Full(), 8, "the hub's disk is full")):
        with HubSwarm(toy_settings(), work, tmp_path / str(code)) as swarm:
            peer = ToyPeer(swarm.link("ann"))
            swarm.train(peer)
            ended = swarm.events[-1]

        assert ended.exit_code == code  # type: ignore[attr-defined]
        assert ended.reason.startswith(reason)  # type: ignore[attr-defined]
        assert peer.over is not None
        assert not peer.over.finished


def test_a_round_costs_a_few_milliseconds(tmp_path: Path) -> None:
    with HubSwarm(toy_settings(samples=400), ToyWork(), tmp_path) as swarm:
        swarm.train(ToyPeer(swarm.link("ann")))
    quickest = min(e.seconds for e in swarm.events if isinstance(e, RoundCommitted))

    assert quickest < 0.1


def test_several_threads_may_use_one_link(tmp_path: Path) -> None:
    work = ToyWork(objects={f"base/{i}": bytes([i]) * 300_000 for i in range(4)})
    with HubSwarm(toy_settings(), work, tmp_path) as swarm:
        link: PeerLink = swarm.link("ann")
        link.connect()
        got: list[object] = []
        threads = [
            threading.Thread(target=lambda n=n: got.append((n, link.fetch(f"base/{n % 4}", PLENTY))))
            for n in range(8)  # type: ignore[misc]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        link.leave("done")

    assert sorted(n for n, _ in got) == list(range(8))  # type: ignore[misc]
    assert all(data == bytes([n % 4]) * 300_000 for n, data in got)  # type: ignore[misc]


def test_a_packet_that_delivers_no_work_is_left_with_its_sender(tmp_path: Path) -> None:
    """Its weight would be 0, and what is in it lost: it is not accepted, and its sender offers it again."""
    work = ToyWork()
    with HubSwarm(toy_settings(min_peers=2, samples=8, global_batch=1), work, tmp_path) as swarm:
        swarm.train(*[ToyPeer(swarm.link(name), 0) for name in ("ann", "bob")])
    commits = [e for e in swarm.events if isinstance(e, RoundCommitted)]

    assert len(commits) == 8
    assert all(len(commit.accepted) == 1 < len(commit.members) for commit in commits)
    assert {name for commit in commits for name in commit.accepted} == {"ann", "bob"}


def test_the_first_round_waits_for_those_who_start_with_the_run(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(first_peers=2), work, tmp_path) as swarm:
        ann, bob = (ToyPeer(swarm.link(name)) for name in ("ann", "bob"))
        ann.start()
        time.sleep(0.1)
        assert not [e for e in swarm.events if isinstance(e, RoundCommitted)]
        swarm.train(ann, bob)
    commits = [e for e in swarm.events if isinstance(e, RoundCommitted)]

    assert all(commit.members == ("ann", "bob") for commit in commits)


def test_the_first_round_waits_no_longer_than_it_should(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(first_peers=9, first_s=0.2), work, tmp_path) as swarm:
        swarm.train(ToyPeer(swarm.link("ann")))

    assert trained(work) == list(range(40))


def test_a_new_session_ends_every_call_that_waits_in_the_old_one(tmp_path: Path) -> None:
    """Also a second one, in another thread: nothing waits for what the old session was promised."""
    work = ToyWork()
    with HubSwarm(toy_settings(min_peers=9, **QUICK), work, tmp_path) as swarm:
        link = swarm.link("ann")
        link.connect(5.0)
        ends: list[type[BaseException]] = []

        def wait() -> None:
            try:
                link.next_round()
            except SessionRenewed as renewed:
                ends.append(type(renewed))

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        away_for_too_long(swarm, link)
        for thread in threads:
            thread.join(120)

        assert ends == [SessionRenewed, SessionRenewed]
        link.ready(0, work.fingerprint(0))
        swarm.events.clear()
        away_for_too_long(swarm, link)

        with pytest.raises(SessionRenewed):
            link.fetch("lease/0", PLENTY)
        with pytest.raises(SessionRenewed):  # no round would come before `ready`, whoever was told already
            link.next_round()
        with pytest.raises(SessionRenewed):  # nor is there a lease
            link.fetch("lease/0", PLENTY)


def test_a_lease_refused_before_the_end_of_its_session_is_told_ends_with_the_new_session(
    tmp_path: Path,
) -> None:
    """The hub ends the session; its answer about the lease overtakes that, on another connection."""
    with HubSwarm(toy_settings(min_peers=9, **QUICK), ToyWork(), tmp_path) as swarm:
        link = swarm.link("ann")
        link.connect(5.0)
        away = threading.Timer(0.05, away_for_too_long, (swarm, link))
        away.start()

        with pytest.raises(SessionRenewed):
            link.fetch("lease/0", PLENTY)
        away.join()


def test_a_lost_connection_is_told_and_not_waited_for_when_asked_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.peer.peer_link.LOST_S", 0.05)
    with HubSwarm(toy_settings(), ToyWork(), tmp_path) as swarm:
        told: list[str] = []
        link = swarm.link("ann")
        link._notify = told.append
        link.connect(5.0)
        link.ready(0, toy_fingerprint([]))
        assert isinstance(link.next_round(), messages.Round)
        swarm.wire.close()
        raised: list[BaseException] = []

        def exchange() -> None:
            try:
                link.exchange(0, b"[]", messages.Report(0, toy_fingerprint([]), []))
            except Leaving as leaving:
                raised.append(leaving)

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        until(lambda: told)
        link.leave_requested.set()
        thread.join(120)

    assert "is lost; dialling again" in told[0]
    assert len(raised) == 1, "an exchange with a hub that is not there is not in flight"
