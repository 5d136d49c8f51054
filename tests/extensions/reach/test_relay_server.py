"""A relay on the loopback, with real hubs and peers: what it carries, and what it refuses."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hub_swarm import FAST, HubSwarm
from tls_only import Firewall, server_context
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained
from waiting import until

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach import relay_socks
from cocktail_cli.extensions.reach.dialling import Bridge, FarRoute, ask, hub_routes, relay_routes, run_name
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import FETCH_S, Relay, RelayLimits
from cocktail_cli.extensions.reach.websocket_stream import client_context
from transport import PeerLink, RunURL, ask_status
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import CurveKeys, Unreachable
from transport.protocol import events as hub_events
from transport.wire import Connected, DealerWire, Disconnected, Received
from transport.wire.zeromq_sockets import DIAL_S, HEAD_START_S

USUAL = RelayLimits()
UNKNOWN_TICKET = relay_socks.reply(4, "nobody waits with this ticket")
UNKNOWN_RUN = relay_socks.reply(4, "the run's hub is not connected to it")
SHUT = 1  # a port of the loopback at which nothing listens
PATIENCE_S = 90.0  # on a busy machine; not what is measured


class Relayed:
    """A hub, and a relay that its peers reach it through."""

    def __init__(
        self, folder: Path, limits: RelayLimits = USUAL, only_tls: bool = False, **changes: object
    ) -> None:
        self.limits, self.said = limits, list[str]()
        self.relay = Relay("127.0.0.1", 0, limits, server_context())
        self.firewall = Firewall(self.relay.port)
        self.place = f"127.0.0.1:{self.firewall.port if only_tls else self.relay.port}"
        self.running = HubSwarm(toy_settings(**(FAST | changes)), ToyWork(), folder, 0).start()
        here = "127.0.0.1", self.running.hub.port
        self.tunnel = HubTunnel(self.place, Server(self.running.keys.pair, *here, self.said.append))
        until(lambda: self.tunnel.claims)

    @property
    def url(self) -> RunURL:
        """The run's URL, whose direct way is closed."""
        return replace(self.running.url, port=SHUT, places=(self.place,), dial=hub_routes)

    def restart(self) -> None:
        """Kill the relay, and start another one at its port."""
        port = self.relay.port
        self.relay.close()
        self.relay = Relay("127.0.0.1", port, self.limits, server_context())

    def close(self) -> None:
        self.running.close()
        self.tunnel.close()
        self.firewall.close()
        self.relay.close()


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[Callable[..., Relayed]]:
    """Starts a hub with a relay."""
    started: list[Relayed] = []

    def begin(limits: RelayLimits = USUAL, only_tls: bool = False, **changes: object) -> Relayed:
        started.append(Relayed(tmp_path / str(len(started)), limits, only_tls, **changes))
        return started[-1]

    yield begin
    for one in started:
        one.close()


class CountedWire(DealerWire):
    """Counts how often the control connection came up."""

    ups = 0

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]:
        events = super().poll(timeout)
        self.ups += Connected(0) in events
        return events


def peers_of(url: RunURL, *names: str) -> list[ToyPeer]:
    return [ToyPeer(PeerLink(url, PeerIdentity(name))) for name in names]


@pytest.mark.parametrize("only_tls", [False, True], ids=["socks", "only TLS gets out"])
def test_a_run_whose_hub_nobody_can_dial_trains_through_a_relay(
    relayed: Callable[..., Relayed], only_tls: bool
) -> None:
    there = relayed(only_tls=only_tls, min_peers=2)
    peers = peers_of(there.url, "ann", "bob")
    there.running.train(*peers)

    assert there.running.ended().finished
    assert [peer.error for peer in peers] == [None, None]
    assert trained(there.running.work) == list(range(40))
    assert {peer.link.way for peer in peers} == {f"the relay {there.place}{' by TLS' * only_tls}"}
    assert bool(there.firewall.passed) == only_tls


def test_a_direct_way_is_taken_where_there_is_one(relayed: Callable[..., Relayed]) -> None:
    there = relayed()
    (peer,) = peers_of(replace(there.url, port=there.running.hub.port), "ann")
    peer.start().join(PATIENCE_S)

    assert (peer.error, peer.link.way) == (None, there.running.url.address)


