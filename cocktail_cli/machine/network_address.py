"""The address in the run URL, and what is known of it without sending anything."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cocktail_cli.errors import Failure

BIND, PORT = "0.0.0.0", 29400  # of a hub, by default
EVERYWHERE = (BIND, "::", "")
NEXT_PORTS = 100  # tried after PORT, where no port was typed
TAKEN = "another program uses it"
BIND_HINT = f"--bind takes an address of this machine, or {BIND} for all; others dial what --advertise names"
RIGHTS_HINT = "ports below 1024 need more rights: another --port, or --port 0 for any free one"


@dataclass(frozen=True)
class Reach:
    """An address and a sentence about it."""

    host: str
    port: int
    known: str


def parse_advertised(text: str, port: int, option: str = "--advertise") -> tuple[str, int]:
    """Parse HOST, HOST:PORT or [V6]:PORT. Raises Failure (usage)."""
    if not text.isprintable() or any(c.isspace() or c in "@/+" for c in text):
        raise Failure("usage", f"{option} {text!r}: expected HOST or HOST:PORT")
    host, colon, tail = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], port
    if not colon or (":" in host.strip("[]") and not host.startswith("[")):
        return text, port  # a bare name, or a bare IPv6 address
    if not tail.isdigit() or not 0 < int(tail) < 65536:
        raise Failure("usage", f"{option} {text}: {tail!r} is not a port from 1 to 65535")
    return host.strip("[]"), int(tail)


def reach_of(bind: str, port: int, advertise: str | None, *places: str) -> Reach:
    """Choose the address to advertise: the one asked for, else the bound one, else this machine's own."""
    if advertise:
        host, port = parse_advertised(advertise, port)
        known = "as --advertise says"
    else:
        host = own_address() if bind in EVERYWHERE else bind
        known = kind_of(host)
    if places:  # so there is no port to forward
        known = f"and from elsewhere through {' and '.join(places)}"
    return Reach(host, port, f"{joined(host, port)}, {known}")


def local_host(bind: str) -> str:
    """Return the address at which this machine reaches what listens on `bind`."""
    if bind not in EVERYWHERE:
        return bind
    return "::1" if bind == "::" else "127.0.0.1"


def joined(host: str, port: int) -> str:
    """Format HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ListenAddress:
    """The address at which a hub, or a peer that aggregates shards, listens; and the one that others dial."""

    bind: str = BIND
    port: int = PORT  # 0: any free one
    advertise: str | None = None
    typed: bool = True  # its user asked for this port, so no other will do
    places: Sequence[str] = ()  # "host:port" of what leads to a hub as well

    def dialled(self, port: int) -> str:
        """Return the "host:port" that others dial, now that it listens on `port`."""
        reach = reach_of(self.bind, port, self.advertise)
        return joined(reach.host, reach.port)


def free_address(wanted: ListenAddress) -> ListenAddress:
    """Return the address if a hub can listen there now; where its port was not typed, with the next free one.

    Raises:
        Failure: usage, where --advertise is no address.
        AddressInUse: no such port is free, or the address is not this machine's.
    """
    from transport.protocol import AddressInUse

    if wanted.advertise:
        parse_advertised(wanted.advertise, wanted.port)
    ports = range(wanted.port, wanted.port + (1 if wanted.typed or not wanted.port else NEXT_PORTS))
    for port in ports:
        error = listening_error(wanted.bind, port)
        if error is None:
            return replace(wanted, port=port)
        if error.errno != errno.EADDRINUSE:
            refused = AddressInUse(wanted.bind, wanted.port, str(error.strerror))
            refused.hints = (RIGHTS_HINT if error.errno == errno.EACCES else BIND_HINT,)
            raise refused
    raise AddressInUse(wanted.bind, wanted.port, TAKEN)


def listening_error(bind: str, port: int) -> OSError | None:
    """Try to listen, as a hub would; None where that works."""
    if bind in (name for _, name in socket.if_nameindex()):  # ZeroMQ knows its address
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bind or BIND, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":  # as ZeroMQ does: a port of a moment ago is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None


def parse_listen(listen: str, advertise: str | None) -> ListenAddress:
    """Parse --listen and check --advertise. Raises Failure (usage)."""
    bind, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or not int(port) < 65536:
        raise Failure("usage", f"--listen {listen}: expected HOST:PORT, as 0.0.0.0:29401")
    if advertise:
        parse_advertised(advertise, int(port))
    return ListenAddress(bind.strip("[]"), int(port), advertise)


def kind_of(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "by name"
    if address.is_loopback:
        return "this machine only (--advertise HOST for others)"
    if address.is_private or address.is_link_local:
        return "a private address: for peers elsewhere forward the port and --advertise HOST"
    return "a public address"


INTERNET, NETWORK = "the internet", "this network"


def network_of(origin: str) -> str:
    """Classify a peer's address: INTERNET, NETWORK, or "" for this machine or an unknown one."""
    try:
        address = ipaddress.ip_address(origin)
    except ValueError:
        return ""
    if address.is_loopback or origin == own_address():
        return ""
    return INTERNET if address.is_global else NETWORK


def own_address() -> str:
    """Return the address this machine would send from. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, which no machine has
            return str(probe.getsockname()[0])
        except OSError:  # no route at all: an offline machine
            return "127.0.0.1"
