"""ZeroMQ ends of the wire, always with CURVE. PROTOCOL.md, "Socket options", has the reasons.

One ROUTER at the hub on one TCP port accepts control and bulk connections alike; a peer has a DEALER for
each. No routing ids are set: a fixed id is a permanent black hole after a half-open connection, or can be
taken over. The hub's name for a connection begins with the key proven in its handshake (ZAP, RFC 27), so a
stranger that takes the routing id of a dead connection is another connection.

A dialled connection that ends is discarded with its queues, and a fresh one is made: the application repeats
what a reconnect would deliver late or lose silently.

The plain way to a server is an address that is asked whether it accepts connections, as ZeroMQ would retry
silently and not report what failed.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.protocol import (
    AddressInUse,
    CurveKeys,
    OpenRoute,
    ProtocolError,
    Route,
    RunURL,
    Unreachable,
    UrlError,
    as_z85,
    join_address,
    messages,
    parse_address,
    to_base64,
)

from .connection_guard import (
    HANDSHAKE_DOWN,
    LINUX,
    ConnectionGuard,
    counts_of,
    origin,
    tcp_counters,
    unread,
    wire_size,
    with_socket,
)
from .frames import (
    Connected,
    Disconnected,
    Frames,
    Received,
    SharedPayload,
)

MAX_FRAME = messages.MAX_CHUNK + 1024  # CURVE adds 33
AT_ONCE = 64  # messages of a connection that are read before others have their turn
# Of a peer's connection: bytes that have come and are in no message yet. Whole ones wait within RCVHWM.
MOST_HELD = 6 << 20
LOOK_S = 0.05  # between two looks at that: 20 to 30 MB come on the loopback
LAST_WORDS_MS = 300  # to send the last messages if a hub ends without waiting for its peers
MANY_FILES = 1 << 20  # if a system names no limit
HANDSHAKE_S = 6.0  # from TCP connected to the key proven: a hub gives up after 5
SLOW_S = 4.0  # who lacks the key ends a handshake sooner: one that lasts so long is slow
HEAD_START_S = 1.5  # of a way before the next is tried beside it: a lost SYN is sent again after 1 s
STAY_S = 10.0  # a hub, or what leads to it, that is started again is back within this time
THREADLESS = ("can't start new thread", "after interpreter shutdown")  # of a RuntimeError
# Plain numbers: joining zmq's own flags takes Python longer than sending a frame.
READ_AT_ONCE, GIVEN_AT_ONCE = 512, 64  # messages
HUNG_UP = 16_384  # closed connections that are remembered
NOW, MORE_NOW = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


def set_options(sock: zmq.Socket[bytes], options: dict[str, int]) -> None:
    """Set the options that this platform's libzmq knows."""
    for name, value in options.items():
        option = getattr(zmq, name, None)
        if option is not None:
            with contextlib.suppress(zmq.ZMQError):  # e.g. TCP_MAXRT outside Linux: a refinement, not a need
                sock.setsockopt(option, value)


