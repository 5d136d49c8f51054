"""Opens a route: connects, goes through its proxy, and puts the WebSocket on; each failure names its step."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from transport.protocol import PROXY_PORTS, Proxy, Route, Unreachable

from . import relay_socks
from .proxy_handshake import ProxyRefused, http_connect, socks_connect
from .streams import SocketStream, Stream, dial
from .websocket_stream import TlsStream, WebSocketStream, client_context, open_websocket

PLAIN_S, FAR_S = 5.0, 8.0  # to open a route: as it is, and with a proxy or TLS on the way


async def open_stream(route: Route, timeout: float | None = None) -> Stream:
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
        raise Unreachable(route.host, route.port, steps[-1], f"{failed}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time (a firewall?)"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


async def opened(route: Route, steps: list[str], context: ssl.SSLContext) -> Stream:
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
        try:  # the first may be one that no packet reaches
            return await dial(str(address[0]), port, timeout=PLAIN_S / len(found))
        except OSError as error:
            failed = error
    raise failed


async def request(route: Route, name: str, timeout: float | None = None) -> tuple[Stream, str]:
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
                    raise Unreachable(route.host, route.port, "relay", f"{route}: {text}")
    except BaseException as error:
        stream.close()
        if not isinstance(error, (OSError, ValueError)):
            raise
        why = f"what answers at {route.address} is no relay: {reason_of(error)}"
        raise Unreachable(route.host, route.port, "relay", why) from None
    return stream, text


async def ask(route: Route, name: str, timeout: float | None = None) -> str:
    """Ask as `request`, and close; return the text of the answer. Raises Unreachable, as `request`."""
    stream, text = await request(route, name, timeout)
    stream.close()
    return text


class Answer(NamedTuple):
    """A relay's answer, the way that led there, and the seconds that it took."""

    text: str
    route: Route
    seconds: float


async def first_answer(routes: Sequence[Route], name: str, timeout: float | None = None) -> Answer:
    """Ask along the first of these ways to a relay that works. Raises Unreachable, which names why each does
    not."""
    failed = list[Unreachable]()
    for route in routes:
        began = time.monotonic()
        try:
            return Answer(await ask(route, name, timeout), route, time.monotonic() - began)
        except Unreachable as error:
            failed.append(error)
    raise Unreachable.of(failed)


def probe(route: Route) -> None:
    """See whether a route answers; of a relay, whether it has the hub. Blocks. Raises Unreachable."""
    run = route.name.partition(".")[0]
    asyncio.run(ask(route, run and f"{run}.{relay_socks.PROBE}"))


def round_trip(routes: Sequence[Route], timeout: float) -> float:
    """Return the seconds to the server behind a relay and back, along the first of these ways that works:
    half of what the relay takes to join it, which dials back. Blocks. Raises Unreachable."""
    return asyncio.run(first_answer(routes, routes[0].name, timeout)).seconds / 2


def certificate_doubt(route: Route) -> str:
    """Return why the certificate at a route by TLS is not trusted here, "" where it is. Blocks. Raises
    Unreachable."""
    stream = asyncio.run(open_stream(route))
    stream.close()
    return str(getattr(stream, "untrusted", ""))
