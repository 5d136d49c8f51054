"""Relays that lie, and lines that tamper: what a hub and its peers make of them."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hub_swarm import FAST, HubSwarm
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained
from waiting import until

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach import hub_tunnel, relay_socks
from cocktail_cli.extensions.reach.dialling import FarRoute, hub_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from transport import PeerLink
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys
from transport.wire import DealerWire, Disconnected

CHUNK = 1 << 16


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection in a thread of its own; yields the port."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                came = listener.accept()[0]
                threading.Thread(target=served, args=(came,), daemon=True).start()

    def served(came: socket.socket) -> None:
        with came, suppress(OSError):
            serve(came)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(120)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not SOCKS 5"),
        (b"\5\0" + relay_socks.reply(0, "no-key"), "sent no key"),
        (b"\5\0" + relay_socks.reply(0, "A" * 43), "does not hold"),
        (b"\5\0" + relay_socks.reply(2, "not you"), "not you"),
    ],
)
def test_what_is_no_relay_is_told_once_and_dialled_again(answer: bytes, told: str) -> None:
    dials, said = [], list[str]()

    def serve(came: socket.socket) -> None:
        if data := came.recv(CHUNK):
            dials.append(data)
            came.sendall(answer)

    with serving(serve) as port:
        tunnel = HubTunnel(f"127.0.0.1:{port}", Server(CurveKeys.generate(), "127.0.0.1", 1, said.append))
        until(lambda: len(dials) >= 2 and said)
        tunnel.close()

    assert len(said) == 1
    assert told in said[0]


@pytest.mark.parametrize("refusal", [b"", b"\5\0", b"\5\0" + relay_socks.reply(4, "gone")])
def test_a_relay_that_answers_a_probe_and_then_refuses_ends_no_process(refusal: bytes) -> None:
    refused, key = list[bytes](), CurveKeys.generate().public
    wanted = (b"control.relay", b"r.run")

    def serve(came: socket.socket) -> None:
        data = came.recv(CHUNK)
        probed = relay_socks.reply(0, key)
        refused.extend(name for name in wanted if name in data)
        came.sendall(refusal if any(name in data for name in wanted) else b"\5\0" + probed)

    with serving(serve) as port:
        tunnel = HubTunnel(f"127.0.0.1:{port}", Server(CurveKeys.generate(), "127.0.0.1", 1))
        wire = DealerWire([FarRoute("127.0.0.1", port, "r.run")], key)
        wire.dial(0)
        events = list[object]()
        until(lambda: events.extend(wire.poll(0.05)) or (events and refused.count(wanted[0]) >= 2))
        wire.close()
        tunnel.close()

    assert [type(event) for event in events] == [Disconnected]
    assert wanted[1] in refused


def test_connections_that_a_relay_announces_in_a_flood_are_limited() -> None:
    tunnel = HubTunnel("127.0.0.1:1", Server(CurveKeys.generate(), "127.0.0.1", 1))
    tunnel.close()
    announced = 3 * int(hub_tunnel.DIALS)

    async def flood() -> None:
        for number in range(announced):
            tunnel._receive(f"guest {number:032x} 203-0-113-7", 0.0)

    asyncio.run(flood())

    assert announced - tunnel.refused <= hub_tunnel.DIALS + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "tamper",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),  # forge
        lambda data: data + data,  # replay
        lambda data: data[len(data) // 2 :] + data[: len(data) // 2],  # reorder
    ],
    ids=["forged", "replayed", "reordered"],
)
def test_bytes_that_a_relay_alters_end_the_connection_and_never_enter_the_run(
    tmp_path: Path, tamper: Callable[[bytes], bytes]
) -> None:
    running = HubSwarm(toy_settings(**FAST, samples=80), ToyWork(), tmp_path, 0).start()
    relay = Relay("127.0.0.1", 0)
    tunnel = HubTunnel(f"127.0.0.1:{relay.port}", Server(running.keys.pair, "127.0.0.1", running.hub.port))
    altered = threading.Event()

    def forward(source: socket.socket, sink: socket.socket, passes: float) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                passes -= len(data)
                if passes < 0 and not altered.is_set():
                    altered.set()
                    data = tamper(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(came: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", relay.port)) as there:
            back = threading.Thread(target=forward, args=(there, came, float("inf")))
            back.start()
            forward(came, there, 3000)  # the handshake and some messages pass
            back.join()

    until(lambda: tunnel.claims)
    with serving(serve) as port:
        url = running.keys.url("127.0.0.1", 1, "toy-run", f"127.0.0.1:{port}")
        peer = ToyPeer(PeerLink(replace(url, dial=hub_routes), PeerIdentity("ann")))
        running.train(peer)
        ended = running.ended()
    running.close()
    tunnel.close()
    relay.close()

    assert altered.is_set()
    assert (ended.finished, peer.error) == (True, None)
    assert trained(running.work) == list(range(80))
    assert peer.packets == running.work.packets
