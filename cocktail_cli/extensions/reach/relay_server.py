"""The relay: hubs and peers dial it, and it joins a peer's connection with one that the hub makes for it.

It forwards ciphertext: CURVE stays between peer and hub, so it cannot join, read, forge or reorder. A hub
proves that it has a run's key by the CURVE handshake of its control connection, in which that key is the
client's. Nothing is stored: after a restart hubs claim their runs again.

On the control connection, one frame a message:

    claim                       hub: peers that ask for the run of this connection's key are mine
    claimed | full              relay
    guest <ticket> <origin>     relay: fetch this peer by dialling `<ticket>.guest`
    ping | pong                 hub | relay
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transport.protocol import AddressInUse, CurveKeys
from transport.wire import RouterWire, TokenBucket, TokenBuckets, key_of, origin, origin_of, raise_file_limit

from . import relay_socks
from .dialling import RUN, run_name
from .streams import (
    LoopThread,
    PolledWire,
    SocketStream,
    Stream,
    TaskSet,
    accept,
    dial_loopback,
    prepare,
    splice,
)
from .websocket_stream import TLS_FIRST, accept_websocket

FETCH_S = 10.0  # for a hub to fetch a peer
PING_S, LOST_S = 5.0, 15.0  # between a hub's pings; after such a silence its claim is over
DIALS, DIALS_S = 2048.0, 64.0  # connections of one origin: in a burst, and a second; a house has 256 peers
OF_ONE_ORIGIN = 2048  # 256 peers of one house, and some that are dialled anew
WAITING = 256  # connections of one run that its hub has not fetched yet
SPARE_FILES = 64


class CertificateError(Exception):
    """The files are not there, or are not a certificate and its key."""


class Certificate:
    """Settings of a TLS server, `context`, from two PEM files, which are renewed every few months. Raises
    CertificateError."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._cert, self._key = cert, key
        self._load()

    def renewed(self) -> str:
        """Read changed files again, for the connections to come; return, once, what is wrong with them."""
        try:
            if self._written() != self._read:
                self._load()
        except CertificateError as error:
            return str(error)
        return ""

    def _written(self) -> list[int]:
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in (self._cert, self._key)]

    def _load(self) -> None:
        self._read = self._written()
        try:
            for path in (self._cert, self._key):
                path.read_bytes()  # an error of this one has the file's name
            # else it would ask at the terminal
            self.context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            why = error.reason or str(error)
            raise CertificateError(f"not a certificate (PEM) and its private key ({why})") from None
        except OSError as error:
            raise CertificateError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None


@dataclass(frozen=True)
class RelayLimits:
    """Limits of a relay: how many runs there may be, and how much each may use."""

    runs: int = 64
    connections: int = 4096  # of the peers of one run; a peer has up to five
    rate: float | None = None  # bytes a second of one run, both directions together
    of_one_origin: int = OF_ONE_ORIGIN  # connections at once, and no more than a quarter of all
    hello_s: float = 5.0  # for a connection to say what it wants


@dataclass
class RelayedRun:
    """A run whose hub is here."""

    conn: bytes  # its hub's control connection
    heard: float  # when the hub last said something
    bucket: TokenBucket
    connections: int = 0
    waiting: int = 0

    def pause(self, size: int) -> float:
        """Return how long the run has to wait after so many bytes."""
        now = time.monotonic()
        self.bucket.take(size, now)
        return self.bucket.open_at(now) - now


@dataclass
class Announced:
    """A peer's connection that its hub should fetch."""

    run: RelayedRun
    tunnel: asyncio.Future[Stream]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Refusal(Exception):
    """The relay says no, with this code and text."""


