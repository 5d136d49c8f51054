"""Secrets of a run (the hub's CURVE key pair, the join token, the host's secret) and of a peer; the run URL.

The URL is one line that carries all a volunteer needs: `cocktail://<key>.<token>@host:port/run-name`, or
`...@host:port+place:port/run-name` where something at another place leads to the hub as well.

    key     the hub's CURVE public key, 32 bytes as 43 characters of base64url (Z85 has $ & # ! in it)
    token   16 random bytes and 2 of checksum as 24 characters of base64url
    run     a slug, a-z 0-9 . -

The checksum covers key, token and run, so a truncated paste is told apart from a wrong one. It does not cover
the addresses: they may be edited by hand to reach the hub by another address. There is no `?`, `#` or `[`,
except around an IPv6 address: zsh would interpret them.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import zmq
from zmq.utils import z85

from .errors import TransportError, UrlError

SCHEME = "cocktail://"
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
BASE64URL = re.compile(r"[A-Za-z0-9_-]*")
KEY_LENGTH = 43  # characters
TOKEN_LENGTH = 24  # characters, checksum included
TOKEN_BYTES = 16  # without
INCOMPLETE = "the run URL is incomplete"


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port" to (host, port). Raises UrlError."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        named = bool(re.fullmatch(r"[0-9A-Fa-f:.%a-z]+", host))
    else:
        named = bool(re.fullmatch(r"[A-Za-z0-9._-]+", host))
    if not colon or not host or not named:
        raise UrlError(f"the address {address[:80]!r} in the run URL is not of the form host:port")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UrlError(f"the port {port[:20]!r} in the run URL is not a number from 1 to 65535")
    return host, int(port)


class OpenRoute(Protocol):
    """A route while connections are made along it."""

    @property
    def port(self) -> int:
        """Return the port of 127.0.0.1 that leads along it."""

    def close(self) -> None: ...


class Route(Protocol):
    """One way to a server: a value, whose text names it for people. Its methods block; all but `open` raise
    Unreachable.
    """

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def kind(self) -> str:
        """Return "direct", or what it leads through."""

    def probe(self) -> str:
        """Return the IP address of the host once it answers; empty: an open route leads there."""

    def open(self) -> OpenRoute | None:
        """Let connections be made along it; None: libzmq makes them by itself."""

    def seconds(self, timeout: float) -> float:
        """Measure how long a connection to the server takes."""

    def remark(self) -> str:
        """Return a clause on what its user should know, once it works; empty: there is nothing."""


@dataclass(frozen=True)
class RunURL:
    """The parts of a run URL. `str(url)` is the line to pass on; `url.masked()` is fit for logs."""

    key: str  # base64url, 43 characters
    token: str  # base64url, 22 characters, sent in Hello
    host: str  # a name, an IPv4 address, or an IPv6 address without brackets
    port: int
    run: str
    places: tuple[str, ...] = ()  # "host:port" of what leads to the hub as well
    # Makes the routes to the hub, as this machine dials: no part of the line. None: by TCP to host and port.
    dial: Callable[[RunURL], Sequence[Route]] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{SCHEME}{self.key}.{sealed(self)}@{self.place}/{self.run}"

    def __repr__(self) -> str:  # a traceback must not show the token
        return f"RunURL({self.masked()})"

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def place(self) -> str:
        """Return the addresses as they are in the URL."""
        return "+".join((self.address, *self.places))

    def at(self, place: str, key: str) -> RunURL:
        """Return the URL of the same run at another hub. Raises UrlError."""
        address, *places = place.split("+")
        host, port = parse_address(address)
        return replace(self, key=key, host=host, port=port, places=tuple(places))

    def masked(self) -> str:
        return f"{SCHEME}{self.key}.***@{self.place}/{self.run}"


def parse_url(text: str) -> RunURL:
    """Parse the URL in `text`, which may be the host's whole line, with blanks, quotes or line breaks from a
    chat. Raises UrlError."""
    url = "".join(text.split())
    url = url[max(0, url.find(SCHEME)) :].strip("'\"<>`,;()")
    if not url:
        raise UrlError("the run URL is empty")
    if not url.startswith(SCHEME):
        if SCHEME.startswith(url):
            raise UrlError(f"{INCOMPLETE}: it ends after {url!r}")
        raise UrlError(f"the run URL begins with {url[: len(SCHEME)]!r}, expected {SCHEME!r}")
    credentials, at, place = url[len(SCHEME) :].partition("@")
    key, dot, sealed_token = credentials.partition(".")
    check_part("server key", key, KEY_LENGTH, ended=not dot)
    check_part("token", sealed_token, TOKEN_LENGTH, ended=not at)
    address, slash, run = place.partition("/")
    if not slash:
        raise UrlError(f"{INCOMPLETE}: the run's name is missing after {address!r}")
    if not run:
        raise UrlError(f"{INCOMPLETE}: the run's name is missing")
    if not RUN_NAME.fullmatch(run):
        raise UrlError(f"the run's name {run[:70]!r} in the URL is not of the form a-z 0-9 . -")
    (host, port), *_ = map(parse_address, places := address.split("+"))
    url_ = RunURL(key, to_base64(to_bytes(sealed_token)[:-2]), host, port, run, tuple(places[1:]))
    if sealed(url_) != sealed_token:
        raise UrlError(f"{INCOMPLETE}, or a character of it is wrong: the checksum in its token does not fit")
    return url_


def check_part(what: str, text: str, length: int, *, ended: bool) -> None:
    if ended and len(text) <= length:
        raise UrlError(f"{INCOMPLETE}: it ends in the {what}")
    if not BASE64URL.fullmatch(text):
        raise UrlError(f"the {what} in the run URL holds characters that do not belong there")
    if len(text) != length:
        raise UrlError(f"the {what} in the run URL has {len(text)} characters, expected {length}")


def sealed(url: RunURL) -> str:
    """Return the token with its checksum, as in the URL."""
    token = to_bytes(url.token)
    checksum = hashlib.sha256(b"\0".join((url.key.encode(), token, url.run.encode()))).digest()[:2]
    return to_base64(token + checksum)


def to_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def to_bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


# ---- secrets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveKeys:
    """One CURVE key pair, base64url."""

    public: str  # 43 characters
    secret: str

    @classmethod
    def generate(cls) -> CurveKeys:
        if not zmq.has("curve"):
            raise TransportError("this pyzmq was built without CURVE encryption; install one of its wheels")
        public, secret = zmq.curve_keypair()
        return cls(to_base64(z85.decode(public)), to_base64(z85.decode(secret)))

    def check(self) -> None:
        """Raise ValueError if the two are not a pair."""
        try:
            public = zmq.curve_public(as_z85(self.secret))
        except (ValueError, TypeError, AttributeError, zmq.ZMQError):
            raise ValueError("its secret key is none") from None
        if as_z85(self.public) != public:
            raise ValueError("its public key does not belong to its secret key")

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


@dataclass(frozen=True)
class RunKeys:
    """The keys of a run in the host's run.json (mode 0600). Only `public` and `token` leave that machine."""

    public: str  # hub's CURVE public key, base64url
    secret: str  # hub's CURVE secret key, base64url
    token: str  # join token, base64url of 16 bytes: in the URL
    stop: str  # the host's secret for `cocktail stop`, base64url of 16 bytes: not in the URL
    signing: str = ""  # Ed25519 secret key of receipts, base64url; empty: none are signed

    @classmethod
    def generate(cls) -> RunKeys:
        pair = CurveKeys.generate()
        return cls(
            pair.public, pair.secret, cls.new_token(), cls.new_token(), to_base64(secrets.token_bytes(32))
        )

    @property
    def pair(self) -> CurveKeys:
        return CurveKeys(self.public, self.secret)

    @staticmethod
    def new_token() -> str:
        return to_base64(secrets.token_bytes(16))

    def url(self, host: str, port: int, run: str, *places: str) -> RunURL:
        return RunURL(self.public, self.token, host, port, run, places)

    def __repr__(self) -> str:
        return f"RunKeys(public={self.public!r})"


def short_key(key: str) -> str:
    """Shorten a public key for people to compare and type: 64 bits of its SHA-256, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def as_z85(key: str) -> bytes:
    """Convert a base64url key to ZeroMQ's Z85."""
    return z85.encode(to_bytes(key))
