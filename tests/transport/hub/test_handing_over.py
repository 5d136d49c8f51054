"""Handoffs of leavers: when the hub merges them, in which order, and that leaving ends in time."""

import contextlib
import json
import re
import threading
import time
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from toy_swarm import ToyPeer, ToyWork, toy_fingerprint, toy_settings
from waiting import until

from transport import Bandwidth, PeerLink
from transport.peer import LinkLimits
from transport.protocol import Leaving, RefusedByHub, RunOver, Warned, events, messages

START = toy_fingerprint([])


class Watched(ToyWork):
    """Delegate that records the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        super().inherit(peer, packet, share)
        self.order.append(f"inherit {peer}")

    def committed(self, round: int, packet: bytes) -> None:
        super().committed(round, packet)
        self.order.append(f"commit {round}")


class Leaver:
    """Peer that takes part step by step."""

    def __init__(self, link: PeerLink) -> None:
        self.link, self.ids = link, list[int]()
        link.connect(30.0)
        self.toy = ToyPeer(link)
        self.toy.join()

    def turn(self) -> int:
        """Take part in one round whose packet is accepted."""
        before = len(self.toy.rounds)
        self.toy.turn()
        assert len(self.toy.rounds) > before
        return self.toy.rounds[-1]

    def leave(self, packet: bytes, reason: str = "enough") -> bool | None:
        self.link.leave_requested.set()
        taken = self.link.hand_over(len(self.toy.packets), packet)
        self.link.leave(reason)
        return taken


def warnings(swarm: HubSwarm) -> list[tuple[str | None, str]]:
    return [(e.peer, e.message) for e in swarm.events if isinstance(e, Warned)]


def test_a_handoff_is_merged_before_the_next_round_with_the_share_the_peer_had(tmp_path: Path) -> None:
    """Two peers share seven samples: their weights differ and follow the hub's count, not their reports."""
    work = Watched()
    settings = toy_settings(min_peers=2, samples=40, global_batch=7)
    with HubSwarm(settings, work, tmp_path) as swarm:
        bob = ToyPeer(swarm.link("bob"))
        going = threading.Event()
        bob.before_exchange = lambda opened: opened.round < 3 or going.wait(120)  # type: ignore[arg-type,return-value]
        bob.start()
        ann = Leaver(swarm.link("ann"))
        for _ in range(3):
            ann.turn()
        weights = {peer: weight for peer, _, weight in json.loads(work.packets[2])[1]}
        assert ann.leave(b"residual") is True
        until(lambda: work.inherited)
        going.set()
        swarm.train(bob, ToyPeer(swarm.link("cat")))

    assert work.inherited == [("ann", b"residual", weights["ann"] / sum(weights.values()))]
    assert work.order.index("inherit ann") == 3, work.order
    left = next(e for e in swarm.events if isinstance(e, events.PeerLeft) and e.peer == "ann")
    assert (left.legacy, left.reason) == (8, "left: enough")


def test_a_session_hands_over_once_and_not_before_a_packet_was_accepted(tmp_path: Path) -> None:
    work = Watched()
    with HubSwarm(toy_settings(), work, tmp_path) as swarm:
        ann = Leaver(swarm.link("ann"))
        assert ann.link.hand_over(0, b"too early") is False
        for _ in range(2):
            ann.turn()
        assert ann.link.hand_over(2, b"once") is True
        assert ann.link.hand_over(2, b"twice") is False
        until(lambda: work.inherited)

    assert [packet for _, packet, _ in work.inherited] == [b"once"]


def test_a_handoff_beyond_the_limit_of_an_update_ends_its_session(tmp_path: Path) -> None:
    work = Watched()
    with HubSwarm(toy_settings(max_update=1000), work, tmp_path) as swarm:
        ann = Leaver(swarm.link("ann"))
        for _ in range(2):
            ann.turn()
        with contextlib.suppress(RefusedByHub):  # it may hear of that first
            assert ann.link.hand_over(2, bytes(1001)) is False
        with pytest.raises(RefusedByHub, match="1001 bytes, the limit of this run is 1000"):
            ann.turn()

    assert work.inherited == []


def test_a_malformed_handoff_is_reported_with_the_name_of_its_sender(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(), work, tmp_path) as swarm:
        mallory = Leaver(swarm.link("mallory"))
        for _ in range(2):
            mallory.turn()
        mallory.leave(b"bad")
        until(lambda: warnings(swarm))
        swarm.hub.stop(now=True)
        swarm.wait(120)

    assert work.inherited == []
    assert warnings(swarm) == [("mallory", "its handoff cannot be used: not a packet")]


