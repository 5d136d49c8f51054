"""Objects received in chunks, in any order and with repeats: in memory, or in a file.

What memory is not to hold goes to a file without a name, within the room of this machine. Nothing is left of
such a file however its process ends. It takes the room of its whole size at once, when its first chunk says
what that is, and gives it back when it is closed.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

from transport.protocol import NoRoom, ProtocolError

CHUNK = 256 * 1024  # bytes; measured: 64 KiB .. 1 MiB reach line rate, larger ones block the I/O thread
HASH_BLOCK = 1 << 20  # bytes of a file that one hash covers; the last block may be shorter
DIGEST = 32
TRIES = 3  # wrong copies of one block before the hub's file is called damaged


class ChunkMap:
    """Bitmap of the chunks received of an object of `size` bytes."""

    def __init__(self, size: int, chunk: int, bits: int = 0) -> None:
        self.size, self.chunk = size, chunk
        self.count = max(1, -(-size // chunk))
        self._bits = bits
        self._here = bits.bit_count()

    def add(self, index: int, payload: bytes | memoryview) -> bool:
        """Mark a chunk; returns False for a repeat. Raises ProtocolError if its index or length is wrong."""
        if not 0 <= index < self.count:
            raise ProtocolError(f"chunk {index} of an object with {self.count}")
        if len(payload) != (length := min(self.chunk, self.size - index * self.chunk)):
            raise ProtocolError(f"chunk {index} has {len(payload)} bytes, expected {length}")
        if self._bits >> index & 1:
            return False
        self._bits |= 1 << index
        self._here += 1
        return True

    def __contains__(self, index: int) -> bool:
        return bool(self._bits >> index & 1)

    def drop(self, indices: Iterable[int]) -> None:
        """Unmark these chunks."""
        for index in indices:
            self._here -= self._bits >> index & 1
            self._bits &= ~(1 << index)

    @property
    def missing(self) -> list[int]:
        bits = bin(self._bits)[:1:-1].ljust(self.count, "0")  # lowest first; shifts would be quadratic
        return [i for i in range(self.count) if bits[i] == "0"]

    @property
    def received(self) -> int:
        """Return the bytes of the chunks that are here."""
        return min(self.size, self._here * self.chunk)

    @property
    def whole(self) -> bool:
        return self._here == self.count

    def bitmap(self) -> bytes:
        """Return the bitmap as bytes: bit i, lowest of the first byte first, is chunk i."""
        return self._bits.to_bytes((self.count + 7) // 8, "little")


class ChunkBuffer:
    """An object in memory. No memory is allocated before chunks arrive."""

    def __init__(self, size: int, sha256: bytes, chunk: int = CHUNK) -> None:
        self.map, self.sha256 = ChunkMap(size, chunk), sha256
        self._parts: dict[int, bytes | memoryview] = {}

    def add(self, index: int, payload: bytes | memoryview) -> list[int]:
        """Add a chunk. Returns the chunks to request again: none here. Raises ProtocolError."""
        if self.map.add(index, payload):
            self._parts[index] = payload
        return []

    def read(self, index: int, size: int) -> bytes | memoryview | None:
        """Return fragment `index` of `size` bytes; None while its chunk is not here.

        Raises KeyError where it is beyond the end, or chunks are not whole fragments.
        """
        start = index * size
        if self.map.chunk % size or start >= max(1, self.map.size):
            raise KeyError(f"there is no fragment {index} of {size} bytes")
        chunk, offset = divmod(start, self.map.chunk)
        return self._parts[chunk][offset : offset + size] if chunk in self.map else None

    def data(self) -> bytes:
        return b"".join(self._parts[i] for i in range(self.map.count))

    def finish(self) -> bytes:
        """Return the object. Raises ProtocolError if its hash is not `sha256` (empty: not checked)."""
        data = self.data()
        if self.sha256 not in (b"", hashlib.sha256(data).digest()):
            raise ProtocolError("the checksum of the whole is wrong")
        return data


class ChunkFile:
    """A file received into `path`.part; each block is checked before it is written.

    The list of hashes is all the state: blocks left by an earlier process, whether complete, damaged or of
    another object, are checked one by one (`verify`), and only wrong ones are requested.

    Args:
        size: bytes of the file.
        hashes: SHA-256 of each of its blocks, one after the other.
        chunk: bytes of a chunk; divides BLOCK.
    """

    def __init__(self, path: Path, size: int, hashes: bytes, chunk: int) -> None:
        if len(hashes) != DIGEST * count_blocks(size):
            raise ProtocolError(f"{len(hashes)} bytes of hashes for {path.name}, a file of {size} bytes")
        self.path, self.map = path, ChunkMap(size, chunk)
        self._hashes, self._part = hashes, path.with_name(path.name + ".part")
        self._per_block = max(1, HASH_BLOCK // chunk)
        self._waiting: dict[int, dict[int, bytes]] = {}  # block -> its chunks, until it is complete
        self._wrong: dict[int, int] = {}  # block -> wrong copies so far
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self._part.exists():
            path.replace(self._part)  # most blocks may be right
        self._part.touch()
        # Unbuffered: a block that is written survives however this process ends.
        self._file: BinaryIO = open(self._part, "r+b", buffering=0)  # noqa: SIM115

    def verify(self, go_on: Callable[[], object] = lambda: None) -> int:
        """Check the blocks on disk and return their right bytes. `go_on`, called before each, may raise."""
        there = self._file.seek(0, 2)
        found = 0
        for block in range(min(count_blocks(self.map.size), -(-there // HASH_BLOCK))):
            go_on()
            self._file.seek(block * HASH_BLOCK)
            data = self._file.read(min(HASH_BLOCK, self.map.size - block * HASH_BLOCK))
            if self.is_right(block, data):
                found += len(data)
                for index in self._chunks(block):
                    start = index * self.map.chunk - block * HASH_BLOCK
                    self.map.add(index, data[start : start + self.map.chunk])
        return found

    def add(self, index: int, payload: bytes) -> list[int]:
        """Add a chunk. Returns the chunks to request again: those of a block whose hash is wrong. Raises
        ProtocolError, OSError."""
        if not self.map.add(index, payload):
            return []
        block = index // self._per_block
        chunks = self._waiting.setdefault(block, {})
        chunks[index] = payload
        wanted = self._chunks(block)
        if len(chunks) < len(wanted):
            return []
        data = b"".join(chunks[i] for i in wanted)
        del self._waiting[block]
        if self.is_right(block, data):
            self._file.seek(block * HASH_BLOCK)
            rest = memoryview(data)
            while rest:  # a disk that is nearly full writes a part, then nothing
                rest = rest[self._file.write(rest) :]
            return []
        self._wrong[block] = self._wrong.get(block, 0) + 1
        if self._wrong[block] >= TRIES:
            raise ProtocolError(f"MiB {block} of {self.path.name} came wrong {TRIES} times")
        self.map.drop(wanted)
        return list(wanted)

    def is_right(self, block: int, data: bytes) -> bool:
        """Tell whether these are the bytes of a block."""
        return hashlib.sha256(data).digest() == self._hashes[block * DIGEST : (block + 1) * DIGEST]

    def _chunks(self, block: int) -> range:
        first = block * self._per_block
        return range(first, min(first + self._per_block, self.map.count))

    def finish(self) -> Path:
        """Move the complete file to its own name."""
        self._file.close()
        os.truncate(self._part, self.map.size)  # an earlier file may have been larger
        self._part.replace(self.path)
        return self.path

    def close(self) -> None:
        """Close the file as it is: another process may resume it."""
        self._file.close()


def count_blocks(size: int) -> int:
    return max(1, -(-size // HASH_BLOCK))


def block_hashes(path: Path) -> bytes:
    """Return the SHA-256 of each block of a file: the content of the object `hashes/<name>`."""
    with open(path, "rb") as file:
        digests = [hashlib.sha256(file.read(HASH_BLOCK)).digest()]
        while block := file.read(HASH_BLOCK):
            digests.append(hashlib.sha256(block).digest())
    return b"".join(digests)


AT_ONCE = 1 << 20  # bytes that are hashed at once
SPARE = 256 << 20  # bytes that stay free on the disk


class DiskRoom(Protocol):
    """The bytes of disk that a run may fill. Any thread may call."""

    @property
    def free(self) -> int:
        """Return the bytes that may be taken now."""

    def take(self, size: int, what: str) -> None:
        """Take room for an object of this name. Raises NoRoom."""

    def give_back(self, size: int) -> None: ...


class FreeDisk:
    """All that is free where a folder is, but for SPARE (a `DiskRoom`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def free(self) -> int:
        return max(0, shutil.disk_usage(self._folder).free - SPARE)

    def take(self, size: int, what: str) -> None:
        if size > (free := self.free):
            raise NoRoom(f"{what} has {size:,} bytes; {free:,} are free at {self._folder}")

    def give_back(self, size: int) -> None:
        """Do nothing: what is closed is free again."""


class Spool:
    """A folder for files without a name, and the room that they may take."""

    def __init__(self, folder: Path, room: DiskRoom) -> None:
        self.folder, self.room = folder, room

    def open(self, name: str, size: int, sha256: bytes, chunk: int) -> ChunkSpool:
        """Open a file for an object. Raises NoRoom, OSError."""
        self.room.take(size, name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what fails here fails where it is written, not when the file is closed.
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
            return ChunkSpool(file, ChunkMap(size, chunk), sha256, self.room)
        except BaseException:
            self.room.give_back(size)
            raise


class ChunkSpool:
    """An object that is received into a file without a name (a `Sink`)."""

    def __init__(self, file: BinaryIO, map: ChunkMap, sha256: bytes, room: DiskRoom) -> None:
        self.map, self._file, self._sha256, self._room = map, file, sha256, room
        self._reader = io.BufferedReader(file)  # type: ignore[type-var]
        self._open = True

    def add(self, index: int, payload: bytes) -> tuple[int, ...]:
        """Add a chunk. Returns the chunks to request again: none here. Raises ProtocolError, OSError."""
        if self.map.add(index, payload):
            self._file.seek(index * self.map.chunk)
            rest = memoryview(payload)
            while rest:  # a disk that is nearly full writes a part, then nothing
                rest = rest[self._file.write(rest) :]
        return ()

    def finish(self) -> BinaryIO:
        """Return the file, at its start. Raises ProtocolError if its hash is wrong (empty: not checked)."""
        digest = hashlib.sha256()
        self._file.seek(0)
        while self._sha256 and (part := self._file.read(AT_ONCE)):
            digest.update(part)
        if self._sha256 not in (b"", digest.digest()):
            raise ProtocolError("the checksum of the whole is wrong")
        self._reader.seek(0)
        return self._reader

    def close(self) -> None:
        """Drop the file, and give its room back."""
        if self._open:
            self._open = False
            self._reader.close()
            self._room.give_back(self.map.size)
