"""A hub says whatever it likes to a peer's half, whose memory is bounded."""

import tracemalloc

import msgspec
import pytest
from memory_sockets import MemoryHubWire, MemoryPeerWire

from cocktail_cli.extensions.passing.bodies import NAME, Newcomer, PacketSource, Sources
from cocktail_cli.extensions.passing.peer import KEPT_NEWCOMERS, PassingPeer
from transport import PeerLink, RunURL
from transport.direct import PeerServer, ReachablePeer
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, ProtocolError, messages


def nobody(peer: ReachablePeer) -> PeerLink:
    raise AssertionError("nobody is dialled")


@pytest.fixture
def server() -> PeerServer:
    return PeerServer(MemoryHubWire(), "toy-run")


@pytest.fixture
def half(server: PeerServer) -> PassingPeer:
    url = RunURL(CurveKeys.generate().public, "", "127.0.0.1", 1, "toy-run")
    wire = MemoryPeerWire(MemoryHubWire(), "key-of-ann")
    link = PeerLink(url, PeerIdentity("ann"), wire=wire)
    link._state.welcome = messages.Welcome(messages.PROTOCOL, "toy-run", "ann", "s", "{}", "00", [], 0, 1.0)
    return PassingPeer(link, nobody, server)


def test_the_newest_newcomers_may_fetch_files(half: PassingPeer, server: PeerServer) -> None:
    for number in range(3 * KEPT_NEWCOMERS):
        half.received(msgspec.msgpack.encode(Newcomer(f"n{number}", f"key-{number}")))

    admitted = [number for number in range(3 * KEPT_NEWCOMERS) if server.knows(f"key-{number}")]
    assert admitted == list(range(2 * KEPT_NEWCOMERS, 3 * KEPT_NEWCOMERS))


def test_what_is_remembered_of_sources_has_a_bound(half: PassingPeer) -> None:
    half.received(msgspec.msgpack.encode(Sources(0, 1024, [])))
    tracemalloc.start()
    for number in range(24):
        keys = {f"{number}-{name}": "" for name in range(2048)}
        half.received(msgspec.msgpack.encode(Sources(number, 1024, [], keys)))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert kept < 6 << 20


def test_a_committed_that_is_repeated_goes_on_with_the_packet_that_was_begun(half: PassingPeer) -> None:
    """The hub says it again to a peer whose update came late."""
    half.received(msgspec.msgpack.encode(Sources(7, 1024, [PacketSource("bob", "key", "bob:1", 1, 3)])))
    committed, part_of = messages.Committed(7, 4096, "ab" * 32, []), half._link._connections.part_of
    first = part_of(committed)
    assert first is not None
    assert list(first.chunks) == [0, 3], "bob has the others"
    first.sink.add(0, bytes(1024))
    again = part_of(committed)

    assert again is not None
    assert again.sink is first.sink
    assert list(again.chunks) == [3]


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Sources", "round": -1})])
def test_what_cannot_be_read_is_said_to_be_so(half: PassingPeer, body: bytes) -> None:
    """The link ignores and counts it."""
    with pytest.raises(ProtocolError):
        half.received(body)
    assert half.fetch(0) is None
    assert half.name == NAME
