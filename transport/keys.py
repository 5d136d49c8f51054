"""The secrets of a run: the hub's CURVE key pair, the join token and the owner's secret."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from .errors import TransportError
from .url import RunURL, to_base64, to_bytes


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

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


@dataclass(frozen=True)
class RunKeys:
    """What the owner of a run holds, in run.json (mode 0600). Only `public` and `token` travel."""

    public: str  # hub's CURVE public key, base64url
    secret: str  # hub's CURVE secret key, base64url
    token: str  # join token, base64url of 16 bytes: in the URL
    stop: str  # the owner's secret for `cocktail stop`, base64url of 16 bytes: not in the URL

    @classmethod
    def generate(cls) -> RunKeys:
        pair = CurveKeys.generate()
        return cls(
            pair.public, pair.secret, to_base64(secrets.token_bytes(16)), to_base64(secrets.token_bytes(16))
        )

    def url(self, host: str, port: int, run: str) -> RunURL:
        return RunURL(self.public, self.token, host, port, run)

    def __repr__(self) -> str:
        return f"RunKeys(public={self.public!r})"


def as_z85(key: str) -> bytes:
    """A base64url key as ZeroMQ wants it."""
    return z85.encode(to_bytes(key))