@pytest.mark.slow
def test_a_way_that_never_answers_costs_a_head_start_and_no_more(relayed: Callable[..., Relayed]) -> None:
    there = relayed()
    with closing(Firewall(there.relay.port, silent=True)) as firewall:
        started = time.monotonic()
        status = ask_status(replace(there.url, places=(f"127.0.0.1:{firewall.port}",)))
        took = time.monotonic() - started

    assert status["run"] == "toy-run"
    assert HEAD_START_S <= took < DIAL_S, "less than the time after which the silent way is given up"
    assert firewall.stopped == 1


def test_another_program_at_the_direct_address_is_passed_over(relayed: Callable[..., Relayed]) -> None:
    there = relayed()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(PATIENCE_S)
        (peer,) = peers_of(replace(there.url, port=other.getsockname()[1]), "ann")
        thread = peer.start()
        for _ in range(2):  # the probe, and ZeroMQ's connection
            with other.accept()[0] as came:
                came.sendall(b"220 mail.example.org\r\n")
        thread.join(PATIENCE_S)

    assert (peer.error, peer.link.way) == (None, f"the relay {there.place}")


@pytest.mark.slow
def test_a_relay_that_is_killed_and_restarted_costs_one_reconnect(
    relayed: Callable[..., Relayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.peer.peer_link.LOST_S", 0.0)
    there = relayed(samples=240, min_peers=2, grace_s=5.0)
    running, told = there.running, list[str]()
    wires = [CountedWire(hub_routes(there.url), there.url.key) for _ in range(2)]
    peers = [
        ToyPeer(PeerLink(there.url, PeerIdentity(name), wire=wire, notify=told.append))
        for name, wire in zip(("ann", "bob"), wires, strict=True)
    ]
    for peer in peers:
        peer.start()
    running.until(lambda: running.committed() >= 10)
    there.restart()
    running.train(*peers)

    assert running.ended().finished
    assert trained(running.work) == list(range(240)), "every sample once, no committed round lost"
    assert [(peer.error, peer.renewed) for peer in peers] == [(None, 0)] * 2
    assert sum(isinstance(event, hub_events.PeerJoined) for event in running.events) == 2
    assert [wire.ups for wire in wires] == [2, 2], "each reconnected once"
    assert f"connected to the relay {there.place} again" in told, "the way is named, not the closed address"
    assert there.tunnel.claims == 2
    assert [line.split(":")[0] for line in there.said] == [
        "the run is not reachable through its relay for now",
        "the run is reachable through its relay again",
    ]


def test_only_the_holder_of_a_runs_key_can_claim_it(relayed: Callable[..., Relayed]) -> None:
    there = relayed()
    false = CurveKeys(there.running.keys.public, CurveKeys.generate().secret)
    for keys in (false, CurveKeys.generate()):
        thief = HubTunnel(there.place, Server(keys, "127.0.0.1", SHUT))
        if keys is not false:
            until(lambda thief=thief: thief.claims)  # type: ignore[misc]
        (peer,) = peers_of(there.url, "ann")
        peer.link.connect(PATIENCE_S)
        peer.link.leave("done")
        assert thief.claims == (keys is not false)
        thief.close()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", b""),
        (b"\xff" + bytes(8) + b"\x7f\3\1CURVE", b""),
        (bytes(range(256)) * 64, b""),
        (b"\5\1\2", b""),  # a login is wanted
        (b"\5\1\0\5\1\0\1\x7f\0\0\1\0\x16", b"\5\0"),  # an address of the relay's own machine
        (relay_socks.request("www.example.org"), b"\5\0"),
        (relay_socks.request(f"{'0' * 32}.guest"), b"\5\0" + UNKNOWN_TICKET),
        (relay_socks.request(f"{'0' * 32}.run"), b"\5\0" + UNKNOWN_RUN),
    ],
)  # fmt: skip
def test_what_a_relay_does_not_know_is_closed_at_once(
    relayed: Callable[..., Relayed], sent: bytes, told: bytes
) -> None:
    there = relayed()
    with socket.create_connection(("127.0.0.1", there.relay.port), 5.0) as sock:
        sock.sendall(sent)
        assert heard(sock) == told