COMMON = {
    "LINGER": 0,
    "IPV6": 1,
    "TCP_MAXRT": 20_000,  # ms unacknowledged before TCP gives up; keepalive is blind while data is in flight
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 30,
    "TCP_KEEPALIVE_INTVL": 10,
    "TCP_KEEPALIVE_CNT": 3,
    "HANDSHAKE_IVL": 6_000,
}
HUB = {
    "MAXMSGSIZE": MAX_FRAME,
    "HANDSHAKE_IVL": 5_000,
    "ROUTER_MANDATORY": 1,
    "BACKLOG": 1024,
    "SNDHWM": 1000,
    "RCVHWM": 16,
}
PEER = {"SNDHWM": 1000, "IMMEDIATE": 1, "RECONNECT_IVL": -1, "CONNECT_TIMEOUT": 5_000}
# What a hub floods waits in the kernel, and then at the hub: 4 MiB in each queue here
OF_HUB = {"MAXMSGSIZE": messages.MAX_ANSWER + 1024, "RCVHWM": AT_ONCE // 4}
OF_PEERS = {"MAXMSGSIZE": MAX_FRAME, "RCVHWM": AT_ONCE}  # 64 KiB each, as a rule


class RouterWire:
    """The hub's ROUTER: a HubWire. Raises AddressInUse. One thread may call all but `wake` and `reaches`."""

    def __init__(
        self,
        host: str,
        port: int,
        keys: CurveKeys,
        io_threads: int = 2,
        allowed: Callable[[str], bool] = lambda key: True,
    ) -> None:
        files = raise_file_limit()
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._router = self._context.socket(zmq.ROUTER)
        set_options(self._router, COMMON | HUB)
        self._router.curve_server = True
        self._router.curve_publickey, self._router.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
        self._authenticator = KeyAuthenticator(self._context, allowed)
        self._router.zap_domain = b"cocktail"
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no connection without an answer
        self._guard = ConnectionGuard(self._context, self._router, files)
        try:
            self._router.bind(f"tcp://{join_address(host, port or '*')}")
            endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            self.port = int(endpoint.rpartition(b":")[2].strip(b"\0"))
        except zmq.ZMQError as error:
            self._guard.close()
            self._router.close(0)
            self._authenticator.close()
            self._context.term()
            reason = (
                "another program uses it" if error.errno in (errno.EADDRINUSE, zmq.EADDRINUSE) else str(error)
            )
            raise AddressInUse(host, port, reason) from None
        self._guard.port = self.port
        self._hung_up: dict[bytes, None] = {}  # routing ids of the newest connections that were closed
        self._waker = Waker(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._waker.inner, zmq.POLLIN)
        self._poller.register(self._authenticator.sock, zmq.POLLIN)
        # The rest of a HubWire; and any thread may ask whether a connection, of a message, `is_open` still.
        self.held, self.crossed, self.guard = self._guard.held, self._guard.crossed, self._guard.guard
        self.is_open, self.wake = self._guard.is_open, self._waker.wake

    def reaches(self, address: str, key: str) -> bool:
        return is_reachable(address, key, self._keys)

    def poll(self, timeout: float) -> list[tuple[bytes, Frames]]:
        ready = dict(self._poller.poll(max(0, round(timeout * 1000))))
        if self._waker.inner in ready:
            self._waker.clear()
        if self._authenticator.sock in ready:
            self._authenticator.answer()
        if (now := time.monotonic()) >= self._guard.look_at:  # polled apart: dials would end every poll
            self._guard.look(now)
        came: list[tuple[bytes, Frames]] = []
        for _ in range(READ_AT_ONCE):  # then give the caller its turn
            try:
                message = self._read()
            except zmq.Again:
                break
            if message is not None:
                came.append(message)
                if len(came) == GIVEN_AT_ONCE:
                    break
        return came

    def _read(self) -> tuple[bytes, Frames] | None:
        """Read one message, without a copy: only so is the key known, and payloads are large. None: it is of
        a connection that was hung up on, of which libzmq still gives what has come before."""
        id = self._router.recv(NOW)
        last = first = self._router.recv(NOW, copy=False)
        if id in self._hung_up:
            while last.more:
                last = self._router.recv(NOW, copy=False)
            return None
        frames: list[bytes | memoryview] = [first.bytes]
        while last.more:
            last = self._router.recv(NOW, copy=False)
            if len(frames) < 3:  # more than two are never valid; there may be a million
                frames.append(last.buffer)
        where = origin(str(first.get("Peer-Address")))
        conn = b".".join((str(first.get("User-Id")).encode(), where.encode(), id))
        self._guard.came(int(first.get(zmq.SRCFD)), conn, wire_size(frames), time.monotonic())
        return conn, frames

    def send(self, conn: bytes, frames: Frames) -> bool:
        try:
            # copying 256 KiB is cheaper than the reference counting that saves it, and safe if the buffer
            # changes; a shared payload is copied once and libzmq counts its references
            self._router.send(conn.split(b".", 2)[2], MORE_NOW)
            for frame in frames[:-1]:
                self._router.send(frame, MORE_NOW)
            last = frames[-1]
            if isinstance(last, SharedPayload):
                last.made = last.made or zmq.Frame(last, copy=True)
                self._router.send(last.made, NOW, copy=False)
            else:
                self._router.send(last, NOW)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        self._guard.sent(conn, wire_size(frames))
        return True

    def hang_up(self, conn: bytes) -> None:
        self._guard.hang_up(conn, time.monotonic())
        self._hung_up[conn.split(b".", 2)[2]] = None
        if len(self._hung_up) > HUNG_UP:
            del self._hung_up[next(iter(self._hung_up))]

    def close(self) -> None:
        self._guard.close()
        self._router.close(LAST_WORDS_MS)
        self._authenticator.close()
        self._waker.close()
        self._context.term()


class DealerWire:
    """A peer's connections to one hub: a PeerWire. Any thread may call `wake`, one all else.

    Args:
        routes: the ways to the hub, best first; the first that answers is taken, each with a head start. What
            led to the hub is the first way of later dials, and the only one for STAY_S after a connection has
            ended.
        control: options of flow 0.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        server_key: str,
        keys: CurveKeys | None = None,
        control: dict[str, int] = OF_HUB,
    ) -> None:
        self._routes, self._control = [*routes], control
        self.way = ""
        self._stay_until = 0.0
        self._server_key, self._keys = server_key, keys or CurveKeys.generate()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = Waker(self._context)
        self.wake = self._waker.wake
        self._poller = zmq.Poller()
        self._poller.register(self._waker.inner, zmq.POLLIN)
        self._socks: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._lines: dict[int, DialledLine] = {}  # flow -> its connection
        self._look_at = 0.0  # when their bytes are counted next
        self._open: dict[Route, OpenRoute | None] = {}
        self._connecting: dict[int, float] = {}  # flow -> deadline for the handshake
        self._resolved: queue.SimpleQueue[tuple[int, int, AnsweringRoute | Unreachable]] = queue.SimpleQueue()
        self._probed: dict[int, AnsweringRoute] = {}  # flow -> how it is, or was, connected
        self._attempt: dict[int, int] = {}  # flow -> number of its newest dial
        self._attempts = 0

    def aim(self, routes: Sequence[Route], server_key: str) -> None:
        """Dial along these routes from now on. Dials under way begin anew; connections stay until `hang_up`,
        but for those along a route that libzmq cannot dial and that is not among the new ones."""
        self._routes, self._server_key, self._stay_until = [*routes], server_key, 0.0
        for flow in [f for f in self._attempt if f not in self._socks or f in self._connecting]:
            self.dial(flow)
        for route in self._open.keys() - {*routes}:
            if opened := self._open.pop(route):
                opened.close()

    def dial(self, flow: int) -> None:
        self.hang_up(flow)
        stays = time.monotonic() < self._stay_until
        self._try(flow, tuple(self._routes[:1] if stays else self._routes), {})

    def _try(self, flow: int, routes: tuple[Route, ...], failed: dict[Route, Unreachable]) -> None:
        self._attempts += 1
        self._attempt[flow] = self._attempts
        if not began("cocktail-dial", self._probe, flow, self._attempts, routes, failed):
            self._resolved.put((flow, self._attempts, no_memory(routes[0])))
            self._waker.wake()

    def _probe(
        self, flow: int, attempt: int, routes: tuple[Route, ...], failed: dict[Route, Unreachable]
    ) -> None:
        """Find a route that answers: the first that does, each with a head start."""
        answers: queue.SimpleQueue[tuple[Route, str | Unreachable]] = queue.SimpleQueue()

        def ask(route: Route) -> None:
            answers.put((route, answer_of(route)))

        waiting, running = [*routes], 0
        result: AnsweringRoute | None = None
        while result is None and (waiting or running):
            if waiting:
                route, running = waiting.pop(0), running + 1
                if not began("cocktail-probe", ask, route):
                    answers.put((route, no_memory(route)))
            try:
                route, answer = answers.get(timeout=HEAD_START_S if waiting else None)
            except queue.Empty:
                continue
            running -= 1
            if isinstance(answer, Unreachable):
                failed = failed | {route: answer}
            else:
                others = tuple(other for other in routes if other != route and other not in failed)
                result = AnsweringRoute(route, answer, others, failed)
        self._resolved.put((flow, attempt, result or Unreachable.of([*failed.values()])))
        self._waker.wake()

    def _connect(self, flow: int, probed: AnsweringRoute) -> None:
        sock = self._context.socket(zmq.DEALER)
        set_options(sock, COMMON | PEER | (OF_HUB if flow else self._control))
        sock.curve_serverkey = as_z85(self._server_key)
        sock.curve_publickey, sock.curve_secretkey = as_z85(self._keys.public), as_z85(self._keys.secret)
        events = (
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        monitor = sock.get_monitor_socket(events)
        route = probed.route
        if route not in self._open:
            self._open[route] = route.open()
        opened = self._open[route]
        where = f"127.0.0.1:{opened.port}" if opened else join_address(probed.address, route.port)
        sock.connect(f"tcp://{where}")
        self._probed[flow] = probed
        self._socks[flow], self._monitors[flow] = sock, monitor
        self._connecting[flow] = time.monotonic() + HANDSHAKE_S
        self._poller.register(sock, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def hang_up(self, flow: int) -> None:
        self._attempt.pop(flow, None)
        self._connecting.pop(flow, None)
        self._lines.pop(flow, None)
        sock, monitor = self._socks.pop(flow, None), self._monitors.pop(flow, None)
        if sock is not None and monitor is not None:
            self._poller.unregister(monitor)
            self._poller.unregister(sock)
            sock.disable_monitor()  # closes `monitor` too
            sock.close(0)

    def poll(self, timeout: float) -> list[Connected | Disconnected | Received]:
        if self._connecting:
            timeout = min(timeout, max(0.0, min(self._connecting.values()) - time.monotonic()))
        if self._lines:
            timeout = min(timeout, LOOK_S)
        ready = dict(self._poller.poll(max(0, round(timeout * 1000))))
        if self._waker.inner in ready:
            self._waker.clear()
        events: list[Connected | Disconnected | Received] = []
        while not self._resolved.empty():
            flow, attempt, result = self._resolved.get()
            if self._attempt.get(flow) != attempt:
                continue
            if isinstance(result, Unreachable):
                del self._attempt[flow]
                events.append(Disconnected(flow, result))
            else:
                self._connect(flow, result)
        for flow in sorted(self._socks):
            if self._socks[flow] in ready:
                events += self._read(flow)
            if self._monitors[flow] in ready:
                events += self._watch(flow)
        now = time.monotonic()
        for flow in [f for f, until in self._connecting.items() if now >= until]:
            events += self._not_proven(flow)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            for flow, line in list(self._lines.items()):
                if (held := line.held()) > MOST_HELD:  # more than whole messages can: one has no end
                    self.hang_up(flow)
                    said = f"a message has no end: {held:,} bytes have come that are in none"
                    events.append(Disconnected(flow, ProtocolError(said)))
        return events

    def _read(self, flow: int) -> list[Connected | Disconnected | Received]:
        """Read the messages that are here, some at a time."""
        came: list[Connected | Disconnected | Received] = []
        sock, size = self._socks[flow], 0
        while len(came) < (AT_ONCE // 4 if flow else AT_ONCE):
            try:
                frames = [sock.recv(NOW)]
            except zmq.Again:
                break
            size += wire_size(frames)
            while sock.getsockopt(zmq.RCVMORE):
                frame = sock.recv(NOW)
                size += wire_size([frame])
                if len(frames) < 3:  # there may be a million
                    frames.append(frame)
            came.append(Received(flow, frames))
        if flow in self._lines:
            self._lines[flow].read += size
        return came

    def _watch(self, flow: int) -> list[Connected | Disconnected | Received]:
        while True:
            try:
                said = recv_monitor_message(self._monitors[flow], zmq.DONTWAIT)
            except zmq.Again:
                return []
            if (event := said["event"]) == zmq.EVENT_CONNECTED:
                address = with_socket(said["value"], socket.socket.getsockname)
                self._lines[flow] = DialledLine(said["value"], address)
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                del self._connecting[flow]
                proven = self._probed[flow].route
                self._routes.sort(key=lambda route: route != proven)
                self.way = str(proven)
                return [Connected(flow)]
            if flow in self._connecting:
                return self._not_proven(flow)
            self.hang_up(flow)
            self._stay_until = time.monotonic() + STAY_S
            return [Disconnected(flow, None)]

    def _not_proven(self, flow: int) -> list[Connected | Disconnected | Received]:
        """Try the next route of this dial; without any, it has failed."""
        probed, left = self._probed[flow], self._connecting[flow] - time.monotonic()
        self.hang_up(flow)
        slow = left < HANDSHAKE_S - SLOW_S
        failed = probed.failed | {probed.route: not_proven(probed.route, slow)}
        if not probed.others:
            return [Disconnected(flow, Unreachable.of([*failed.values()]))]
        self._try(flow, probed.others, failed)
        return []

    def send(self, flow: int, frames: Frames) -> bool:
        sock = self._socks.get(flow)
        if sock is None or flow in self._connecting:
            return False
        try:
            sock.send_multipart(list(frames), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def crossed(self, flow: int) -> tuple[int, int]:
        counts = counts_of(self._lines[flow].number) if flow in self._lines else None
        return (counts.acknowledged, counts.received) if counts else (0, 0)

    def close(self) -> None:
        for flow in list(self._socks):
            self.hang_up(flow)
        self._waker.close()
        self._context.term()
        for opened in filter(None, self._open.values()):
            opened.close()


@dataclass
class DialledLine:
    """A connection that was dialled, and the bytes read from it."""

    number: int  # its descriptor
    address: object  # of this end: tells whether the descriptor has become another's
    read: int = HANDSHAKE_DOWN

    def held(self) -> int:
        """Count the bytes that have left the kernel and were not read here. 0: not known."""
        return with_socket(self.number, self._held) or 0

    def _held(self, sock: socket.socket) -> int:
        if not LINUX or sock.getsockname() != self.address:
            return 0
        return tcp_counters(sock).received - unread(sock) - self.read


@dataclass(frozen=True)
class AnsweringRoute:
    """A route that answers, and what else there is if the hub is not behind it."""

    route: Route
    address: str  # IP address; empty: an open route leads there
    others: tuple[Route, ...]  # not tried yet in this dial
    failed: dict[Route, Unreachable]  # why others were not taken


def answer_of(route: Route) -> str | Unreachable:
    """Return what the probe of a route does, or its error."""
    try:
        return route.probe()
    except Unreachable as error:
        return error
    except (MemoryError, RuntimeError) as error:
        if not has_no_thread(error):
            raise
        return no_memory(route)


def began(name: str, work: Callable[..., None], *arguments: object) -> bool:
    """Start a thread; False where this machine has no memory for one."""
    try:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()
    except (MemoryError, RuntimeError) as error:
        if not has_no_thread(error):
            raise
        return False
    return True


def has_no_thread(error: Exception) -> bool:
    """Tell whether an error says that no thread can begin: for want of memory, or as this process ends."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in THREADLESS)


def no_memory(route: Route) -> Unreachable:
    why = f"cannot dial {route.host}:{route.port}: this machine has no memory for another thread"
    return Unreachable(route.host, route.port, "tcp", why)


def not_proven(route: Route, slow: bool = False) -> Unreachable:
    """Make the error of a handshake that did not prove the server's key, or not in time."""
    lacks = "it does not hold the server key of the run URL: another program, another run, or a hub that was "
    late = f"has not proven its key within {HANDSHAKE_S:.0f} s: that hub or a line to it is overloaded, or "
    why = late + "another program listens there" if slow else lacks + "started anew"
    layer = "handshake" if slow else "key"
    return Unreachable(route.host, route.port, layer, f"something answers at {route}, but {why}")


def try_route(route: Route, server_key: str, keys: CurveKeys | None = None, timeout: float = 10.0) -> float:
    """Connect along one route, and prove the server's key; return the seconds that took. Raises
    Unreachable."""
    started = time.monotonic()
    wire = DealerWire((route,), server_key, keys)
    try:
        wire.dial(0)
        while (left := started + timeout - time.monotonic()) > 0:
            for event in wire.poll(left):
                if isinstance(event, Disconnected):
                    raise event.error or not_proven(route)
                return time.monotonic() - started
    finally:
        wire.close()
    raise Unreachable(
        route.host, route.port, "tcp", f"no answer from {route.host}:{route.port} within {timeout:.0f} s"
    )


def is_reachable(address: str, server_key: str, keys: CurveKeys, timeout: float = 5.0) -> bool:
    """Return whether a server with this key answers at `address` within `timeout` seconds."""
    try:
        try_route(TcpRoute(*parse_address(address)), server_key, keys, timeout)
    except (UrlError, ValueError, Unreachable):
        return False
    return True


class KeyAuthenticator:
    """Answers libzmq's ZAP requests: every proven key that is `allowed` may connect.

    Admission to the run is decided on Hello, whose answer can carry a reason. A shard server allows the keys
    of its members only.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Callable[[str], bool]) -> None:
        self.allowed = allowed
        self.sock = context.socket(zmq.REP)
        self.sock.linger = 0
        self.sock.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                version, id, _, _, _, mechanism, *keys = self.sock.recv_multipart(zmq.DONTWAIT)
                good = mechanism == b"CURVE" and len(keys) == 1 and self.allowed(to_base64(keys[0]))
                status, user = (b"200", to_base64(keys[0]).encode()) if good else (b"400", b"")
                self.sock.send_multipart([version, id, status, b"", user, b""])

    def close(self) -> None:
        self.sock.close(0)


class Waker:
    """Ends a poll from any thread: a pair of inproc sockets, its outer end behind a lock."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.inner, self._outer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for sock in (self.inner, self._outer):
            sock.linger = 0
        self.inner.bind(f"inproc://wake-{id(self)}")
        self._outer.connect(f"inproc://wake-{id(self)}")
        self._lock = threading.Lock()

    def wake(self) -> None:
        with self._lock:
            if not self._outer.closed:
                with contextlib.suppress(zmq.Again):  # enough wake-ups are queued
                    self._outer.send(b"", zmq.DONTWAIT)

    def clear(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self.inner.recv(zmq.DONTWAIT)

    def close(self) -> None:
        with self._lock:
            self._outer.close(0)
            self.inner.close(0)


def raise_file_limit() -> int:
    """Raise the limit of descriptors to the maximum and return it: without any, the I/O thread spins."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return MANY_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means 10240
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit > 0 else MANY_FILES


assert messages.MAX_CONTROL < MAX_FRAME


DIAL_S = 5.0  # for a TCP connection


@dataclass(frozen=True)
class TcpRoute:
    """A connection by TCP, which libzmq makes by itself."""

    host: str
    port: int
    kind = "direct"

    def __str__(self) -> str:
        return join_address(self.host, self.port)

    def probe(self, timeout: float = DIAL_S) -> str:
        """Return the IP address of the host that accepts connections. Raises Unreachable: dns or tcp."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # no such name, or no name
            why = f"no address for the name {self.host!r}: {getattr(error, 'strerror', '') or error}"
            raise Unreachable(self.host, self.port, "dns", why) from None
        reasons = []
        for family, kind, proto, _, address in found:
            try:
                with socket.socket(family, kind, proto) as sock:
                    sock.settimeout(timeout)
                    sock.connect(address)
                    return str(address[0])
            except TimeoutError:
                reasons.append(f"{address[0]} did not answer within {timeout:.0f} s (a firewall?)")
            except OSError as error:
                reasons.append(f"{address[0]}: {(error.strerror or str(error)).lower()}")
        raise Unreachable(self.host, self.port, "tcp", f"no connection to {self}: {'; '.join(reasons)}")

    def open(self) -> None:
        """Leave the connections to libzmq."""

    def seconds(self, timeout: float) -> float:
        """Measure how long the server takes to accept a connection. Raises Unreachable."""
        began = time.monotonic()
        self.probe(timeout)
        return time.monotonic() - began

    def remark(self) -> str:
        """Return nothing: there is no more to say of it."""
        return ""


def routes_to(url: RunURL) -> Sequence[Route]:
    """Return the ways to a hub, in the order in which they are tried."""
    return (url.dial(url) if url.dial else ()) or (TcpRoute(url.host, url.port),)
