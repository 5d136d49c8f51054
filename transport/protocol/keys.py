"""Secrets of a run (the hub's CURVE key pair, the join token, the host's secret) and of a peer."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from .errors import TransportError
from .run_url import RunURL, to_base64, to_bytes


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
