"""The dashboard over HTTP, served by Starlette and uvicorn.

- The page is static, draws the document of `/run.json`, and is read-only: it answers GET and HEAD.
- Anyone who reaches it sees the run; the join line needs the page's key, from this machine.
- Other sites cannot read it: the Host must be an address or localhost (DNS rebinding), nothing is shared
  across origins, and it loads nothing from elsewhere.
- The run is read once a second at most, however many clients watch.
- Connections are bounded in number, and none waits for its client for long.

uvicorn waits for ever for the rest of a request, and for a client that reads nothing; and it answers 503 to
all while too many of such are open. Here the one that came first makes room for a new one, of the address
that has most of those that wait. So whoever asks in one go is answered, whatever others hold open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from cocktail_cli.errors import Failure

from .report_page import Document

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn import Server

CONNECTION = "connection"  # in the state of a request: what it came on
PATIENCE = 10.0  # seconds for a whole request, from the connection or from the answer before
TAKES = 16 * 1024  # bytes of an answer that a client takes in that time


class Room:
    """All connections of a page.

    Args:
        http: uvicorn's protocol, which handles a connection.
        most: connections at once.
        patience: seconds that each of them waits for its client.
    """

    def __init__(self, http: Callable[..., asyncio.Protocol], most: int, patience: float = PATIENCE) -> None:
        self.http, self.most, self.patience = http, most, patience
        self.connections: dict[Connection, None] = {}  # in the order in which they came

    def protocol(self, **given: Any) -> Connection:
        """Make the protocol of a new connection, of what uvicorn gives to one of its own."""
        return Connection(self, given)

    def enter(self, new: Connection) -> None:
        """Take a connection, and end one where there are too many: the new one if all others compute."""
        self.connections[new] = None
        if len(self.connections) > self.most:
            waiting = [one for one in self.connections if one.waits and one is not new]
            crowd = Counter(one.address for one in waiting).most_common(1)
            ended = next((one for one in waiting if one.address == crowd[0][0]), new)
            self.leave(ended)
            ended.transport.abort()

    def leave(self, gone: Connection) -> None:
        self.connections.pop(gone, None)


class Connection(asyncio.Protocol):
    """A connection that uvicorn's protocol handles, and that ends when its client takes too long."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle

    def __init__(self, room: Room, given: dict[str, Any]) -> None:
        self.room, self.address = room, ""
        self.answering = False  # the page is asked for an answer
        self.paused = False  # the client does not read what is written
        self.left = 0  # bytes that it had not taken when the timer was set
        state = {**given.pop("app_state"), CONNECTION: self}
        self.inner = room.http(app_state=state, **given)

    @property
    def waits(self) -> bool:
        """Tell whether it is the client's turn."""
        return self.paused or not self.answering

    @contextmanager
    def answers(self) -> Iterator[None]:
        """Have the page's turn inside; then wait for the client to take the answer, and to ask again."""
        self.answering = True
        try:
            yield
        finally:
            self.answering = False
            self.set_timer()

    def set_timer(self) -> None:
        self.timer.cancel()
        self.left = self.transport.get_write_buffer_size()
        self.timer = asyncio.get_running_loop().call_later(self.room.patience, self.expire)

    def expire(self) -> None:
        """End the connection, unless its client has read on, or it is not the client's turn."""
        taken = self.left - self.transport.get_write_buffer_size()
        if self.waits and taken < TAKES:
            self.transport.abort()
        else:
            self.set_timer()

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        self.inner.connection_made(transport)
        self.timer = asyncio.get_running_loop().call_later(self.room.patience, self.expire)
        self.room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        self.room.leave(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> None:
        self.inner.eof_received()

    def pause_writing(self) -> None:
        self.paused = True
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.paused = False
        self.inner.resume_writing()


PORT = 29480
AGAIN = 1.0  # seconds between two reads of the run
WATCHERS = 64  # connections at once
HEAD = 16 * 1024  # bytes of a request
BUFFER = 64 * 1024  # bytes of an answer that the system holds
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
logger = logging.getLogger(__name__)


class Screen:
    """A cache of the newest document, shared by all clients."""

    def __init__(self, look: Callable[[], Document], again: float) -> None:
        self.newest, self.again = look, again
        self.lock = threading.Lock()
        self.at, self.drawn = 0.0, ""

    def look(self) -> str:
        """Return the document as JSON."""
        with self.lock:
            if not self.drawn or time.monotonic() - self.at >= self.again:
                self.drawn = json.dumps(self.newest())
                self.at = time.monotonic()
            return self.drawn


# ---- HTTP --------------------------------------------------------------------------------------------------


def application(
    look: Callable[[], Document], key: str, join_line: Callable[[], str], again: float = AGAIN
) -> Starlette:
    """Build the application of one page.

    Args:
        look: reads the run, or the runs, anew.
        key: the secret that a client shows to receive the join line.
        join_line: returns the line, or "" where nobody can join.
        again: seconds between two reads of the run.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from transport.protocol import TransportError

    screen = Screen(look, again)

    def run(request: Request) -> Response:
        try:
            drawn = screen.look().encode()
        except (TransportError, OSError) as error:
            logger.warning("the run cannot be read: %s", error)
            return PlainTextResponse("The run cannot be read at the moment.", 503)
        tag = f'"{hashlib.sha256(drawn).hexdigest()[:32]}"'
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304)
        return Response(drawn, media_type="application/json", headers={"ETag": tag})

    def join(request: Request) -> Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        client = address_of(request.client.host) if request.client else None
        if not (client and client.is_loopback and hmac.compare_digest(given.encode(), key.encode())):
            return PlainTextResponse("The join line is for the run's host.", 403)
        line = join_line()
        return PlainTextResponse(line, 200 if line else 204)  # a browser logs 404 as an error

    return Starlette(
        routes=[
            Route("/", part("page.html", "text/html")),
            Route("/run.json", run),
            Route("/join", join),
            *(Route(f"/{name}", part(name, kind)) for name, kind in PARTS.items()),
        ],
        middleware=[Middleware(Guard)],
    )


PARTS = {
    "vendor/uPlot.iife.min.js": "text/javascript",
    "page.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}


def part(name: str, kind: str) -> Callable[[Request], Response]:
    """Create an endpoint that serves one file of the folder `page`."""
    from starlette.responses import Response

    body = read_part(name)
    return lambda request: Response(body, media_type=kind)


def read_part(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


class Guard:
    """Middleware that refuses foreign hosts, adds security headers, and says when it is the page's turn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self.app
        if not is_own_host(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse("Ask for this page by its address, or by localhost.", 421)
        connection = scope.get("state", {}).get(CONNECTION)
        with nullcontext() if connection is None else connection.answers():  # None: another server than ours
            await app(scope, receive, with_headers)


def is_own_host(host: str) -> bool:
    """Tell whether a Host header is an address or localhost.

    A stranger's page could make a browser ask us under a name of its own (DNS rebinding); the browser then
    sends that name.
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name == "localhost" or address_of(name.strip("[]")) is not None


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


# ---- the server --------------------------------------------------------------------------------------------


def listen(bind: str, port: int | None) -> socket.socket:
    """Open a listening socket; without a port PORT, or a free one where that is taken.

    Raises:
        Failure: port_in_use, preflight.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    if port is None:
        with suppress(OSError):
            return with_small_buffers(socket.create_server((bind, PORT), family=family))
    try:
        return with_small_buffers(socket.create_server((bind, port or 0), family=family))
    except socket.gaierror as error:
        hints = ("--bind 127.0.0.1, or another address of this machine",)
        raise Failure(
            "preflight", f"no address to listen on: {bind}: {error.strerror}", hints=hints
        ) from error
    except OSError as error:
        hints = ("choose another: --port 0 takes a free one",)
        raise Failure(
            "port_in_use", f"cannot listen on {bind}:{port}: {error.strerror}", hints=hints
        ) from error


def with_small_buffers(sock: socket.socket) -> socket.socket:
    """Bound what the system holds of an answer, so that a slow client is seen to read."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # its connections inherit it
    return sock


def server(app: Starlette, patience: float = PATIENCE) -> Server:
    """Build the server of an application. `patience`: seconds that a connection waits for its client."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    room = Room(H11Protocol, WATCHERS, patience)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=cast("Any", room.protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # of warnings there is one for each line that is no request
            access_log=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEAD,
        )
    )