def heard(sock: socket.socket) -> bytes:
    """Read until the other end closes."""
    data = b""
    try:
        while part := sock.recv(4096):
            data += part
    except ConnectionError:  # closed with bytes unread
        pass
    return data


def test_floods_and_silent_connections_end_at_the_relay(relayed: Callable[..., Relayed]) -> None:
    there = relayed(RelayLimits(of_one_origin=40, hello_s=0.5), samples=10**5)
    (peer,) = peers_of(there.url, "ann")
    thread = peer.start()
    there.running.until(lambda: there.running.committed() >= 3)
    flood = [
        socket.create_connection(("127.0.0.1", there.relay.port), 5.0, ("127.0.0.9", 0)) for _ in range(120)
    ]
    until(lambda: there.relay.refused >= 80)
    before = there.running.committed()
    there.running.until(lambda: there.running.committed() >= before + 3)
    started = time.monotonic()
    assert all(heard(sock) == b"" for sock in flood), "closed without a word"
    assert time.monotonic() - started < 30.0
    for sock in flood:
        sock.close()
    peer.link.leave_requested.set()
    thread.join(120)

    assert (peer.error, peer.link.way) == (None, f"the relay {there.place}")


def greeting_of_tls() -> bytes:
    """The first record of a TLS client."""
    goes = ssl.MemoryBIO()
    client = client_context(False).wrap_bio(ssl.MemoryBIO(), goes, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return goes.read()


@pytest.mark.parametrize(
    "sent", [b"\x16", b"\x16\x03\x01\x40\x00", greeting_of_tls()[:-1], greeting_of_tls()]
)
def test_a_tls_handshake_that_hangs_is_closed_in_time(relayed: Callable[..., Relayed], sent: bytes) -> None:
    there = relayed(RelayLimits(hello_s=0.3))
    with socket.create_connection(("127.0.0.1", there.relay.port), 5.0) as sock:
        sock.sendall(sent)
        started = time.monotonic()
        heard(sock)
        assert time.monotonic() - started < 30.0
        until(lambda: there.relay.connections <= 1)  # the hub's control connection


def test_a_greeting_that_drips_is_closed_in_time(relayed: Callable[..., Relayed]) -> None:
    there = relayed(RelayLimits(hello_s=0.5))
    sock = socket.create_connection(("127.0.0.1", there.relay.port), 5.0)
    with client_context(False).wrap_socket(sock, server_hostname="127.0.0.1") as drip:
        started = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012 - reset, or a broken pipe
            for byte in b"GET / HTTP/1.1\r\nHost: relay\r\n" + b"A: b\r\n" * 10**4:
                drip.sendall(bytes((byte,)))
                drip.settimeout(0.02)
                with suppress(TimeoutError):
                    if not drip.recv(100):
                        raise ConnectionError
        assert time.monotonic() - started < 30.0


def test_a_hub_that_reads_nothing_stops_its_peers_by_tls_within_bounded_memory() -> None:
    keys, sent = CurveKeys.generate(), 0
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,  # in the hub's place
        closing(Relay("127.0.0.1", 0, tls=server_context())) as relay,
        closing(HubTunnel(f"127.0.0.1:{relay.port}", Server(keys, *mute.getsockname()))) as tunnel,
        closing(Bridge(FarRoute("127.0.0.1", relay.port, tls=True))) as bridge,
        socket.create_connection(("127.0.0.1", bridge.port), 5.0) as peer,
    ):
        until(lambda: tunnel.claims)
        peer.sendall(relay_socks.request(f"{run_name(keys.public)}.run"))
        answers = b"\5\0" + relay_socks.reply(0)  # in one piece or two
        assert peer.makefile("rb").read(len(answers)) == answers
        peer.settimeout(0.5)
        with suppress(TimeoutError):
            while sent < 256 << 20:
                sent += peer.send(bytes(1 << 20))

    assert sent < 48 << 20, "what the kernel holds at eight ends on the loopback, and a chunk at each"


