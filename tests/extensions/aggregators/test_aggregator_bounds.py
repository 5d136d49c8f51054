"""A hub that lies to aggregators and members about sizes: nothing is kept."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from lying_hub import LyingHub
from memory_sockets import MemoryHubWire
from test_size_bounds import PACKET, hub, lied_to  # noqa: F401

from cocktail_cli.extensions.aggregators.aggregator_thread import AggregatorThread
from cocktail_cli.extensions.aggregators.bodies import (
    NAME,
    AggregatorInfo,
    Close,
    HandoffOffer,
    Opened,
    Unmoved,
)
from cocktail_cli.extensions.aggregators.peer import BOUNDS, ShardedPeer
from transport import PeerLink
from transport.direct import PeerServer
from transport.protocol import messages


class Dialled:
    """Connections to aggregators of which none can be had."""

    def fetch(self, *_: object) -> dict[str, bytes]:
        return {}


class Backend:
    pending = None

    def longest(self, round: int) -> int:
        return PACKET


def shard(link: PeerLink, folder: Path) -> None:
    """A member's share of a round, of which a packet comes from an aggregator by way of the hub."""
    peer = ShardedPeer(link, 2, clients=Dialled())  # type: ignore[arg-type]
    body = msgspec.msgpack.encode(Unmoved([]))
    committed = messages.Committed(0, PACKET, "00", ["ann"], extra={NAME: body})
    peer._opened[0] = Opened([AggregatorInfo("bob", [0, 1], "key", "a:1")], ["ann", "bob"])
    peer._committed[0] = committed
    peer.fetch(0)


def aggregator(link: PeerLink) -> AggregatorThread:
    link.bounds_of_extensions |= BOUNDS
    server = PeerServer(MemoryHubWire(), link.url.run)
    return AggregatorThread(link, Backend(), PACKET, server)  # type: ignore[arg-type]


def handoff(link: PeerLink, _: Path) -> None:
    aggregator(link)._close(Close(0, 0, {}, {}, [HandoffOffer(7, "bob", 0.5)]))


def part(link: PeerLink, _: Path) -> None:
    aggregator(link)._close(Close(0, 0, {"bob": 1.0}, {"bob": "00"}))


LIES: dict[str, tuple[Callable[[PeerLink, Path], object], str]] = {
    "shard/": (shard, "1,024 at most: the size of the committed packet"),
    "part/": (part, "1,024 at most: the recipe's compression"),
    "handoff/": (handoff, "1,024 at most: the recipe's compression"),
}


def test_of_each_object_that_is_fetched_there_is_a_lie_here() -> None:
    assert LIES.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", LIES)
def test_of_an_object_that_is_announced_longer_than_it_can_be_nothing_is_kept(
    hub: LyingHub,  # noqa: F811
    name: str,
    tmp_path: Path,
) -> None:
    call, said = LIES[name]

    assert said in lied_to(hub, name, call, tmp_path)
