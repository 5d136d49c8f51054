"""The way to a hub through a relay: SOCKS 5 (RFC 1928) on the relay's one port, which libzmq speaks as well.

The name that a client asks for says what it is. No name is resolved, so a relay is no open proxy:

    <run>.run        a peer wants the hub of this run
    <run>.probe      is that hub here? Answered and closed
    control.probe    the relay's own CURVE key, as the address in its answer
    control.relay    a hub's control connection: CURVE, by which it proves the run's key
    <ticket>.guest   a hub fetches the peer that was announced with this ticket
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

from transport.protocol import RunURL, Unreachable, join_address, parse_address

VERSION, CONNECT, DOMAIN, NO_LOGIN = 5, 1, 3, 0
GREETING = bytes((VERSION, 1, NO_LOGIN))
ACCEPTED, FORBIDDEN, UNKNOWN = 0, 2, 4  # RFC 1928: succeeded, not allowed by ruleset, host unreachable
CONTROL, RELAY, RUN, PROBE, GUEST = "control", "relay", "run", "probe", "guest"
PORT = (1).to_bytes(2, "big")  # SOCKS wants one; a relay ignores it
DIAL_S = 5.0


@dataclass(frozen=True)
class Route:
    """One way to a server: its address, or a relay's and the name to ask the relay for."""

    host: str
    port: int
    name: str = ""  # "": direct

    def __str__(self) -> str:
        where = join_address(self.host, self.port)
        return f"the relay {where}" if self.name else where


def run_name(key: str) -> str:
    """Return a run's name at relays: a hash of its hub's public key, which a name must not give away."""
    return hashlib.sha256(b"cocktail relay\0" + key.encode()).hexdigest()[:32]


def relay_route(url: RunURL) -> Route | None:
    """Return the way through the URL's relay; None where it names none."""
    return Route(*parse_address(url.relay), f"{run_name(url.key)}.{RUN}") if url.relay else None


# ---- SOCKS 5, without a socket -----------------------------------------------------------------------------


def request(name: str) -> bytes:
    """Return greeting and request in one; a relay answers them one after the other."""
    return GREETING + bytes((VERSION, CONNECT, 0, DOMAIN, len(name))) + name.encode() + PORT


def read_request() -> Generator[int | bytes, bytes, str]:
    """Parse a client's greeting and request: yields how many bytes to read, or bytes to send; returns the
    name. Raises ValueError where it is not SOCKS 5 with a name."""
    version, methods = yield 2
    if version != VERSION or not methods:  # else what speaks another protocol would be waited for
        raise ValueError("not SOCKS 5")
    if NO_LOGIN not in (yield methods):
        raise ValueError("a login is wanted")
    yield bytes((VERSION, NO_LOGIN))
    version, command, _, kind, size = yield 5
    if (version, command, kind) != (VERSION, CONNECT, DOMAIN) or not size:
        raise ValueError("not a request for a name")
    return (yield size + len(PORT))[:size].decode("ascii")


def reply(code: int, text: str = RELAY) -> bytes:
    """Return the relay's answer; `text` stands where SOCKS has the bound address."""
    return bytes((VERSION, code, 0, DOMAIN, len(text))) + text.encode() + PORT


def read_reply() -> Generator[int, bytes, tuple[int, str]]:
    """Parse the answers to `request`: yields how many bytes to read; returns code and text."""
    version, method = yield 2
    if (version, method) != (VERSION, NO_LOGIN):
        raise ValueError("not SOCKS 5")
    version, code, _, kind, size = yield 5
    if version != VERSION or kind != DOMAIN:
        raise ValueError("not a relay's answer")
    return code, (yield size + len(PORT))[:size].decode("ascii")


# ---- dialling ----------------------------------------------------------------------------------------------


def ask(route: Route, name: str, timeout: float = DIAL_S) -> tuple[str, str]:
    """Ask a relay for a name ending in `probe`; return its IP address and the text of its answer.

    Raises Unreachable: dns, tcp, or relay, where the relay answers and says no.
    """
    sock, address = connected(route.host, route.port, timeout)
    until = time.monotonic() + timeout
    try:
        with sock:
            sock.sendall(request(name))
            parser = read_reply()
            wanted = next(parser)
            while True:
                wanted = parser.send(receive(sock, wanted, until))
    except StopIteration as done:
        code, text = done.value
    except (OSError, ValueError) as error:
        raise Unreachable(
            route.host, route.port, "relay", f"what answers at {route.host}:{route.port} is no relay: {error}"
        ) from None
    if code != ACCEPTED:
        raise Unreachable(route.host, route.port, "relay", f"{route}: {text}")
    return address, str(text)


def receive(sock: socket.socket, size: int, until: float) -> bytes:
    """Read so many bytes by this time (monotonic). Raises OSError."""
    data = bytearray()
    while len(data) < size:
        sock.settimeout(max(0.001, until - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return bytes(data)


def reach(host: str, port: int, timeout: float = DIAL_S) -> str:
    """Return the IP address of `host` that accepts connections on `port`. Raises Unreachable: dns or tcp."""
    sock, address = connected(host, port, timeout)
    sock.close()
    return address


def connected(host: str, port: int, timeout: float) -> tuple[socket.socket, str]:
    """Connect to the first address of `host` that answers; return that address too. Raises Unreachable: dns
    or tcp."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(
            host, port, "dns", f"no address for the name {host!r}: {error.strerror or error}"
        ) from None
    reasons = []
    for family, kind, proto, _, address in found:
        try:
            with ExitStack() as stack:
                sock = stack.enter_context(socket.socket(family, kind, proto))
                sock.settimeout(timeout)
                sock.connect(address)
                stack.pop_all()  # it stays open
                return sock, str(address[0])
        except TimeoutError:
            reasons.append(f"{address[0]} did not answer within {timeout:.0f} s (a firewall?)")
        except OSError as error:
            reasons.append(f"{address[0]}: {(error.strerror or str(error)).lower()}")
    raise Unreachable(host, port, "tcp", f"no connection to {host}:{port}: {'; '.join(reasons)}")
