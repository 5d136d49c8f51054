"""Peers that pass a run's packets on, over a whole hub in memory: bytes, agreement, and helpers that fail."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from toy_passing import SIZE, LargeWork, ToyPassingPeer, passing_peer, passing_settings, passing_swarm
from toy_swarm import trained

from cocktail_cli.extensions.passing import packet_sources, peer
from cocktail_cli.extensions.passing.peer import PassingPeer
from transport import PeerLink
from transport.direct import Fragment, PeerServer, Read, link_to
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, events, messages
from transport.wire import is_reachable


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no failing helper: one whose thread hears late of a round refuses its members."""
    monkeypatch.setattr("transport.direct.direct_links.DIAL_S", 20.0)
    monkeypatch.setattr(packet_sources, "STALL_S", 20.0)


def finish(swarm: HubSwarm, peers: list[ToyPassingPeer]) -> None:
    """Run to the end; every peer has the hub's packets, to the bit, and every sample is counted once."""
    swarm.train(*peers, seconds=60.0)
    work = swarm.work
    assert isinstance(work, LargeWork)
    assert [peer.error for peer in peers] == [None] * len(peers)
    assert all(peer.packets == work.packets for peer in peers)
    assert trained(work) == list(range(swarm.settings.samples))


def down(swarm: HubSwarm) -> float:
    """Packets that went over the hub's line in a round, messages and leases included."""
    return sum(link.bytes_down for link in swarm.links) / (SIZE * len(swarm.work.packets))  # type: ignore[attr-defined]


def warnings(swarm: HubSwarm) -> list[str]:
    return [e.message for e in swarm.events if isinstance(e, events.Warned)]


def test_with_one_helper_a_packet_leaves_the_hub_less_than_twice_for_eight_peers(tmp_path: Path) -> None:
    """Both counters agree: those of the peers' links, and the hub's own (protocol/traffic.py)."""
    with passing_swarm(passing_settings(min_peers=8, first_peers=8), LargeWork(), tmp_path) as swarm:
        peers = [passing_peer(swarm, f"p{i}", reachable=i == 3) for i in range(8)]
        finish(swarm, peers)
        commits = [e for e in swarm.events if isinstance(e, events.RoundCommitted)]
        by_hub = sum(sum(e.down.values()) for e in commits) / (SIZE * (len(commits) - 1))

        assert down(swarm) <= 2.0
        assert by_hub <= 2.0
        assert all(len(peer.passed) == len(peer.packets) for peer in peers)


def test_where_all_peers_help_a_packet_leaves_the_hub_once(tmp_path: Path) -> None:
    """Each of the four sends three quarters of it."""
    with passing_swarm(passing_settings(min_peers=4, first_peers=4), LargeWork(), tmp_path) as swarm:
        peers = [passing_peer(swarm, f"p{i}", reachable=True) for i in range(4)]
        finish(swarm, peers)
        sent = [peer.server.bytes_up / (SIZE * len(peer.packets)) for peer in peers if peer.server]

        assert down(swarm) <= 1.1
        assert max(sent) <= 0.8


class Liar(PeerServer):
    """Turns over a bit of each chunk."""

    def serve(self, prefix: str, read: Read, *groups: str) -> None:
        def turned(guest: str, m: messages.Get) -> Fragment | None:
            true = read(guest, m)
            return true and replace(true, payload=bytes([true.payload[0] ^ 1, *true.payload[1:]]))

        super().serve(prefix, turned, *groups)


class Silent(PeerServer):
    """Accepts every request, and answers none."""

    def serve(self, prefix: str, read: Read, *groups: str) -> None:
        super().serve(prefix, lambda guest, m: None, *groups)


class Dying(PeerServer):
    """Dies in the middle of a packet, as a process does."""

    served = 0

    def _send(self, conn: bytes, message: messages.Message, payload: object = None) -> None:
        self.served += isinstance(message, messages.Data)
        if self.served > 2:
            self._closing = True
            self._wire.close()
        else:
            super()._send(conn, message, payload)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [Liar, Silent, Dying])
def test_a_helper_that_fails_costs_no_round_and_no_fork(
    bad: type[PeerServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub says so, and takes the role from who tampers, says nothing, or dies within a packet.

    A second is long enough for a helper that waits for a core not to be taken for one that fails.
    """
    monkeypatch.setattr("transport.direct.direct_links.DIAL_S", 2.0)
    monkeypatch.setattr(packet_sources, "FIRST_S", 1.0)
    monkeypatch.setattr(peer, "FINISH_S", 1.0)
    monkeypatch.setattr(packet_sources, "STALL_S", 1.0)
    with passing_swarm(passing_settings(min_peers=3, first_peers=3), LargeWork(), tmp_path) as swarm:
        peers = [
            passing_peer(swarm, "bad", reachable=True, server=bad),
            passing_peer(swarm, "good", reachable=True),
            passing_peer(swarm, "ann"),
        ]
        began = time.monotonic()
        finish(swarm, peers)

        commits = [e for e in swarm.events if isinstance(e, events.RoundCommitted)]
        assert all(len(e.accepted) == 3 for e in commits), "every peer is in every round"
        assert any("passes no packets on any more" in said for said in warnings(swarm))
        assert time.monotonic() - began < 60.0
        assert peers[1].server is not None
        assert peers[1].server.bytes_up > SIZE, "the other goes on"


def test_a_run_without_helpers_says_what_it_said_before(tmp_path: Path) -> None:
    """No peer can be reached, so no source is named."""
    with passing_swarm(passing_settings(min_peers=2, first_peers=2), LargeWork(), tmp_path) as swarm:
        peers = [passing_peer(swarm, name) for name in ("ann", "bob")]
        finish(swarm, peers)

        assert json.loads(swarm.hub._state.status(0.0))["passing"] is False
        assert all(peer.passed == [] for peer in peers)
        assert 2.0 <= down(swarm) <= 2.2


def test_packets_are_passed_on_over_sockets_to_members_alone(tmp_path: Path) -> None:
    """The port of a peer admits the keys that the hub names, and a stranger not even to its greeting."""
    running = passing_swarm(passing_settings(min_peers=2, first_peers=2), LargeWork(), tmp_path, 0).start()
    peers, reached = [], []
    for name in ("ann", "bob"):
        keys = CurveKeys.generate()
        server, port = PeerServer.open(("127.0.0.1", 0), keys, running.url)
        identity = PeerIdentity(name, keys=keys, reachable=f"127.0.0.1:{port}")
        link = PeerLink(running.url, identity if name == "ann" else PeerIdentity(name, keys=keys))
        peers.append(
            ToyPassingPeer(link, half=PassingPeer(link, partial(link_to, link, keys), server), server=server)
        )
        reached.append((identity.reachable, keys.public))
    threads = [peer.start() for peer in peers]
    running.until(lambda: peers[1].passed)
    assert not is_reachable(*reached[0], CurveKeys.generate(), 0.3)
    for thread in threads:
        thread.join(120)
    running.close()

    assert [peer.error for peer in peers] == [None, None]
    assert peers[0].packets == peers[1].packets == running.work.packets
    assert peers[1].passed == list(range(len(peers[1].packets)))
    assert peers[0].server is not None
    assert peers[0].server.bytes_up >= SIZE * len(peers[1].passed), "bob has all of them from ann"
