"""JSON and msgpack that the other side has written, outside of messages: bounded in depth, and typed.

Their size is that of the message or object that brought them, which its reader has bounded before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from .errors import ProtocolError

T = TypeVar("T")
MOST_LEVELS = 64  # of containers in containers; ours have at most 6
# msgspec reports about 1,000 nested values by a RecursionError of Python
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_json(text: str | bytes, kind: type[T], what: str) -> T:
    """Decode JSON of this type; NaN, infinities and numbers without a value are refused.

    Args:
        what: what the text is, as in "the hub's status".

    Raises ProtocolError: it is none, or nested deeper than MOST_LEVELS.
    """
    try:
        return shallow(msgspec.json.decode(text, type=kind), what)
    except UNREADABLE as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from None


def read_msgpack(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Decode msgpack of this type. Raises ProtocolError as `read_json`."""
    try:
        return shallow(msgspec.msgpack.decode(data, type=kind), what)
    except UNREADABLE as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from None


def shallow(value: T, what: str) -> T:
    """Return a decoded value. Raises ProtocolError where it is nested deeper than MOST_LEVELS."""
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
