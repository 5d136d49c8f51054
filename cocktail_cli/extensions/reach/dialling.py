"""The ways to a hub, or to another machine, in the order in which they are tried: its own address, then each
relay, plainly and by TLS; all of them with or without a proxy.

A route is opened step by step: connect, go through its proxy, put the WebSocket on; each failure names its
step.

For libzmq a port of the loopback leads along it, so it needs to know of no relay, proxy or TLS. It speaks
SOCKS, but 4.3.5 aborts the process when a SOCKS server closes or refuses a connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from transport.protocol import Route, RunURL, Unreachable, UrlError, join_address, parse_address
from transport.wire import TcpRoute

from . import relay_socks
from .proxies import NO_PROXIES, PROXY_PORTS, Proxies, Proxy, ProxyRefused, http_connect, socks_connect
from .streams import LoopThread, SocketStream, Stream, TaskSet, accept, dial, prepare, splice
from .websocket_stream import TlsStream, WebSocketStream, client_context, open_websocket

PLAIN_S, FAR_S = 5.0, 8.0  # to open a route: as it is, and with a proxy or TLS on the way
ANSWER_S = 10.0  # for a relay to have the hub fetch a connection
AT_ONCE = 64  # connections: a peer has up to five, and its probes; no other program may fill this one
RELAY_HINT = "`cocktail relay` starts one on any machine that both sides can dial; check its name and port"
HINTS = {
    "relay": RELAY_HINT,
    "tls": RELAY_HINT,
    "proxy": "HTTPS_PROXY and ALL_PROXY name it, with USER:PASSWORD@ where it wants a login; NO_PROXY: what "
    "needs none",
}

RUN = "run"  # a relay's name for what a peer wants: <run name>.run
NAME = re.compile(r"[0-9a-f]{32}")  # of a run, or of a machine, at relays


@dataclass(frozen=True)
class FarRoute:
    """One way to a server that libzmq cannot dial: through a relay, a proxy, or a WebSocket over TLS."""

    host: str
    port: int
    name: str = ""  # what a relay is asked for; "": the server itself is there
    tls: bool = False  # a WebSocket over TLS carries the bytes
    proxy: Proxy | None = None

    def __str__(self) -> str:
        where = f"the relay {self.address}" if self.name else self.address
        by = " by TLS" if self.tls else ""
        return f"{where}{by}" + (f" through the proxy {self.proxy}" if self.proxy else "")

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def kind(self) -> str:
        """Return what it leads through, for `doctor`."""
        return "tls" if self.tls else "relay" if self.name else "direct"

    def probe(self) -> str:
        """See whether it answers; of a relay, whether it has the hub. Blocks. Raises Unreachable."""
        run = self.name.partition(".")[0]
        asyncio.run(ask(self, run and f"{run}.{relay_socks.PROBE}"))
        return ""

    def open(self) -> Bridge:
        """Let a port of the loopback lead along it."""
        return Bridge(self)

    def seconds(self, timeout: float) -> float:
        """Return the seconds to the server behind a relay and back: half of what the relay takes to join it,
        which dials back. Blocks. Raises Unreachable."""
        began = time.monotonic()
        asyncio.run(ask(self, self.name, timeout))
        return (time.monotonic() - began) / 2

    def remark(self) -> str:
        """Return a clause where the certificate of a relay is not trusted here: its own, or an inspector's.
        Blocks."""
        if not self.tls:
            return ""
        try:
            stream = asyncio.run(open_stream(self))
        except Unreachable:
            return ""
        stream.close()
        doubt = getattr(stream, "untrusted", "")
        return f"its certificate is not trusted here ({doubt}), which no secret depends on" if doubt else ""


def run_name(key: str) -> str:
    """Return a run's name at relays: a hash of its hub's public key, which a name must not give away."""
    return hashlib.sha256(b"cocktail relay\0" + key.encode()).hexdigest()[:32]


def hub_routes(url: RunURL, proxies: Proxies = NO_PROXIES) -> tuple[Route, ...]:
    """Return the ways to a hub."""
    direct = [
        route if route.proxy else TcpRoute(url.host, url.port)
        for route in plain_routes(url.host, url.port, "", proxies)
    ]
    name = f"{run_name(url.key)}.{RUN}"
    return (*direct, *(route for relay in url.places for route in relay_routes(relay, name, proxies)))


def plain_routes(host: str, port: int, name: str, proxies: Proxies) -> tuple[FarRoute, ...]:
    """Return the ways to an address without TLS. A proxy that is for TLS is used where nothing else works."""
    tcp, tls = proxies.of(host, port)
    last = () if tls in (None, tcp) or tcp else (FarRoute(host, port, name, proxy=tls),)
    return (FarRoute(host, port, name, proxy=tcp), *last)


def relay_routes(relay: str, name: str, proxies: Proxies = NO_PROXIES) -> tuple[FarRoute, ...]:
    """Return the ways to the relay at "host:port". Raises UrlError."""
    host, port = parse_address(relay)
    tls = FarRoute(host, port, name, tls=True, proxy=proxies.of(host, port)[1])
    return (*plain_routes(host, port, name, proxies), tls)


def machine_routes(address: str, proxies: Proxies = NO_PROXIES) -> tuple[FarRoute, ...]:
    """Return the ways to a machine at "host:port/name" of a relay. Raises UrlError."""
    relay, _, name = address.partition("/")
    if not NAME.fullmatch(name):
        raise UrlError(f"the name {name[:40]!r} at the relay {relay[:80]} is not of 32 hex digits")
    return relay_routes(relay, f"{name}.{RUN}", proxies)


class Bridge:
    """Each connection to 127.0.0.1:`port` becomes one along the route; what cannot be opened is closed."""

    def __init__(self, route: FarRoute) -> None:
        self._route = route
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=AT_ONCE)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._carried = TaskSet()
        self._thread = LoopThread("cocktail-bridge", self._main)

    def close(self) -> None:
        self._thread.stop()

    async def _main(self) -> None:
        with self._listener:
            while True:
                sock, _ = await accept(self._listener)
                if len(self._carried) < AT_ONCE:
                    self._carried.start(self._carry(SocketStream(prepare(sock))))
                else:
                    sock.close()

    async def _carry(self, near: Stream) -> None:
        with closing(near):
            try:
                far, _ = await request(self._route, self._route.name, ANSWER_S)
            except Unreachable:  # the dialler finds its connection closed, and asks for the reason by a probe
                return
            with closing(far):
                await splice(near, far)


def unreachable(there: FarRoute | Proxy, layer: str, why: str) -> Unreachable:
    """Make the error of a route that leads nowhere."""
    return Unreachable(there.host, there.port, layer, why, *([HINTS[layer]] if layer in HINTS else ()))


async def open_stream(route: FarRoute, timeout: float | None = None) -> Stream:
    """Connect along a route. Raises Unreachable: dns, tcp, proxy or tls.

    A certificate that this machine does not trust is no failure: no secret of a run depends on TLS, and the
    way without TLS was tried before.
    """
    steps = list[str]()  # taken so far, as layers of an Unreachable
    try:
        async with asyncio.timeout(timeout or (FAR_S if route.tls or route.proxy else PLAIN_S)):
            try:
                return await opened(route, steps, client_context(True))
            except ssl.SSLCertVerificationError as error:
                stream = await opened(route, steps, client_context(False))
                if isinstance(stream, WebSocketStream):
                    stream.untrusted = error.verify_message
                return stream
    except (ProxyRefused, OSError, ValueError) as error:
        failed = {
            "tcp": f"no connection to {replace(route, tls=False)}",
            "proxy": f"no way through the proxy {route.proxy} to {route.address}",
            "tls": f"no WebSocket over TLS with the relay {route.address}",
        }[steps[-1]]
        raise unreachable(route, steps[-1], f"{failed}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time (a firewall?)"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


async def opened(route: FarRoute, steps: list[str], context: ssl.SSLContext) -> Stream:
    """Take the steps of a route; raises what they raise."""
    proxy = route.proxy
    steps.append("proxy" if proxy else "tcp")
    if proxy and proxy.scheme not in PROXY_PORTS:
        raise ProxyRefused(f"of proxies, {', '.join(PROXY_PORTS)} are supported")
    stream: Stream = await connected(proxy or route)
    try:
        if proxy and proxy.scheme == "https":  # always verified: a login is sent inside
            stream = await TlsStream(stream, client_context(True), proxy.host).handshake()
        if proxy:
            ask_proxy = socks_connect if proxy.scheme.startswith("socks") else http_connect
            await ask_proxy(stream, proxy, route.host, route.port)
        if route.tls:
            steps.append("tls")
            stream = await open_websocket(stream, route.host, route.port, context)
    except BaseException:
        stream.close()
        raise
    return stream


async def connected(there: FarRoute | Proxy) -> SocketStream:
    """Connect to the first address that answers. Raises OSError, and Unreachable (dns; a proxy: proxy)."""
    host, port = there.host, there.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # no such name, or no name
        strerror = getattr(error, "strerror", "") or error
        layer = "proxy" if isinstance(there, Proxy) else "dns"
        raise unreachable(there, layer, f"no address for the name {host!r}: {strerror}") from None
    failed = OSError("no address")
    for _, _, _, _, address in found:
        try:  # the first may be one that no packet reaches
            return await dial(str(address[0]), port, timeout=PLAIN_S / len(found))
        except OSError as error:
            failed = error
    raise failed


async def request(route: FarRoute, name: str, timeout: float | None = None) -> tuple[Stream, str]:
    """Open a route to a relay, and ask it for a name; return the stream to whoever has that name, and the
    text of the answer. No `name`: nothing is asked.

    Raises Unreachable: dns, tcp, proxy, tls, or relay, where something answers and says no.
    """
    stream, text = await open_stream(route, timeout), ""
    try:
        async with asyncio.timeout(timeout or PLAIN_S):
            if name:
                await stream.send(relay_socks.request(name))
                code, text = await relay_socks.read_reply(stream)
                if code != relay_socks.ACCEPTED:
                    raise unreachable(route, "relay", f"{route}: {text}")
    except BaseException as error:
        stream.close()
        if not isinstance(error, (OSError, ValueError)):
            raise
        why = f"what answers at {route.address} is no relay: {reason_of(error)}"
        raise unreachable(route, "relay", why) from None
    return stream, text


async def ask(route: FarRoute, name: str, timeout: float | None = None) -> str:
    """Ask as `request`, and close; return the text of the answer. Raises Unreachable, as `request`."""
    stream, text = await request(route, name, timeout)
    stream.close()
    return text


async def first_answer(routes: Sequence[FarRoute], name: str) -> tuple[str, FarRoute]:
    """Ask along the first of these ways to a relay that works; return the answer's text and that way. Raises
    Unreachable, which names why each does not."""
    failed = list[Unreachable]()
    for route in routes:
        try:
            return await ask(route, name), route
        except Unreachable as error:
            failed.append(error)
    raise Unreachable.of(failed)
