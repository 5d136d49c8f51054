"""An object that arrives in chunks, in any order, each perhaps more than once: in memory, or in a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .errors import ProtocolError

SAVE_EVERY = 64  # chunks between two notes of what is on the disk


class ChunkMap:
    """Which chunks of an object of `size` bytes are here."""

    def __init__(self, size: int, chunk: int, bits: int = 0) -> None:
        self.size, self.chunk = size, chunk
        self.count = max(1, -(-size // chunk))
        self._bits = bits
        self._here = bits.bit_count()

    def length(self, index: int) -> int:
        return min(self.chunk, self.size - index * self.chunk)

    def add(self, index: int, payload: bytes) -> bool:
        """Note a chunk; False where it was here already. Raises ProtocolError where it does not belong."""
        if not 0 <= index < self.count:
            raise ProtocolError(f"chunk {index} of an object with {self.count}")
        if len(payload) != self.length(index):
            raise ProtocolError(f"chunk {index} has {len(payload)} bytes, expected {self.length(index)}")
        if self._bits >> index & 1:
            return False
        self._bits |= 1 << index
        self._here += 1
        return True

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.count) if not self._bits >> i & 1]

    @property
    def whole(self) -> bool:
        return self._here == self.count

    @property
    def bytes_here(self) -> int:
        return min(self.size, self._here * self.chunk)

    @property
    def bits(self) -> int:
        return self._bits

    def bitmap(self) -> bytes:
        """Bit i, lowest of the first byte first, is set where chunk i is here."""
        return self._bits.to_bytes((self.count + 7) // 8, "little")


class Parts:
    """In memory. Nothing is allocated for what was only promised."""

    def __init__(self, size: int, sha256: bytes, chunk: int) -> None:
        self.map, self.sha256 = ChunkMap(size, chunk), sha256
        self._parts: dict[int, bytes] = {}
        self._digest, self._hashed = hashlib.sha256(), 0

    def add(self, index: int, payload: bytes) -> bool:
        """Take a chunk; False where it was here already. Raises ProtocolError."""
        if not self.map.add(index, payload):
            return False
        self._parts[index] = payload
        while self._hashed in self._parts:  # as they come, so that no thread ever stands still for the whole
            self._digest.update(self._parts[self._hashed])
            self._hashed += 1
        return True

    @property
    def good(self) -> bool:
        """Is the whole what was promised? An empty sha256 promised nothing."""
        return self.map.whole and self.sha256 in (b"", self._digest.digest())

    def data(self) -> bytes:
        return b"".join(self._parts[i] for i in range(self.map.count))

    def finish(self) -> bytes:
        """The object. Raises ProtocolError where its checksum is wrong."""
        if not self.good:
            raise ProtocolError("the checksum of the whole is wrong")
        return self.data()

    def save(self) -> None:
        """Memory need not be saved."""


class PartFile:
    """In `path`.part; `path`.have says what is in it, so that a later process can go on."""

    def __init__(self, path: Path, size: int, sha256: bytes, chunk: int) -> None:
        self.path, self.sha256 = path, sha256
        self._part = path.with_name(path.name + ".part")
        self._have = path.with_name(path.name + ".have")
        self._stamp = b"%d %d %s\n" % (size, chunk, sha256.hex().encode())
        self.map = ChunkMap(size, chunk, self._resume(size, chunk))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._part, "r+b" if self.map.bits else "w+b")  # noqa: SIM115 (closed by finish)
        self._unsaved = 0

    def _resume(self, size: int, chunk: int) -> int:
        """The bits of an earlier attempt at the same object."""
        try:
            stamp, _, bitmap = self._have.read_bytes().partition(b"\n")
            there = self._part.stat().st_size
        except OSError:
            return 0
        if stamp + b"\n" != self._stamp:
            return 0
        whole = there == size
        count = max(1, -(-size // chunk)) if whole else there // chunk
        return int.from_bytes(bitmap, "little") & ((1 << count) - 1)

    def add(self, index: int, payload: bytes) -> bool:
        """Take a chunk; False where it was here already. Raises ProtocolError, OSError."""
        if not self.map.add(index, payload):
            return False
        self._file.seek(index * self.map.chunk)
        self._file.write(payload)
        self._unsaved += 1
        if self._unsaved >= SAVE_EVERY:
            self.save()
        return True

    def save(self) -> None:
        """Let another process go on from here."""
        self._file.flush()
        self._have.write_bytes(self._stamp + self.map.bitmap())
        self._unsaved = 0

    def finish(self) -> Path:
        """The file under its own name. Raises ProtocolError, and begins anew, where the checksum is wrong."""
        self._file.close()
        if self.sha256 and file_digest(self._part) != self.sha256:
            self._part.unlink()
            self._have.unlink(missing_ok=True)
            raise ProtocolError(f"the checksum of {self.path.name} is wrong")
        self._part.replace(self.path)
        self._have.unlink(missing_ok=True)
        return self.path


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()
