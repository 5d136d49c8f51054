"""Messages to bytes and back, in msgpack: what is no message, or none of ours, is a ProtocolError."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import ProtocolError
from .messages import MAX_FINGERPRINT, VERSIONS, Message, Ready, Report, ToHub, ToPeer

_TO_HUB: msgspec.msgpack.Decoder[ToHub] = msgspec.msgpack.Decoder(ToHub)
_TO_PEER: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)
GREETINGS = ("Hello", "Resume", "AskStatus", "AskStop", "AskOwner")  # name their version
M = TypeVar("M")
# A value within 20,000 others is nothing of ours; msgspec says so in Python's own words.
NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class OtherVersion(ProtocolError):
    """A greeting in a version of the protocol that is not ours."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"the peer speaks protocol {protocol}; {versions()} would do")
        self.protocol = protocol


def versions() -> str:
    return "version " + " or ".join(str(v) for v in VERSIONS)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_hub(data: bytes | memoryview) -> ToHub:
    """A message for the hub. Raises OtherVersion for a greeting in another version, else ProtocolError."""
    try:
        return checked(_TO_HUB.decode(data))
    except NO_MESSAGE as error:
        protocol = protocol_of(data)
        if protocol is not None and protocol not in VERSIONS:
            raise OtherVersion(protocol) from None
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None


def decode_to_peer(data: bytes | memoryview) -> ToPeer:
    """A message for a peer; raises ProtocolError."""
    try:
        return checked(_TO_PEER.decode(data))
    except NO_MESSAGE as error:
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None


def protocol_of(data: bytes | memoryview) -> int | None:
    """The version a greeting of whatever version names; None where it is no greeting."""
    try:
        raw = msgspec.msgpack.decode(data)
    except NO_MESSAGE:
        return None
    if not isinstance(raw, dict) or raw.get("type") not in GREETINGS:
        return None
    protocol = raw.get("protocol")
    return protocol if isinstance(protocol, int) else None


def checked(message: M) -> M:
    """`message`, whose fingerprint is one: what msgspec's types, whose bounds end at 63 bits, cannot say."""
    if isinstance(message, Ready | Report) and not 0 <= message.fingerprint <= MAX_FINGERPRINT:
        raise ProtocolError(f"{type(message).__name__} with fingerprint {message.fingerprint}, not 64 bits")
    return message
