"""Objects that memory is not to hold: chunks go to a file without a name, within the room of this machine.

Nothing is left of such a file however its process ends. It takes the room of its whole size at once, when its
first chunk says what that is, and gives it back when it is closed.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO, Protocol

from transport.protocol import NoRoom, ProtocolError

from .chunks import ChunkMap

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
