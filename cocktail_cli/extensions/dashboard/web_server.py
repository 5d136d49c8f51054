"""The dashboard over HTTP: what is answered to whom, and the connections that ask.

- The page is static, draws the document of `/run.json`, and is read-only: it answers GET and HEAD.
- `/metrics` has the figures of the page for Prometheus, in OpenMetrics' text.
- Anyone who reaches it sees the run; the join line needs the page's key, from this machine.
- Other sites cannot read it: the Host must be an address or localhost (DNS rebinding), nothing is shared
  across origins, and it loads nothing from elsewhere.
- The run is read once a second at most, however many clients watch.
- Connections are bounded in number, and none waits for its client for long: the one that came first makes
  room for a new one, of the address that has most of those that wait. So whoever asks in one go is answered,
  whatever others hold open.

The protocol is h11's, without I/O. Not a server of others, such as uvicorn: it waits for ever for the rest of
a request, and for a client that reads nothing, and answers 503 to all while too many of such are open.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import h11

from cocktail_cli.errors import Failure

from .report_page import metrics_of, page_of
from .run_history import RunHistory

PORT = 29480
AGAIN = 1.0  # seconds between two reads of the run
WATCHERS = 64  # connections at once
HEAD = 16 * 1024  # bytes of a request
BUFFER = 64 * 1024  # bytes of an answer that the system holds
PATIENCE = 10.0  # seconds for a whole request, from the connection or from the answer before
TAKES = 16 * 1024  # bytes of an answer that a client takes in that time
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
DRAWN: dict[str, tuple[Callable[[Sequence[RunHistory]], str], str]] = {  # of the runs, anew; type of the text
    "/run.json": (lambda runs: json.dumps(page_of(runs)), "application/json"),
    "/metrics": (metrics_of, "application/openmetrics-text; version=1.0.0"),
}
PARTS = {
    "vendor/uPlot.iife.min.js": "text/javascript",
    "page.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
log = logging.getLogger(__name__)


def read_part(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


# ---- what is answered --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    kind: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)  # beside HEADERS


@dataclass
class Page:
    """The page of a run, or of several, whose document all clients share.

    Args:
        look: reads the runs anew.
        key: the secret that a client shows to receive the join line.
        join_line: returns the line, or "" where nobody can join.
        again: seconds between two reads of the run.
    """

    look: Callable[[], Sequence[RunHistory]]
    key: str
    join_line: Callable[[], str]
    again: float = AGAIN

    def __post_init__(self) -> None:
        self._lock, self._at, self._runs = threading.Lock(), 0.0, tuple[RunHistory, ...]()
        self._drawn: dict[str, str] = {}  # texts of these runs, by their paths
        self._parts = {f"/{name}": Answer(200, read_part(name), kind) for name, kind in PARTS.items()}
        self._parts["/"] = Answer(200, read_part("page.html"), "text/html")

    def answer(self, method: str, target: str, headers: Mapping[str, str], client: str) -> Answer:
        """Answer a request. `headers`: by names in small letters; `client`: its address."""
        path = target.partition("?")[0]
        if not is_own_host(headers.get("host", "")):
            return Answer(421, "Ask for this page by its address, or by localhost.")
        if path not in ("/join", *DRAWN, *self._parts):
            return Answer(404, "There is no such part of this page.")
        if method not in ("GET", "HEAD"):
            return Answer(405, "This page can only be read.", headers={"Allow": "GET, HEAD"})
        if path in DRAWN:
            return self._draw(path, headers.get("if-none-match", ""))
        return self._parts.get(path) or self._join(headers.get("authorization", ""), client)

    def _draw(self, path: str, known: str) -> Answer:
        from transport.protocol import TransportError

        try:
            with self._lock:
                if not self._runs or time.monotonic() - self._at >= self.again:
                    self._runs, self._at, self._drawn = tuple(self.look()), time.monotonic(), {}
                if path not in self._drawn:
                    self._drawn[path] = DRAWN[path][0](self._runs)
                drawn = self._drawn[path]
        except (TransportError, OSError) as error:
            log.warning("the run cannot be read: %s", error)
            return Answer(503, "The run cannot be read at the moment.")
        tag = f'"{hashlib.sha256(drawn.encode()).hexdigest()[:32]}"'
        if known == tag:
            return Answer(304)
        return Answer(200, drawn, DRAWN[path][1], {"ETag": tag})

    def _join(self, shown: str, client: str) -> Answer:
        given, address = shown.removeprefix("Bearer "), address_of(client)
        if not (address and address.is_loopback and hmac.compare_digest(given.encode(), self.key.encode())):
            return Answer(403, "The join line is for the run's host.")
        line = self.join_line()
        return Answer(200, line) if line else Answer(204)  # a browser logs 404 as an error


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


# ---- connections -------------------------------------------------------------------------------------------


class PageServer:
    """Serves a page at a listening socket. `patience`: seconds that a connection waits for its client."""

    def __init__(self, page: Page, patience: float = PATIENCE) -> None:
        self.page, self.patience = page, patience
        self.connections: dict[Connection, None] = {}  # in the order in which they came

    async def serve(self, sock: socket.socket) -> None:
        """Serve until this is cancelled."""
        threads = ThreadPoolExecutor(WATCHERS)  # a run that is slow to read holds up none of its parts
        asyncio.get_running_loop().set_default_executor(threads)
        async with await asyncio.start_server(self._connected, sock=sock, limit=HEAD) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        new = Connection(self, reader, writer)
        self.connections[new] = None
        if len(self.connections) > WATCHERS:
            self._end_one(new)
        try:
            with suppress(OSError, asyncio.CancelledError):  # the page ends
                await new.answer_all()
        finally:
            writer.transport.abort()  # all is sent, or nobody takes it
            self.connections.pop(new, None)

    def _end_one(self, new: Connection) -> None:
        """End a connection, as there are too many: the new one if all others compute."""
        waiting = [one for one in self.connections if one.waits and one is not new]
        crowd = Counter(one.client for one in waiting).most_common(1)
        ended = next((one for one in waiting if one.client == crowd[0][0]), new)
        self.connections.pop(ended)
        ended.writer.transport.abort()


class Connection:
    """A connection, on which one request is answered after the other."""

    def __init__(
        self, server: PageServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        peer = writer.get_extra_info("peername")
        self.client = str(peer[0]) if peer else ""
        self.waits = True  # it is the client's turn
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        writer.transport.set_write_buffer_limits(high=0)

    async def answer_all(self) -> None:
        """Answer until an end has enough. Raises OSError."""
        try:
            while isinstance(request := await self._event(h11.Request, h11.ConnectionClosed), h11.Request):
                self.waits = False
                head = {name.decode(): value.decode("latin-1") for name, value in request.headers}
                method, target = request.method.decode(), request.target.decode("latin-1")
                asked = method, target, head, self.client
                answer = await asyncio.to_thread(self.server.page.answer, *asked)
                self.waits = True
                await self._send(answer, body=method != "HEAD")
                await self._event(h11.EndOfMessage, h11.ConnectionClosed)  # a body that nobody wants
                if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
                    return
                self.http.start_next_cycle()
        except h11.RemoteProtocolError:
            if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await self._send(Answer(400, "This is no request."), body=True)

    async def _event(self, *kinds: type[h11.Event]) -> h11.Event:
        """Return the next event of these kinds, which the client has to bring in time."""
        async with asyncio.timeout(self.server.patience):
            while not isinstance(event := self.http.next_event(), kinds):
                if event is h11.NEED_DATA:
                    self.http.receive_data(await self.reader.read(HEAD))
        return event

    async def _send(self, answer: Answer, body: bool) -> None:
        """Send an answer, of which the client has to take some in time."""
        data = answer.text.encode()
        told = {**HEADERS, **answer.headers}
        if answer.status not in (204, 304):
            told |= {"Content-Type": f"{answer.kind}; charset=utf-8", "Content-Length": str(len(data))}
        parts: list[Any] = [h11.Response(status_code=answer.status, headers=[*told.items()])]
        parts += [h11.Data(data=data)] if body and data else []
        sent = b"".join(self.http.send(part) or b"" for part in (*parts, h11.EndOfMessage()))
        self.writer.write(sent)
        left = len(sent)
        while left:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.server.patience):
                    await self.writer.drain()
            before, left = left, self.writer.transport.get_write_buffer_size()
            if left and before - left < TAKES:
                raise TimeoutError


def listen(bind: str, port: int | None) -> socket.socket:
    """Open a listening socket; without a port PORT, or a free one where that is taken.

    Raises:
        Failure: port_in_use, preflight.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    if port is None:
        with suppress(Failure):
            return listen(bind, PORT)
    try:
        sock = socket.create_server((bind, port or 0), family=family)
    except socket.gaierror as error:
        said = f"no address to listen on: {bind}: {error.strerror}"
        hints = ("--bind 127.0.0.1, or another address of this machine",)
        raise Failure("preflight", said, hints=hints) from error
    except OSError as error:
        said = f"cannot listen on {bind}:{port}: {error.strerror}"
        hints = ("choose another: --port 0 takes a free one",)
        raise Failure("port_in_use", said, hints=hints) from error
    # its connections inherit it: where the system holds little, a slow client is seen to read
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return sock
