"""The packet log: an append-only file of records, each with its checksum. `kill -9` leaves a whole prefix.

    record    "CKTL" | round u64 | length u64 | sha256 of payload, 32 bytes | crc32 of all this | payload

Little-endian. Records follow each other without gaps, rounds without gaps from the first. The same bytes
travel to a peer that catches up (the object "packets/a-b" is a range of this file), so `read_packets` reads
both.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.protocol import LedgerError

MAGIC = b"CKTL"
HEADER = struct.Struct("<4sQQ32s")
CRC = struct.Struct("<I")
HEADER_SIZE = HEADER.size + CRC.size  # 56


@dataclass(frozen=True)
class Record:
    """One record's header, and where its payload lies."""

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


def pack_header(round: int, payload: bytes) -> bytes:
    return header_of(round, len(payload), hashlib.sha256(payload).digest())


def header_of(round: int, length: int, sha256: bytes) -> bytes:
    head = HEADER.pack(MAGIC, round, length, sha256)
    return head + CRC.pack(zlib.crc32(head))


def unpack_header(head: bytes, offset: int) -> Record | None:
    """The record whose header `head` is; None where it is torn or no header."""
    if len(head) < HEADER_SIZE:
        return None
    magic, round, length, digest = HEADER.unpack_from(head)
    (crc,) = CRC.unpack_from(head, HEADER.size)
    if magic != MAGIC or crc != zlib.crc32(head[: HEADER.size]):
        return None
    return Record(round, offset, length, digest)


def read_packets(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(round, packet) of each record from the file's position on, checksums verified, one packet in memory.

    Raises LedgerError where a record is torn or damaged. No more is read for it than the file has.
    """
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    while head := file.read(HEADER_SIZE):
        record = unpack_header(head, file.tell() - len(head))
        if record is None:
            raise LedgerError(f"no packet record at byte {file.tell() - len(head)}")
        packet = b"" if record.end > end else file.read(record.length)
        if len(packet) != record.length or hashlib.sha256(packet).digest() != record.sha256:
            raise LedgerError(f"the packet of round {record.round} is torn or damaged")
        yield record.round, packet


class PacketLog:
    """The file, opened to append. Nothing counts as written before `append` has returned."""

    def __init__(self, path: Path, end: int) -> None:
        """Opens `path` and cuts it at `end`, the end of the last record that its owner knows to be whole."""
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by close)
        have = self._file.seek(0, os.SEEK_END)
        if have < end:
            self._file.close()
            raise LedgerError(
                f"{path.name} has {have} bytes, but {end} were committed: it was cut or replaced"
            )
        if have > end:  # the tail of an append that no row was written for: it was never announced
            self._file.truncate(end)
            os.fsync(self._file.fileno())
        self._end = end
        self._digest, self._length = hashlib.sha256(), 0  # of what was begun

    @property
    def end(self) -> int:
        return self._end

    def append(self, round: int, *payload: bytes | memoryview) -> Record:
        """Write one record, its payload in pieces, and wait until the disk has it. After an error open it
        anew."""
        self.begin(payload)
        return self.seal(round)

    def begin(self, payload: Iterable[bytes | memoryview]) -> None:
        """Write a payload, or its first pieces, where the next record is to stand. It is none before `seal`,
        and another `begin` writes over it."""
        self._file.seek(self._end + HEADER_SIZE)
        self._digest, self._length = hashlib.sha256(), 0
        self._go_on(payload)

    def _go_on(self, payload: Iterable[bytes | memoryview]) -> None:
        for piece in payload:
            self._digest.update(piece)
            self._length += self._file.write(piece)

    def flush(self) -> None:
        """Have what was begun on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def seal(self, round: int, *rest: bytes) -> Record:
        """Make a record of what was begun, with the rest of it, and wait until the disk has it."""
        self._go_on(rest)
        header = header_of(round, self._length, self._digest.digest())
        record = unpack_header(header, self._end)
        assert record is not None
        self._file.seek(self._end)
        self._file.write(header)
        self._file.truncate(record.end)  # what was written over may have been longer, and look like a record
        os.fsync(self._file.fileno())
        self._end = record.end
        return record

    def cut(self, end: int = 0) -> None:
        """Forget the records from this byte on, and wait until the disk has."""
        self._file.truncate(end)
        os.fsync(self._file.fileno())
        self._end = end

    def close(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # what could not be written (a full disk) is cut off at the next start
            self._file.close()
