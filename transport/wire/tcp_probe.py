"""A look whether an address accepts connections: ZeroMQ would retry silently and not report what failed."""

from __future__ import annotations

import socket

from transport.protocol import Unreachable, join_address


def reach(host: str, port: int, timeout: float) -> str:
    """Return the IP address of `host` that accepts connections on `port`. Raises Unreachable: dns or tcp."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # no such name, or no name
        strerror = getattr(error, "strerror", "") or error
        raise Unreachable(host, port, "dns", f"no address for the name {host!r}: {strerror}") from None
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
    where = join_address(host, port)
    raise Unreachable(host, port, "tcp", f"no connection to {where}: {'; '.join(reasons)}")
