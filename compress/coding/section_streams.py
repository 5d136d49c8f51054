"""Sections read as streams: the bytes that `expand` gives, in bounded memory.

A packet lies in memory or in a file (`FileSlice`); either way slices cost nothing, and bytes are there when
`bytes()` asks for them. A zstd frame is fed to its decoder block by block (128 KiB expanded at most), an lz4
block sequence by sequence, so that no section, however well it shrank, is ever there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from compress.errors import PacketError

from .entropy_coding import LZ4, STORED, ZSTD, Section, ZstdFrame, does_not_expand, zstd, zstd_decoder

STEP = 1 << 16  # bytes at a time
BLOCK = 1 << 17  # a block of zstd, packed and expanded, has at most so many
FAR = 1 << 16  # lz4 looks back less than this
DECODER = 640 << 10  # bytes that a zstd decoder takes beside its window


class Bytes(Protocol):
    """A `memoryview`, or an object that is sliced like one; `bytes()` of a slice reads it."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: Any, /) -> Any: ...


@dataclass(frozen=True)
class FileSlice:
    """Bytes that stay in a file until they are read; for one thread at a time."""

    file: BinaryIO
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> FileSlice:
        start, stop, _ = part.indices(self.size)
        return FileSlice(self.file, self.start + start, max(stop - start, 0))

    def __bytes__(self) -> bytes:
        self.file.seek(self.start)
        parts, left = [], self.size
        while left and (part := self.file.read(left)):  # an unbuffered file may give less than was asked for
            parts.append(part)
            left -= len(part)
        if left:
            raise PacketError(f"the file ends {left} bytes too early")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Stream:
    """Read a section from its front, in bounded memory. Errors: PacketError, as from `expand`."""

    def __init__(self, section: Section, skip: int = 0) -> None:
        self.left = section.raw - skip
        if section.codec == STORED:
            section, skip = Section(STORED, self.left, section.data[skip:]), 0
        self._parts = _expanded(section)
        self._rest: memoryview = memoryview(b"")
        while skip > 0:
            skip -= len(self._some(skip))

    def read(self, count: int) -> np.ndarray:
        """Read the next `count` bytes, or all that are left: (count,) uint8."""
        count = min(count, self.left)
        self.left -= count
        parts = []
        while count:
            parts.append(self._some(count))
            count -= len(parts[-1])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def end(self) -> None:
        """Check that nothing follows; all bytes were read."""
        assert not self.left, f"{self.left} bytes were not asked for"
        if len(self._rest) or any(len(part) for part in self._parts):
            raise PacketError("a section gave more bytes than its table entry says")

    def _some(self, most: int) -> memoryview:
        while not len(self._rest):
            part = next(self._parts, None)
            if part is None:
                raise PacketError("a section gave fewer bytes than its table entry says")
            self._rest = memoryview(part)
        some, self._rest = self._rest[:most], self._rest[most:]
        return some


def held(section: Section) -> int:
    """Return about how many bytes of memory a Stream of this section takes at once. Errors: PacketError."""
    if section.codec != ZSTD:
        return 8 * STEP
    return ZstdFrame.of(section).window + DECODER


def _expanded(section: Section) -> Iterator[bytes | bytearray | memoryview]:
    if section.codec == STORED:
        if isinstance(section.data, FileSlice):
            for at in range(0, len(section.data), STEP):
                yield bytes(section.data[at : at + STEP])
        else:
            yield section.data
    elif section.codec == ZSTD:
        try:
            yield from _from_zstd(section)
        except zstd.ZstdError as error:
            raise does_not_expand(section, error) from error
    elif section.codec == LZ4:
        yield from _from_lz4(section)
    else:
        raise PacketError(f"section codec {section.codec}, known are 0 (stored), 1 (zstd), 2 (lz4)")


def _from_zstd(section: Section) -> Iterator[bytes]:
    """Decompress one frame block by block (RFC 8878, 3.1.1): given more, a decoder may expand it all."""
    unpack = zstd_decoder()
    at, last = ZstdFrame.of(section).length, False
    yield unpack.decompress(bytes(section.data[:at]))
    while not last:
        head = int.from_bytes(bytes(section.data[at : at + 3]), "little")
        last, size = bool(head & 1), 1 if head >> 1 & 3 == 1 else head >> 3  # kind 1: one byte, repeated
        if size > BLOCK or at + 3 + size > len(section.data):
            raise PacketError(f"a block of {size} bytes in a zstd section of {len(section.data)}")
        yield unpack.decompress(bytes(section.data[at : at + 3 + size]))
        at += 3 + size
    if not unpack.eof:  # its checksum
        yield unpack.decompress(bytes(section.data[at : at + 4]))
    if not unpack.eof:
        raise PacketError(f"a zstd section of {len(section.data)} bytes ends early")


def _from_lz4(section: Section) -> Iterator[bytearray]:
    """Decompress a raw LZ4 block sequence by sequence (token, literals, match); the library needs room for
    all.

    The format is https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md, end conditions included.
    """
    data, raw = _Front(section.data), section.raw
    done, out = 0, bytearray()  # how many bytes there are; the newest of them
    told = 0  # how many of `out` were handed over
    while True:
        token = data.byte()
        literals = data.length(token >> 4)
        if done + literals > raw:
            raise does_not_expand(section, "too long")
        for size in _in_steps(literals):
            out += data.take(size)
            if len(out) > 4 * STEP:
                yield out[told:]
                out, told = out[-FAR:], FAR
        done += literals
        if not data.left:
            break
        if done > raw - 12 or data.left < 8:  # a match begins 12 bytes before the end
            raise does_not_expand(section, "a match too near its end")
        back = data.byte() | data.byte() << 8
        match = data.length(token & 15) + 4
        if not 0 < back <= done or done + match > raw - 5:  # the last five bytes are literals
            raise does_not_expand(section, f"a match {back} bytes back at byte {done}")
        for size in _in_steps(match):
            seed = out[len(out) - back : len(out) - back + size]  # shorter than `size` where it repeats
            out += (seed * -(-size // len(seed)))[:size]
            if len(out) > 4 * STEP:
                yield out[told:]
                out, told = out[-FAR:], FAR
        done += match
    yield out[told:]


class _Front:
    """Take bytes from the front of a section, which is read a step at a time."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at, self._here, self._spot = data, 0, b"", 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at + len(self._here) - self._spot

    def take(self, size: int) -> bytes:
        """Take at most STEP bytes. PacketError where there are fewer."""
        if size > self.left:
            raise PacketError("an lz4 section ends early")
        if size > len(self._here) - self._spot:
            more = bytes(self._data[self._at : self._at + STEP])
            self._at += len(more)
            self._here, self._spot = self._here[self._spot :] + more, 0
        self._spot += size
        return self._here[self._spot - size : self._spot]

    def byte(self) -> int:
        return self.take(1)[0]

    def length(self, field: int) -> int:
        """Read the rest of the length that begins with these four bits."""
        size, more = field, 255 if field == 15 else 0
        while more == 255:
            more = self.byte()
            size += more
        return size


def _in_steps(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, STEP)
        size -= STEP