def test_limits_of_a_run_are_told_to_the_next(relayed: Callable[..., Relayed]) -> None:
    there = relayed(RelayLimits(runs=1, connections=1))
    (peer,) = peers_of(there.url, "ann")
    peer.link.connect(PATIENCE_S)
    with pytest.raises(Unreachable, match="as many connections as it may"):
        PeerLink(there.url, PeerIdentity("bob"), LinkLimits(flows=1)).connect()
    said: list[str] = []
    other = HubTunnel(there.place, Server(CurveKeys.generate(), "127.0.0.1", SHUT, said.append))
    until(lambda: said)
    other.close()
    peer.link.leave("done")

    assert "as many runs as it may" in said[0]


def test_each_address_behind_a_relay_has_limits_of_its_own_at_the_hub(
    relayed: Callable[..., Relayed],
) -> None:
    there = relayed()
    (peer,) = peers_of(there.url, "ann")
    peer.link.connect(PATIENCE_S)
    # told after the welcome
    until(lambda: any(isinstance(event, hub_events.PeerJoined) for event in there.running.events))
    joined = next(event for event in there.running.events if isinstance(event, hub_events.PeerJoined))
    peer.link.leave("done")

    assert joined.origin.startswith("127."), "of this machine, so no address of the internet is claimed"
    assert joined.origin != "127.0.0.1", "what floods through the relay is not charged to local peers"


def test_a_question_finds_the_way_through_a_relay_and_an_error_names_what_failed_on_each_way(
    relayed: Callable[..., Relayed],
) -> None:
    there = relayed()
    assert ask_status(there.url)["run"] == "toy-run"
    there.relay.close()
    with pytest.raises(Unreachable) as direct_and_relay:
        ask_status(there.url, 5.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.settimeout(5.0)
        with pytest.raises(Unreachable, match="is no relay"):
            asyncio.run(ask(FarRoute("127.0.0.1", port), "control.probe", 0.2))

    assert f"no connection to 127.0.0.1:{SHUT}" in str(direct_and_relay.value)
    assert f"no connection to the relay {there.place}" in str(direct_and_relay.value)


def test_a_peer_that_goes_from_one_hub_to_the_next_leaves_nothing_open_behind(
    relayed: Callable[..., Relayed],
) -> None:
    """A run that lasts a month may see many hubs: each is another route."""
    places = [relayed().url, relayed().url]
    before = bridges()  # of the hubs themselves
    wire = DealerWire(hub_routes(places[0]), places[0].key)
    with closing(wire):
        for turn in range(6):
            url = places[turn % 2]
            wire.aim(hub_routes(url), url.key)
            wire.hang_up(0)
            wire.dial(0)
            until(lambda: Connected(0) in wire.poll(0.1))
            assert bridges() == before + 1
        wire.dial(0)
        wire.aim(hub_routes(places[0]), places[0].key)  # a dial under way is for the new hub too
        until(lambda: Connected(0) in wire.poll(0.1))
        assert (wire.way, bridges()) == (f"the relay {places[0].places[0]}", before + 1)
    assert bridges() == before


def bridges() -> int:
    return sum(thread.name == "cocktail-bridge" for thread in threading.enumerate())


def test_peers_of_a_hub_that_is_gone_are_refused_at_once(relayed: Callable[..., Relayed]) -> None:
    """The relay need not wait for a hub whose control connection has ended, nor its peers for the relay."""
    there = relayed()
    route = relay_routes(there.place, f"{run_name(there.url.key)}.run")[0]
    keys = CurveKeys.generate()  # of a hub that claims its run, and fetches nobody
    control = replace(route, name=f"{relay_socks.CONTROL}.{relay_socks.RELAY}")
    key = asyncio.run(ask(route, f"{relay_socks.CONTROL}.{relay_socks.PROBE}"))
    hub = DealerWire((control,), key, keys)
    hub.dial(0)
    until(lambda: any(isinstance(event, Connected) for event in hub.poll(0.1)))
    hub.send(0, [b"claim"])
    until(lambda: any(isinstance(event, Received) for event in hub.poll(0.1)))
    with socket.create_connection(("127.0.0.1", there.relay.port), PATIENCE_S) as sock:
        sock.sendall(relay_socks.request(f"{run_name(keys.public)}.run"))
        until(lambda: any(isinstance(event, Received) for event in hub.poll(0.1)))
        started = time.monotonic()
        hub.close()
        said = heard(sock)

    assert b"the run's hub does not answer it" in said
    assert time.monotonic() - started < FETCH_S / 2
    assert there.relay.runs == 1
