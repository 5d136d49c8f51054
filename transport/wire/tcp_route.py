"""The plain way to a server: an address that is asked whether it accepts connections, as ZeroMQ would retry
silently and not report what failed."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from transport.protocol import Route, RunURL, Unreachable, join_address

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
