"""An aggregator's server and the links to it, on the loopback."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from waiting import until

from cocktail_cli.extensions.aggregators.aggregator_thread import ShardServer
from cocktail_cli.extensions.aggregators.bodies import AggregatorInfo
from cocktail_cli.extensions.aggregators.peer import BOUNDS, ShardClients
from scripts.swarms.tcp_link import Link
from transport import PeerLink, RunURL
from transport.direct import PeerServer
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import CurveKeys, RefusedByHub, TransportError, decode_to_peer, encode, messages
from transport.wire import Bandwidth, HubWire, RateLimits, RouterWire, is_reachable

KEYS = {name: CurveKeys.generate() for name in ("aggregator", "hub", "ann", "eve")}


class House:
    """A shard server for ann, and the parts it received."""

    def __init__(self) -> None:
        def knows(key: str) -> bool:
            return key == KEYS["hub"].public or self.server.knows(key)

        wire = RouterWire("127.0.0.1", 0, KEYS["aggregator"], allowed=knows)
        self.port = wire.port
        self.server = PeerServer(wire, "toy-run")
        self.came: list[tuple[int, str, bytes]] = []
        self.shards = ShardServer(self.server, lambda *what: self.came.append(what))
        self.shards.opened(3, {"ann": KEYS["ann"].public}, 1000)
        self.server.start()

    def link(self, name: str, keys: str, port: int = 0) -> PeerLink:
        url = RunURL(KEYS["aggregator"].public, "", "127.0.0.1", port or self.port, "toy-run")
        link = PeerLink(url, PeerIdentity(name, keys=KEYS[keys]), LinkLimits(patience=1.0, flows=1))
        link.bounds_of_extensions |= BOUNDS
        return link

    @property
    def aggregator(self) -> AggregatorInfo:
        return self.at(self.port)

    def at(self, port: int) -> AggregatorInfo:
        return AggregatorInfo("aggregator", [0], KEYS["aggregator"].public, f"127.0.0.1:{port}")


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.server.close()


def test_a_member_brings_its_part_and_fetches_the_packet(house: House) -> None:
    direct = ShardClients(lambda aggregator: house.link("ann", "ann"))
    house.shards.serve(3, b"packet of shards")

    assert direct.send(3, [house.aggregator], {"aggregator": b"a part", "hub": b"left"}, lambda: False) == {
        "hub": b"left"
    }
    until(lambda: house.came == [(3, "ann", b"a part")])
    assert direct.fetch(3, [house.aggregator], 1 << 20) == {"aggregator": b"packet of shards"}
    assert direct.fetch(2, [house.aggregator], 1 << 20) == {}, "it is not served"
    direct.close()


def test_a_member_fetches_no_more_from_a_shard_server_than_the_round_has(house: House) -> None:
    direct = ShardClients(lambda aggregator: house.link("ann", "ann"))
    house.shards.serve(3, b"packet of shards")

    assert direct.fetch(3, [house.aggregator], 16) == {"aggregator": b"packet of shards"}
    assert direct.fetch(3, [house.aggregator], 15) == {}
    direct.close()


def test_nobody_else_comes_in(house: House) -> None:
    """Another key is hung up on, another name refused; the hub may look whether somebody is at home."""
    with pytest.raises(TransportError):
        house.link("ann", "eve").connect(0.3, 0.3)
    with pytest.raises(RefusedByHub):
        house.link("bob", "ann").connect(2.0, 2.0)
    assert is_reachable(f"127.0.0.1:{house.port}", KEYS["aggregator"].public, KEYS["hub"])
    assert not is_reachable(f"127.0.0.1:{house.port}", KEYS["eve"].public, KEYS["hub"], 0.5)
    assert not is_reachable("nonsense", KEYS["aggregator"].public, KEYS["hub"])


@pytest.mark.parametrize(
    ("name", "size"), [("part/2", 5), ("part/5", 5), ("part/3", 1001), ("update/3", 5), ("part/x", 5)]
)
def test_what_is_not_a_part_of_the_round_is_not_taken(house: House, name: str, size: int) -> None:
    link = house.link("ann", "ann")
    link.connect(2.0, 2.0)

    assert link.put(name, bytes(size)) is False
    assert house.came == []
    link.close()


@pytest.fixture
def line(house: House) -> Iterator[Link]:
    """To the house."""
    line = Link(house.port)
    yield line
    line.close()


def test_a_link_whose_connections_ended_goes_on_where_it_was(house: House, line: Link) -> None:
    """The one for control is idle, and ends where TCP's probe of it after 30 s is lost."""
    link = house.link("ann", "ann", line.port)
    direct, aggregator = ShardClients(lambda aggregator: link), house.at(line.port)
    assert direct.send(3, [aggregator], {"aggregator": b"a part"}, lambda: False) == {}
    sessions = dict(house.server._sessions)
    line.light.clear()  # or it is up again before anybody looks
    line.cut()
    until(lambda: not link._connections.connected)
    line.light.set()

    assert direct.send(4, [aggregator], {"aggregator": b"a part"}, lambda: False) == {}
    assert house.server._sessions == sessions
    direct.close()


