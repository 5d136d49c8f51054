"""The packet log: an append-only file of records, each with its checksum. `kill -9` leaves a whole prefix.

    record    "CKTL" | round u64 | length u64 | sha256 of payload, 32 bytes | crc32 of all this | payload

Little-endian. Records follow each other without gaps, and so do rounds. A peer that catches up receives
the same bytes (the object "packets/a-b" is a range of this file), so `read_packets` reads both.

A process that is killed leaves one append at most behind the last record that counts. The next process
copies it to <name>.tail before it cuts it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.protocol import LedgerError

PACKETS = "packets.log"  # the file's name, in a ledger's folder
MAGIC = b"CKTL"
HEADER = struct.Struct("<4sQQ32s")
CRC = struct.Struct("<I")
HEADER_SIZE = HEADER.size + CRC.size  # 56
TAIL = ".tail"  # added to the name of a log: what was cut off when it was opened last
WINDOW = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Record:
    """One record's header, and the position of its payload."""

    round: int
    offset: int  # of the record in its file
    length: int  # of the payload
    sha256: bytes

    @property
    def payload(self) -> int:
        return self.offset + HEADER_SIZE

    @property
    def end(self) -> int:
        return self.payload + self.length

    def is_whole(self, file: BinaryIO) -> bool:
        """Read the payload and compare its hash."""
        digest, left = hashlib.sha256(), self.length
        file.seek(self.payload)
        while left and (part := file.read(min(left, WINDOW))):
            digest.update(part)
            left -= len(part)
        return not left and digest.digest() == self.sha256


def pack_header(round: int, payload: bytes) -> bytes:
    return header_of(round, len(payload), hashlib.sha256(payload).digest())


def header_of(round: int, length: int, sha256: bytes) -> bytes:
    head = HEADER.pack(MAGIC, round, length, sha256)
    return head + CRC.pack(zlib.crc32(head))


def unpack_header(head: bytes, offset: int) -> Record | None:
    """Parse a record's header; None if it is torn or no header."""
    if len(head) < HEADER_SIZE:
        return None
    magic, round, length, digest = HEADER.unpack_from(head)
    (crc,) = CRC.unpack_from(head, HEADER.size)
    if magic != MAGIC or crc != zlib.crc32(head[: HEADER.size]):
        return None
    return Record(round, offset, length, digest)


def record_at(file: BinaryIO, at: int) -> Record | None:
    """Read the header at byte `at`; None if there is none."""
    file.seek(at)
    return unpack_header(file.read(HEADER_SIZE), at)


def read_headers(file: BinaryIO) -> Iterator[Record]:
    """Yield the headers of the records up to the first that is torn or cut; the file is left at the
    payload."""
    at, end = 0, file.seek(0, os.SEEK_END)
    while (record := record_at(file, at)) is not None and record.end <= end:
        yield record
        at = record.end


def read_packets(file: BinaryIO, longest: Callable[[int], int] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (round, packet) of each record from the file's position on, checksums verified, one packet in
    memory.

    Args:
        longest: round -> the most bytes of its packet; None: any that the file has.

    Raises LedgerError if a record is torn, damaged or too long; never reads more than the file has.
    """
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    while head := file.read(HEADER_SIZE):
        record = unpack_header(head, file.tell() - len(head))
        if record is None:
            raise LedgerError(f"no packet record at byte {file.tell() - len(head)}")
        if longest is not None and record.length > (most := longest(record.round)):
            raise LedgerError(
                f"the packet of round {record.round} has {record.length:,} bytes, {most:,} at most"
            )
        packet = b"" if record.end > end else file.read(record.length)
        if len(packet) != record.length or hashlib.sha256(packet).digest() != record.sha256:
            raise LedgerError(f"the packet of round {record.round} is torn or damaged")
        yield record.round, packet


def count_records(path: Path) -> int:
    """Count the whole records from the start of a log on, by their headers."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in read_headers(file))


def keep_tail(path: Path, end: int) -> None:
    """Copy what a log has from byte `end` on to <name>.tail, in place of the one before."""
    tail = path.with_name(path.name + TAIL)
    part = tail.with_name(tail.name + ".part")
    with path.open("rb") as log, part.open("wb") as kept:
        log.seek(end)
        shutil.copyfileobj(log, kept, WINDOW)
        kept.flush()
        os.fsync(kept.fileno())
    os.replace(part, tail)


class PacketLog:
    """The file, opened to append. A record counts as written once `append` has returned."""

    def __init__(self, path: Path, end: int, keep: bool = True) -> None:
        """Open `path` and cut it at `end`, the end of the last record that is known to be complete. `keep`
        what is cut off: a process does so with what another one left."""
        self.path = path
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by close)
        have = self._file.seek(0, os.SEEK_END)
        if have < end:
            self._file.close()
            raise LedgerError(
                f"{path.name} has {have} bytes, but {end} were committed: it was cut or replaced"
            )
        if have > end:  # the tail of an append that does not count: it was never announced
            if keep:
                keep_tail(path, end)
            self._file.truncate(end)
            os.fsync(self._file.fileno())
        self.end = end
        self._digest, self._length = hashlib.sha256(), 0  # of the payload begun

    def append(self, round: int, *payload: bytes | memoryview) -> Record:
        """Write one record and wait until it is on the disk. After an error the log must be reopened."""
        self.begin(payload)
        return self.seal(round)

    def begin(self, payload: Iterable[bytes | memoryview]) -> None:
        """Write parts of the next record's payload. Nothing counts before `seal`; `begin` overwrites it."""
        self._file.seek(self.end + HEADER_SIZE)
        self._digest, self._length = hashlib.sha256(), 0
        self._write(payload)

    def _write(self, payload: Iterable[bytes | memoryview]) -> None:
        for part in payload:
            self._digest.update(part)
            self._length += self._file.write(part)

    @property
    def begun(self) -> bytes:
        """Return the SHA-256 of the payload begun."""
        return self._digest.digest()

    def flush(self) -> None:
        """Flush the payload begun to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def seal(self, round: int, *rest: bytes) -> Record:
        """Complete the record begun with the rest of its payload, and wait until it is on the disk."""
        self._write(rest)
        record = Record(round, self.end, self._length, self._digest.digest())
        self._file.seek(self.end)
        self._file.write(header_of(round, record.length, record.sha256))
        self._file.truncate(record.end)  # an overwritten payload may have been longer, and look like a record
        os.fsync(self._file.fileno())
        self.end = record.end
        return record

    def cut(self, end: int = 0) -> None:
        """Drop the records from this byte on, and wait until that is on the disk."""
        self._file.truncate(end)
        os.fsync(self._file.fileno())
        self.end = end

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a write that failed (a full disk) is cut off at the next start
            self._file.close()
