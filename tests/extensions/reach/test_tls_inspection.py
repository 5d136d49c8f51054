"""A box that inspects TLS: it has a certificate for every name, and reads and alters what TLS would hide."""

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hub_swarm import FAST, HubSwarm
from tls_only import Firewall, server_context
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained
from waiting import until

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach.dialling import hub_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from cocktail_cli.extensions.reach.streams import CHUNK, SocketStream, Stream, dial, splice
from cocktail_cli.extensions.reach.websocket_stream import accept_websocket, client_context, open_websocket
from transport import PeerLink
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, as_z85, to_bytes

SHUT = 1


class Inspector(Firewall):
    """Ends TLS and WebSocket of each connection, and goes on by its own to the relay at `port`."""

    def __init__(self, port: int, alter: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.seen, self.altered, self._alter = bytearray(), threading.Event(), alter
        super().__init__(port)

    async def _forward(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            inside = await accept_websocket(SocketStream(sock), server_context())
            with closing(await dial("127.0.0.1", self._to)) as raw:
                outside = await open_websocket(raw, "127.0.0.1", self._to, client_context(False))
                await splice(Tapped(inside, self), Tapped(outside, self))

    def pass_on(self, data: bytes) -> bytes:
        self.seen += data
        if len(self.seen) > 5000 and not self.altered.is_set():
            self.altered.set()
            return self._alter(data)
        return data


class Tapped:
    """A stream whose bytes an inspector reads."""

    def __init__(self, inner: Stream, tap: Inspector) -> None:
        self._inner, self._tap = inner, tap
        self.send, self.end, self.close = inner.send, inner.end, inner.close

    async def receive(self, most: int = CHUNK) -> bytes:
        data = await self._inner.receive(most)
        return self._tap.pass_on(data) if data else data


@pytest.mark.parametrize(
    "alter",
    [lambda data: data, lambda data: data[:-1] + bytes((data[-1] ^ 1,)), lambda data: data + data],
    ids=["reads", "forges", "replays"],
)
def test_who_inspects_tls_reads_nothing_of_a_run_and_cannot_alter_it(
    tmp_path: Path, alter: Callable[[bytes], bytes]
) -> None:
    me = CurveKeys.generate()
    with (
        HubSwarm(toy_settings(**FAST, samples=80), ToyWork(), tmp_path, 0) as running,
        closing(Relay("127.0.0.1", 0, tls=server_context())) as relay,
        closing(Inspector(relay.port, alter)) as inspector,
        closing(
            HubTunnel(f"127.0.0.1:{relay.port}", Server(running.keys.pair, "127.0.0.1", running.hub.port))
        ) as hub,
    ):
        until(lambda: hub.claims)
        places = (f"127.0.0.1:{inspector.port}",)
        url = replace(running.url, port=SHUT, places=places, dial=hub_routes)
        peer = ToyPeer(PeerLink(url, PeerIdentity("ann", keys=me)))
        running.train(peer)

    assert (running.ended().finished, peer.error) == (True, None)
    assert trained(running.work) == list(range(80))
    assert peer.packets == running.work.packets
    assert inspector.altered.is_set()
    assert peer.link.way.endswith("by TLS")
    seen = bytes(inspector.seen)
    assert b".run" in seen, "it reads the words to the relay"
    for secret in (url.token, running.keys.public, me.secret, me.public):
        assert not [form for form in (secret.encode(), to_bytes(secret)) if form in seen]
    assert as_z85(running.keys.public) not in seen
