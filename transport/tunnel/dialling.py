"""Opens a route: connects, goes through its proxy, and puts the WebSocket on; each failure names its step."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from transport.protocol import PROXY_PORTS, Proxy, Route, Unreachable

from . import relay_socks
from .proxy_handshake import ProxyRefused, through_proxy
from .streams import SocketStream, Stream, converse, dial
from .websocket_stream import TlsStream, WebSocketStream, client_context, open_websocket

PLAIN_S, FAR_S = 5.0, 8.0  # to open a route: as it is, and with a proxy or TLS on the way


@dataclass
class Step:
    """The step that is being taken, as the layer of an Unreachable."""

    layer: str = "tcp"


async def open_stream(route: Route, timeout: float | None = None) -> Stream:
    """Connect along a route. Raises Unreachable: dns, tcp, proxy or tls.

    A certificate that this machine does not trust is no failure: no secret of a run depends on TLS, and the
    way without TLS was tried before.
    """
    step, proxy = Step(), route.proxy
    try:
        async with asyncio.timeout(timeout or (FAR_S if route.tls or route.proxy else PLAIN_S)):
            try:
                return await opened(route, step, client_context(True))
            except ssl.SSLCertVerificationError as error:
                stream = await opened(route, step, client_context(False))
                if isinstance(stream, WebSocketStream):
                    stream.untrusted = error.verify_message
                return stream
    except (ProxyRefused, OSError, ValueError) as error:
        why = reason_of(error)
    host, port, at, plainly = route.host, route.port, route.address, replace(route, tls=False)
    if step.layer == "tls":
        raise Unreachable(host, port, "tls", f"no WebSocket over TLS with the relay {at}: {why}")
    if step.layer == "proxy":
        raise Unreachable(host, port, "proxy", f"no way through the proxy {proxy} to {at}: {why}")
    raise Unreachable(host, port, "tcp", f"no connection to {plainly}: {why}")


def reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time (a firewall?)"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


async def opened(route: Route, step: Step, context: ssl.SSLContext) -> Stream:
    """Take the steps of a route; raises what they raise."""
    step.layer = "proxy" if route.proxy else "tcp"
    if route.proxy and route.proxy.scheme not in PROXY_PORTS:
        raise ProxyRefused(f"of proxies, {', '.join(PROXY_PORTS)} are supported")
    stream: Stream = await connected(route.proxy or route)
    try:
        if route.proxy and route.proxy.scheme == "https":  # always verified: a login is sent inside
            stream = tls = TlsStream(stream, client_context(True), route.proxy.host)
            await tls.handshake()
        if route.proxy:
            stream = await through_proxy(stream, route.proxy, route.host, route.port)
        if route.tls:
            step.layer = "tls"
            stream = await open_websocket(stream, route.host, route.port, context)
    except BaseException:
        stream.close()
        raise
    return stream


async def connected(there: Route | Proxy) -> SocketStream:
    """Connect to the first address that answers. Raises OSError, and Unreachable (dns; a proxy: proxy)."""
    host, port = there.host, there.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # no such name, or no name
        strerror = getattr(error, "strerror", "") or error
        layer = "proxy" if isinstance(there, Proxy) else "dns"
        raise Unreachable(host, port, layer, f"no address for the name {host!r}: {strerror}") from None
    failed = OSError("no address")
    for _, _, _, _, address in found:
        try:
            async with asyncio.timeout(PLAIN_S / len(found)):  # the first may be one that no packet reaches
                return await dial(str(address[0]), port)
        except OSError as error:
            failed = error
    raise failed


async def request(route: Route, name: str, timeout: float | None = None) -> tuple[Stream, str]:
    """Open a route to a relay, and ask it for a name; return the stream to whoever has that name, and the
    text of the answer. No `name`: nothing is asked.

    Raises Unreachable: dns, tcp, proxy, tls, or relay, where something answers and says no.
    """
    stream, text = await open_stream(route, timeout), ""
    if not name:
        return stream, text
    try:
        async with asyncio.timeout(timeout or PLAIN_S):
            await stream.send(relay_socks.request(name))
            code, text = await converse(stream, relay_socks.read_reply())
        if code != relay_socks.ACCEPTED:
            raise Unreachable(route.host, route.port, "relay", f"{route}: {text}")
    except (OSError, ValueError) as error:
        stream.close()
        where, said = route.address, reason_of(error)
        raise Unreachable(
            route.host, route.port, "relay", f"what answers at {where} is no relay: {said}"
        ) from None
    except BaseException:
        stream.close()
        raise
    return stream, text


async def ask(route: Route, name: str, timeout: float | None = None) -> tuple[str, str]:
    """Ask a relay for a name ending in `probe`; return its IP address, "" where that is not seen, and the
    text of its answer. Raises Unreachable, as `request`."""
    stream, text = await request(route, name, timeout)
    with closing(stream):
        return str(stream.sock.getpeername()[0]) if isinstance(stream, SocketStream) else "", text


def probe(route: Route) -> str:
    """Return the IP address of a route that answers, "" where a proxy knows it; of a relay, one that has the
    hub. Blocks. Raises Unreachable."""
    if route.name:
        return asyncio.run(ask(route, f"{route.name.partition('.')[0]}.{relay_socks.PROBE}"))[0]
    asyncio.run(closed(route))
    return ""


def round_trip(routes: Sequence[Route], timeout: float) -> float:
    """Return the seconds to the server behind a relay and back, along the first of these ways that works:
    half of what the relay takes to join it, which dials back. Blocks. Raises Unreachable."""
    failed = list[Unreachable]()
    for route in routes:
        began = time.monotonic()
        try:
            asyncio.run(closed(route, route.name, timeout))
        except Unreachable as error:
            failed.append(error)
            continue
        return (time.monotonic() - began) / 2
    raise Unreachable.of(failed)


async def closed(route: Route, name: str = "", timeout: float | None = None) -> Stream:
    """Open a route, ask for a name there, if any, and close it."""
    stream, _ = await request(route, name, timeout)
    stream.close()
    return stream


def certificate_doubt(route: Route) -> str:
    """Return why the certificate at a route by TLS is not trusted here, "" where it is. Blocks. Raises
    Unreachable."""
    return str(getattr(asyncio.run(closed(route)), "untrusted", ""))