def test_a_session_is_resumed_by_the_key_that_began_it_and_no_other() -> None:
    said: list[messages.Message] = []
    wire = SimpleNamespace(send=lambda conn, frames: said.append(decode_to_peer(frames[0])) or True)
    server = PeerServer(cast(HubWire, wire), "toy-run")
    server.admit("members", {"ann": "key-a", "bob": "key-b"})
    server._receive(b"key-a.1", [encode(messages.Hello(messages.PROTOCOL, "", "toy-run", "ann", "", {}))])
    session = cast(messages.Welcome, said[-1]).session
    resume = [encode(messages.Resume(messages.PROTOCOL, "toy-run", "ann", session))]

    server._receive(b"key-b.1", resume)
    assert isinstance(said[-1], messages.Refused)
    server._receive(b"key-a.2", resume)
    assert isinstance(said[-1], messages.Welcome)
    assert (said[-1].session, said[-1].resumed) == (session, True)


def test_a_link_that_was_lost_between_two_rounds_is_dialled_anew(house: House, line: Link) -> None:
    dialled: list[PeerLink] = []

    def dial(aggregator: AggregatorInfo) -> PeerLink:
        dialled.append(house.link("ann", "ann", line.port))
        return dialled[-1]

    direct, aggregator = ShardClients(dial), house.at(line.port)
    assert direct.send(3, [aggregator], {"aggregator": b"a part"}, lambda: False) == {}
    house.server._sessions.clear()  # as after a new start, before it heard who takes part
    house.shards.opened(4, {}, 1000)
    line.cut()
    until(lambda: dialled[0].lost)
    house.shards.opened(4, {"ann": KEYS["ann"].public}, 1000)

    assert direct.send(4, [aggregator], {"aggregator": b"a part"}, lambda: False) == {}
    assert len(dialled) == 2
    direct.close()


def test_an_aggregator_that_cannot_be_dialled_costs_seconds_once() -> None:
    nowhere = AggregatorInfo("aggregator", [0], KEYS["aggregator"].public, "127.0.0.1:1")
    dialled: list[AggregatorInfo] = []

    def dial(aggregator: AggregatorInfo) -> PeerLink:
        dialled.append(aggregator)
        url = RunURL(aggregator.key, "", "127.0.0.1", 1, "toy-run")
        return PeerLink(url, PeerIdentity("ann", keys=KEYS["ann"]), LinkLimits(patience=0.5, flows=1))

    direct, started = ShardClients(dial), time.monotonic()
    for round in (3, 4, 5):
        assert direct.send(round, [nowhere], {"aggregator": b"a part"}, lambda: False) == {
            "aggregator": b"a part"
        }
        assert direct.fetch(round, [nowhere], 1 << 20) == {}
    assert len(dialled) == 1
    assert time.monotonic() - started < 60
    direct.close()


def test_traffic_of_a_shard_server_is_within_the_rate_limits(house: House) -> None:
    house.shards.opened(3, {"ann": KEYS["ann"].public}, 1 << 20)
    house.server.rate_limits = RateLimits(Bandwidth(up=1e6, down=1e6))
    house.shards.serve(3, bytes(300_000))
    direct, started = ShardClients(lambda aggregator: house.link("ann", "ann")), time.monotonic()

    assert direct.send(3, [house.aggregator], {"aggregator": bytes(300_000)}, lambda: False) == {}
    assert time.monotonic() - started > 0.2
    assert direct.fetch(3, [house.aggregator], 1 << 20) == {"aggregator": bytes(300_000)}
    assert time.monotonic() - started > 0.45
    direct.close()


def test_an_aggregator_that_takes_nothing_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen aggregator keeps its connections, and reads nothing."""
    monkeypatch.setattr("transport.direct.direct_links.STILL_S", 0.3)
    direct = ShardClients(lambda aggregator: house.link("ann", "ann"))
    assert direct.send(3, [house.aggregator], {"aggregator": b"a part"}, lambda: False) == {}
    monkeypatch.setattr(house.server, "_receive", lambda conn, frames: None)

    assert direct.send(4, [house.aggregator], {"aggregator": b"a part"}, lambda: False) == {
        "aggregator": b"a part"
    }
    direct.close()
