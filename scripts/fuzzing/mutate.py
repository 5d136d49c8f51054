"""Hostile bytes: what an encoder of ours wrote, damaged, and values that only a stranger writes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

EDGES = [2**n + d for n in (7, 8, 15, 16, 31, 32, 40, 53, 62, 63, 64) for d in (-1, 0, 1)]
INTS = [0, 1, 2, 3, -1, -2, *[n for n in EDGES if n < 2**64], *[-n for n in EDGES if n <= 2**63]]
FLOATS = [0.0, -0.0, 1.5, 1e30, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")]
NAMES = [
    "", " ", "ann", ".", "..", "../x", "/", "a/b", "a" * 200, "\0", "\n\x1b[2J", "é", "\U0001d51e" * 40,
    "\u202e", "\u0663", "\u00b2",
    "update/0", "update/00", "update/-1", "update/" + "9" * 40, "handoff/0", "handoff/1", "lease/0",
    "packet/0", "packet/1" + "0" * 30, "packets/0-1", "packets/1-0", "packets/0-" + "9" * 18, "eval",
    "base/w", "base/../w",
    "hashes/base/w", "hashes/hashes/w", "snapshot/0/model.safetensors", "snapshot//", "x" * 3000,
]  # fmt: skip
LENGTHS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**61, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Target:
    """A parser or machine, its hostile cases, and its law.

    `check` returns True where the bytes were taken and the result is well formed, False where they were
    refused by the target's own error. Whatever else it raises is a finding.
    """

    name: str
    group: str
    share: int  # of all cases, in parts of the sum of these
    make: Callable[[Random], bytes]
    check: Callable[[bytes], bool]
    most: int = 1 << 20  # bytes of memory that a case may take at its peak, beside 64 for each of its own


def mutated(rng: Random, good: bytes, other: bytes) -> bytes:
    """Do one to three kinds of damage to `good`; `other` lends a part of itself."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if data:
            rng.choice(DAMAGE)(rng, data, other)
    return bytes(data)


def flip(rng: Random, data: bytearray, _: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: Random, data: bytearray, _: bytes) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFF, rng.randrange(256)))


def cut(rng: Random, data: bytearray, _: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def drop(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 9)]


def grow(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def splice(rng: Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other) + 1) :]


def length(rng: Random, data: bytearray, _: bytes) -> None:
    """Set a number of 2, 4 or 8 bytes to an extreme, in either byte order."""
    size, order = rng.choice((2, 4, 8)), rng.choice(("little", "big"))
    at, value = rng.randrange(len(data)), rng.choice(LENGTHS) & ((1 << 8 * size) - 1)
    data[at : at + size] = value.to_bytes(size, order)[: max(0, len(data) - at)]


def nested(rng: Random, data: bytearray, _: bytes) -> None:
    """Nest values in values: a parser that recurses needs as much stack."""
    at = rng.randrange(len(data))
    data[at:at] = rng.choice((b"\x91", b"\x81\xa1a", b"[", b'{"a":')) * rng.choice((5, 100, 2000, 15000))


DAMAGE: Sequence[Callable[[Random, bytearray, bytes], None]] = (
    *(flip, overwrite, cut, drop, grow, splice, length) * 8,
    nested,
)


def hostile(rng: Random, depth: int = 0) -> Any:
    """Draw a value that no encoder of ours writes."""
    kind = rng.randrange(12 if depth < 2 else 8)
    if kind < 3:
        return rng.choice(INTS)
    if kind < 5:
        return rng.choice(FLOATS)
    if kind < 7:
        return rng.choice(NAMES)
    if kind == 7:
        return rng.choice((None, True, False, b"", b"\xff" * 33))
    if kind < 10:
        if rng.random() < 0.1 and not depth:
            return [hostile(rng, 2)] * 2000
        return [hostile(rng, depth + 1)] * rng.choice((0, 1, 3, 33))
    return {rng.choice(NAMES): hostile(rng, depth + 1) for _ in range(rng.randrange(4))}


def bent(rng: Random, plain: Any) -> Any:
    """Replace one to three plain values of a message by what fits less."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(leaves(plain))
        if not places:
            return hostile(rng)
        holder, key = rng.choice(places)
        holder[key] = near(rng, holder[key])
    return plain


def near(rng: Random, value: Any) -> Any:
    """Draw a replacement, mostly of the same type: what is refused at once reaches nothing."""
    if rng.random() < 0.2:
        return hostile(rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((max(value - 1, -(2**63)), min(value + 1, 2**64 - 1), rng.randrange(8), *INTS[::9]))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(NAMES)
    if isinstance(value, bytes):
        return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 100)))
    return hostile(rng)


def leaves(plain: Any) -> Iterable[tuple[Any, Any]]:
    """List every place in a plain value: (its container, its key there)."""
    held = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for key, value in list(held):
        yield plain, key
        if isinstance(value, dict | list):
            yield from leaves(value)


def message(rng: Random, examples: Sequence[bytes]) -> bytes:
    """Draw an encoded message: damaged bytes, bent values under a right encoding, or nothing of ours."""
    kind = rng.random()
    good = rng.choice(examples)
    if kind < 0.4:
        return mutated(rng, good, rng.choice(examples))
    plain = msgspec.msgpack.decode(good)
    bent_ = bent(rng, plain) if kind < 0.97 else hostile(rng)
    return msgspec.msgpack.encode(bent_)


RECORD = struct.Struct("<BI")


def joined(parts: Iterable[tuple[int, bytes]]) -> bytes:
    """Join several messages to a case: (connection, bytes) each."""
    return b"".join(RECORD.pack(conn, len(data)) + data for conn, data in parts)


def parts_of(case: bytes) -> Iterable[tuple[int, bytes]]:
    at = 0
    while at < len(case):
        conn, size = RECORD.unpack_from(case, at)
        at += RECORD.size
        yield conn, case[at : at + size]
        at += size
