"""Encodes messages to msgpack and back; bytes that are no message of this protocol raise ProtocolError."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import ProtocolError
from .messages import MAX_FINGERPRINT, VERSIONS, Message, Ready, Report, ToHub, ToPeer

_TO_HUB: msgspec.msgpack.Decoder[ToHub] = msgspec.msgpack.Decoder(ToHub)
_TO_PEER: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)
HANDSHAKES = ("Hello", "Resume", "AskStatus", "Deciding", "AskStop", "AskOwner")  # carry their version
M = TypeVar("M")
# msgspec reports 20,000 nested values by a RecursionError of Python
NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class OtherVersion(ProtocolError):
    """A handshake message in another version of the protocol."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"the peer speaks protocol {protocol}; {versions()} would do")
        self.protocol = protocol


def versions() -> str:
    return "version " + " or ".join(str(v) for v in VERSIONS)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_hub(data: bytes | memoryview) -> ToHub:
    """Decode a message for the hub. Raises ProtocolError; OtherVersion for a handshake in another version."""
    try:
        return checked(_TO_HUB.decode(data))
    except NO_MESSAGE as error:
        protocol = protocol_of(data)
        if protocol is not None and protocol not in VERSIONS:
            raise OtherVersion(protocol) from None
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None


def decode_to_peer(data: bytes | memoryview) -> ToPeer:
    """Decode a message for a peer. Raises ProtocolError."""
    try:
        return checked(_TO_PEER.decode(data))
    except NO_MESSAGE as error:
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None


def protocol_of(data: bytes | memoryview) -> int | None:
    """Return the version of a handshake message of any version; None for other bytes."""
    try:
        raw = msgspec.msgpack.decode(data)
    except NO_MESSAGE:
        return None
    if not isinstance(raw, dict) or raw.get("type") not in HANDSHAKES:
        return None
    protocol = raw.get("protocol")
    return protocol if isinstance(protocol, int) else None


def checked(message: M) -> M:
    """Check the fingerprint and return the message: msgspec's own bounds end at 63 bits."""
    if isinstance(message, Ready | Report) and not 0 <= message.fingerprint <= MAX_FINGERPRINT:
        raise ProtocolError(f"{type(message).__name__} with fingerprint {message.fingerprint}, not 64 bits")
    return message