def test_a_run_that_is_ending_refuses_handoffs(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(), work, tmp_path) as swarm:
        ann = Leaver(swarm.link("ann"))
        for _ in range(2):
            ann.turn()
        swarm.hub.stop(now=True)
        until(lambda: swarm.hub._state.rounds.ending)
        with contextlib.suppress(RunOver):  # it may hear of that first
            assert ann.leave(b"late") is not True
        swarm.wait(120)

    assert work.inherited == []


def test_a_handoff_in_transit_outlives_the_opening_of_a_round(tmp_path: Path) -> None:
    """The hub drops updates of closed rounds then; a handoff belongs to none."""
    work = Watched()
    with HubSwarm(toy_settings(samples=400), work, tmp_path) as swarm:
        limits = LinkLimits(patience=10.0, flows=1, bandwidth=Bandwidth(up=1_500_000.0))
        ann = Leaver(swarm.link("ann", limits))
        for _ in range(2):
            ann.turn()
        bob = ToyPeer(swarm.link("bob"))
        bob.before_exchange = lambda _: time.sleep(0.01)
        bob.start()
        rounds = len(work.packets)
        assert ann.leave(bytes(900_000)) is True
        until(lambda: work.inherited)
        swarm.hub.stop(now=True)
        swarm.wait(120)

    assert rounds < work.order.index("inherit ann"), "rounds went by meanwhile"


def test_leaving_ends_in_time_whatever_the_uplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MB at 20 kB/s would take 100 s: by the measured rate the peer gives up the upload."""
    monkeypatch.setattr("transport.peer.peer_link.HANDOFF_S", 0.6)
    work = ToyWork()
    with HubSwarm(toy_settings(max_update=1 << 23), work, tmp_path) as swarm:
        link = swarm.link("ann", LinkLimits(patience=10.0, flows=1, bandwidth=Bandwidth(up=20_000.0)))
        link.connect(30.0)
        link.ready(0, START)
        assert isinstance(link.next_round(), messages.Round)
        assert link.room == 0, "nothing is known of the uplink yet"
        packet = json.dumps([7] * 3000).encode()
        link.exchange(0, packet, messages.Report(0, START, []))
        link.leave_requested.set()
        began = time.monotonic()
        assert 0 < link.room < 100_000
        taken = link.hand_over(1, bytes(2_000_000))
        link.leave("enough", 0.3)

        assert time.monotonic() - began < 30.0
        assert taken is False
        swarm.hub.stop(now=True)
        swarm.wait(120)
    assert work.inherited == []


def test_a_hurried_leaver_has_a_share_of_the_time_and_a_link_that_said_goodbye_has_none(
    tmp_path: Path,
) -> None:
    with HubSwarm(toy_settings(max_update=1 << 23), ToyWork(), tmp_path) as swarm:
        link = swarm.link("ann", LinkLimits(patience=10.0, flows=1, bandwidth=Bandwidth(up=20_000.0)))
        link.connect(30.0)
        link.ready(0, START)
        assert isinstance(link.next_round(), messages.Round)
        link.exchange(0, json.dumps([7] * 3000).encode(), messages.Report(0, START, []))
        link.leave_requested.set()
        usual = link.room
        link.leave_requested.share = 0.1
        assert 0 < link.room < usual / 2

        link.leave("Ctrl-C", 0.3)
        assert link.room == 0
        with pytest.raises(Leaving):
            link.hand_over(1, b"too late")
        swarm.hub.stop(now=True)
        swarm.wait(120)


def test_a_machine_that_slept_is_told_so_once(tmp_path: Path) -> None:
    with HubSwarm(toy_settings(), ToyWork(), tmp_path) as swarm:
        told: list[str] = []
        link = swarm.link("ann")
        link._notify = told.append
        link.connect(30.0)
        link._connections._turned -= 61.0
        link.wait("a turn", lambda: bool(told), 10.0)
        link.wait("another", lambda: len(told) > 1, 0.2)
        link.leave("enough", 0.3)
        swarm.hub.stop(now=True)
        swarm.wait(120)

    assert [re.sub(r" 6\d s", " 6x s", one) for one in told] == ["this machine was away for 6x s"]