class Relay:
    """A relay on one TCP port; port 0 takes a free one, and `port` says which. Raises AddressInUse.

    With `tls`, the settings of a server, it is also reached by a WebSocket over TLS at the same port: the
    first byte of a connection tells.
    """

    def __init__(
        self, host: str, port: int, limits: RelayLimits = RelayLimits(), tls: ssl.SSLContext | None = None
    ) -> None:
        self.limits, self._tls = limits, tls
        self.refused = 0  # connections closed at once by a limit
        self._most = (raise_file_limit() - SPARE_FILES) // 2  # a joined pair has two
        try:
            both = host == "::" and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server(
                (host, port), family=family, backlog=1024, dualstack_ipv6=both
            )
        except OSError as error:
            raise AddressInUse(host, port, error.strerror or str(error)) from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._keys = CurveKeys.generate()  # new at each start: hubs ask for it
        self._router = RouterWire("127.0.0.1", 0, self._keys)
        self._wire = PolledWire(self._router)
        self._runs: dict[str, RelayedRun] = {}  # by the name that peers ask for
        self._announced: dict[str, Announced] = {}  # by ticket
        self._served = TaskSet()
        self._of_origin: Counter[str] = Counter()
        self._dials = TokenBuckets(DIALS_S, DIALS)
        self._kinds = {
            RUN: self._peer,
            relay_socks.PROBE: self._probe,
            relay_socks.GUEST: self._fetched,
            relay_socks.RELAY: self._control,
        }
        self._thread = LoopThread("cocktail-relay", self._main)

    def close(self) -> None:
        """End all connections. Hubs and peers dial again, or another way."""
        self._thread.stop()

    @property
    def runs(self) -> int:
        """Count the runs whose hub is here."""
        return len(self._runs)

    @property
    def connections(self) -> int:
        """Count the connections that are served now."""
        return len(self._served)

    async def _main(self) -> None:
        accepting = asyncio.create_task(self._accept())
        try:
            async for messages in self._wire.events():
                now = time.monotonic()
                for conn, frames in messages:
                    self._receive(conn, bytes(frames[0]).decode("ascii", "replace"), now)
                for name, run in list(self._runs.items()):
                    if now >= run.heard + LOST_S or not self._router.is_open(run.conn):
                        self._lost(name, run)
                self._wire.next_turn(partial(self._router.guard, now, self._claimant))
        finally:
            accepting.cancel()
            self._listener.close()
            await self._wire.close()

    # ---- hubs ----------------------------------------------------------------------------------------------

    def _claimant(self, conn: bytes) -> str | None:
        """Return the key of a connection that holds a claim; others are closed as strangers."""
        key = key_of(conn)
        run = self._runs.get(run_name(key))
        return key if run is not None and run.conn == conn else None

    def _receive(self, conn: bytes, message: str, now: float) -> None:
        """Handle a hub's message. The key of its connection is proven, and names the run."""
        name = run_name(key_of(conn))
        run = self._runs.get(name)
        if message == "claim":
            if run is None and not self._has_room(origin_of(conn)):
                self._say(conn, "full")
                return
            if run is None:
                run = self._runs[name] = RelayedRun(conn, now, TokenBucket(self.limits.rate))
            run.conn = conn
            self._say(conn, "claimed")
        elif message == "ping" and run is not None and run.conn == conn:
            run.heard = now
            self._say(conn, "pong")

    def _lost(self, name: str, run: RelayedRun) -> None:
        """Forget a run whose hub is gone, and the connections that it was to fetch: they need not wait."""
        del self._runs[name]
        for one in self._announced.values():
            if one.run is run and not one.tunnel.done():
                one.tunnel.set_exception(TimeoutError())

    def _has_room(self, where: str) -> bool:
        """Return whether a hub of this origin may claim a run; one origin gets a quarter of them."""
        of_origin = sum(origin_of(run.conn) == where for run in self._runs.values())
        return len(self._runs) < self.limits.runs and of_origin < max(1, self.limits.runs // 4)

    def _say(self, conn: bytes, message: str) -> None:
        self._wire.call(lambda: self._router.send(conn, [message.encode()]))

    # ---- connections ---------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        while True:
            sock, address = await accept(self._listener)
            where, most = origin(address[0]), min(self.limits.of_one_origin, self._most // 4)
            many = len(self._served) >= self._most or self._of_origin[where] >= most
            if many or not self._dials.take(where, time.monotonic()):
                self.refused += 1
                sock.close()
                continue
            self._count(where, 1)  # here: a flood is accepted before any of its tasks begins
            self._served.start(self._serve(sock, where))

    async def _serve(self, sock: socket.socket, where: str) -> None:
        stream: Stream = SocketStream(prepare(sock))
        try:
            async with asyncio.timeout(self.limits.hello_s):
                first = await stream.receive(1)
                stream = SocketStream(sock, first)
                if first == TLS_FIRST and self._tls is not None:
                    stream = await accept_websocket(stream, self._tls)
                head, _, kind = (await relay_socks.read_request(stream)).rpartition(".")
            if kind in self._kinds:
                await self._kinds[kind](stream, head, where)
        except Refusal as refusal:
            with suppress(OSError):
                await stream.send(relay_socks.reply(*refusal.args))
        except (OSError, ValueError):  # it is gone, too slow, or speaks something else
            return
        finally:
            stream.close()
            self._count(where, -1)

    def _count(self, where: str, change: int) -> None:
        self._of_origin[where] += change
        if not self._of_origin[where]:
            del self._of_origin[where]

    def _run(self, name: str) -> RelayedRun:
        """Return the run of this name. Raises Refusal where a peer of it cannot be served now."""
        if (run := self._runs.get(name)) is None:
            raise Refusal(relay_socks.UNKNOWN, "the run's hub is not connected to it")
        if run.connections >= self.limits.connections or run.waiting >= WAITING:
            raise Refusal(relay_socks.FORBIDDEN, "the run has as many connections as it may")
        return run

    async def _probe(self, stream: Stream, name: str, where: str) -> None:
        if name == relay_socks.CONTROL:
            await stream.send(relay_socks.reply(relay_socks.ACCEPTED, self._keys.public))
        else:
            self._run(name)
            await stream.send(relay_socks.reply(relay_socks.ACCEPTED))

    async def _peer(self, stream: Stream, name: str, where: str) -> None:
        """Announce a peer's connection to the hub, and join it with the one that the hub makes."""
        run, ticket = self._run(name), secrets.token_hex(16)
        announced = Announced(run, asyncio.get_running_loop().create_future())
        self._announced[ticket] = announced
        run.connections += 1
        try:
            tunnel = await self._tunnel(run, announced, f"guest {ticket} {where}")
            await stream.send(relay_socks.reply(relay_socks.ACCEPTED))
            await splice(stream, tunnel, run.pause)
        finally:
            run.connections -= 1
            self._announced.pop(ticket, None)
            announced.over.set()

    async def _tunnel(self, run: RelayedRun, announced: Announced, message: str) -> Stream:
        """Have the hub make its connection for a peer. Raises Refusal where it does not."""
        run.waiting += 1
        try:
            self._say(run.conn, message)
            async with asyncio.timeout(FETCH_S):
                return await announced.tunnel
        except TimeoutError:
            raise Refusal(relay_socks.UNKNOWN, "the run's hub does not answer it") from None
        finally:
            run.waiting -= 1

    async def _fetched(self, stream: Stream, ticket: str, where: str) -> None:
        """Hand a hub's connection to the peer with this ticket. It is the peer's, and counts as such."""
        announced = self._announced.pop(ticket, None)
        if announced is None or announced.tunnel.done():
            raise Refusal(relay_socks.UNKNOWN, "nobody waits with this ticket")
        self._dials.fine(where, time.monotonic(), -1)
        self._count(where, -1)
        try:
            await stream.send(relay_socks.reply(relay_socks.ACCEPTED))
            if not announced.tunnel.done():  # else the peer was given up meanwhile
                announced.tunnel.set_result(stream)
                await announced.over.wait()
        finally:
            self._count(where, 1)

    async def _control(self, stream: Stream, _: str, where: str) -> None:
        """Join a hub's control connection with the ROUTER, which guards it and learns its key."""
        await stream.send(relay_socks.reply(relay_socks.ACCEPTED))
        with closing(await dial_loopback("127.0.0.1", self._router.port, where)) as router:
            await splice(stream, router)
