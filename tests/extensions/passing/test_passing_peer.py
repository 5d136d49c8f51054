"""What a hub can say to a peer's half: bounded, whatever it says."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from memory_sockets import MemoryHubWire, MemoryPeerWire

from cocktail_cli.extensions.passing.bodies import NAME, Newcomer, Sources
from cocktail_cli.extensions.passing.peer import KEPT_NEWCOMERS, PassingPeer
from transport import PeerLink, RunURL
from transport.direct import PeerServer, ReachablePeer
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, ProtocolError


def nobody(peer: ReachablePeer) -> PeerLink:
    raise AssertionError("nobody is dialled")


@pytest.fixture
def server() -> PeerServer:
    return PeerServer(MemoryHubWire(), "toy-run")


@pytest.fixture
def half(server: PeerServer) -> PassingPeer:
    url = RunURL(CurveKeys.generate().public, "", "127.0.0.1", 1, "toy-run")
    wire = MemoryPeerWire(MemoryHubWire(), "key-of-ann")
    return PassingPeer(PeerLink(url, PeerIdentity("ann"), wire=wire), nobody, server)


def test_the_newest_newcomers_may_fetch_files(half: PassingPeer, server: PeerServer) -> None:
    for number in range(3 * KEPT_NEWCOMERS):
        half.received(msgspec.msgpack.encode(Newcomer(f"n{number}", f"key-{number}")))

    admitted = [number for number in range(3 * KEPT_NEWCOMERS) if server.knows(f"key-{number}")]
    assert admitted == list(range(2 * KEPT_NEWCOMERS, 3 * KEPT_NEWCOMERS))


def test_what_is_remembered_of_sources_has_a_bound(half: PassingPeer) -> None:
    half.received(msgspec.msgpack.encode(Sources(0, 1024, [])))
    tracemalloc.start()
    for number in range(64):
        keys = {f"{number}-{name}": "" for name in range(4096)}
        half.received(msgspec.msgpack.encode(Sources(number, 1024, [], keys)))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert kept < 6 << 20


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Sources", "round": -1})])
def test_what_cannot_be_read_is_said_to_be_so(half: PassingPeer, body: bytes) -> None:
    """The link ignores and counts it."""
    with pytest.raises(ProtocolError):
        half.received(body)
    assert half.fetch(0) is None
    assert half.name == NAME
