"""Encodes messages to msgpack and back; bytes that are no message of this protocol raise ProtocolError.

Reads JSON and msgpack of the other side outside of messages: bounded in depth, and typed. Their size is that
of the message or object that brought them, which its reader has bounded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from .errors import ProtocolError
from .messages import MAX_FINGERPRINT, VERSIONS, Message, Ready, Report, ToHub, ToPeer

_TO_HUB: msgspec.msgpack.Decoder[ToHub] = msgspec.msgpack.Decoder(ToHub)
_TO_PEER: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(ToPeer)
HANDSHAKES = ("Hello", "Resume", "AskStatus", "Deciding", "AskStop", "AskOwner")  # carry their version
T = TypeVar("T")
# msgspec reports some thousand nested values by a RecursionError of Python
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


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
        message = _TO_HUB.decode(data)
    except UNREADABLE as error:
        protocol = protocol_of(data)
        if protocol is not None and protocol not in VERSIONS:
            raise OtherVersion(protocol) from None
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None
    # msgspec's own bounds end at 63 bits
    if isinstance(message, Ready | Report) and not 0 <= message.fingerprint <= MAX_FINGERPRINT:
        raise ProtocolError(f"{type(message).__name__} with fingerprint {message.fingerprint}, not 64 bits")
    return message


def decode_to_peer(data: bytes | memoryview) -> ToPeer:
    """Decode a message for a peer. Raises ProtocolError."""
    try:
        return _TO_PEER.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"{len(data)} bytes that are no message: {error}") from None


def protocol_of(data: bytes | memoryview) -> int | None:
    """Return the version of a handshake message of any version; None for other bytes."""
    try:
        raw = msgspec.msgpack.decode(data)
    except UNREADABLE:
        return None
    if not isinstance(raw, dict) or raw.get("type") not in HANDSHAKES:
        return None
    protocol = raw.get("protocol")
    return protocol if isinstance(protocol, int) else None


MOST_LEVELS = 64  # of containers in containers; ours have at most 6


def read_json(text: str | bytes, kind: type[T], what: str) -> T:
    """Decode JSON of this type; NaN, infinities and numbers without a value are refused.

    Args:
        what: what the text is, as in "the hub's status".

    Raises ProtocolError: it is none, or nested deeper than MOST_LEVELS.
    """
    return _read(msgspec.json.decode, text, kind, what)


def read_msgpack(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Decode msgpack of this type. Raises ProtocolError as `read_json`."""
    return _read(msgspec.msgpack.decode, data, kind, what)


def _read(decode: Callable[..., T], data: str | bytes | memoryview, kind: type[T], what: str) -> T:
    try:
        value = decode(data, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from None
    level: list[Any] = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [one for outer in level for one in inside(outer)]
        if not level:
            return value
    raise ProtocolError(f"{what} cannot be read: it is nested deeper than {MOST_LEVELS} levels")


def inside(value: Any) -> Iterator[Any]:
    """Yield the containers in a container; nothing for another value."""
    if isinstance(value, msgspec.Struct):
        found: Iterable[Any] = (getattr(value, name) for name in value.__struct_fields__)
    else:
        found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (one for one in found if isinstance(one, dict | list | msgspec.Struct))
