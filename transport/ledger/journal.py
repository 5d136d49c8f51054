"""The journal: every change of the books, durable in the order they were made. SQLite's tables follow from
it.

It has the records of packet_log.py, with the number of the record in place of a round. A payload is msgpack:
the changes of one transaction. A journal that was made anew begins with the number that it was made at.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from transport.protocol import LedgerError

from .book_tables import Change
from .packet_log import MAGIC, WINDOW, PacketLog, Record, pack_header, record_at

JOURNAL = "journal.log"
Changes = Sequence[Change]


class Journal:
    """The journal, opened to append by the one process that writes the books.

    Args:
        end: where its last record that counts ends; what lies behind is cut off.
        next: the number of the next record.
    """

    def __init__(self, path: Path, end: int, next: int) -> None:
        self._log, self.next = PacketLog(path, end), next

    def append(self, changes: Changes) -> None:
        """Write one record and wait until it is on the disk. After an error the journal must be reopened."""
        self._log.append(self.next, msgspec.msgpack.encode(changes))
        self.next += 1

    def close(self) -> None:
        self._log.close()


@dataclass
class JournalReading:
    """The content of a journal: whole records, up to the first that is torn or damaged."""

    path: Path
    first: int = 0  # the number of the first record
    begins: array[int] = field(default_factory=lambda: array("Q"))  # byte at which each record begins
    end: int = 0  # byte at which they end
    fault: str = ""  # what lies behind them, where that is no torn append
    later: list[tuple[int, list[Change]]] = field(default_factory=list)  # whole records behind the fault

    @property
    def empty(self) -> bool:
        return not self.begins

    @property
    def next(self) -> int:
        """Return the number that would follow."""
        return self.first + len(self.begins)

    def changes_from(self, number: int) -> Iterator[list[Change]]:
        """Read the changes of this record and the later ones again."""
        place = max(0, number - self.first)
        if place < len(self.begins):
            with self.path.open("rb") as file:
                for record, changes in records_in(file, self.begins[place]):
                    if record.offset >= self.end:
                        return
                    yield changes


def read_journal(path: Path, take: Callable[[int, Changes], object]) -> JournalReading:
    """Read a journal; `take` the number and the changes of each record. Raises LedgerError where a record
    is of another version."""
    found = JournalReading(path)
    if not path.exists():
        return found
    with path.open("rb") as file:
        for record, changes in records_in(file):
            if found.empty:
                found.first = record.round
            elif record.round != found.next:
                break
            take(record.round, changes)
            found.begins.append(record.offset)
            found.end = record.end
        found.later = [(record.round, changes) for record, changes in records_behind(file, found.end)]
    if found.later:
        found.fault = f"has no record {found.next} at byte {found.end}, and later ones behind it"
    return found


def changes_left(path: Path, number: int) -> list[Changes]:
    """Return the changes of the whole records from this number on; of those before only the header is
    read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        at = 0
        while (record := record_at(file, at)) is not None and record.round < number:
            at = record.end
        return [changes for _, changes in records_in(file, at)]


def records_in(file: BinaryIO, at: int = 0) -> Iterator[tuple[Record, list[Change]]]:
    """Yield whole records from byte `at` on, up to the first that is torn or damaged."""
    while (found := changes_at(file, at)) is not None:
        yield found
        at = found[0].end


def changes_at(file: BinaryIO, at: int) -> tuple[Record, list[Change]] | None:
    """Read the record at byte `at`; None where there is no whole one. Raises LedgerError where it is of a
    newer version."""
    end, record = file.seek(0, os.SEEK_END), record_at(file, at)
    if record is None or record.end > end:
        return None
    payload = file.read(record.length)
    if hashlib.sha256(payload).digest() != record.sha256:
        return None
    try:
        return record, msgspec.msgpack.decode(payload, type=list[Change])
    except msgspec.MsgspecError as error:
        raise of_another_version(error) from None


def of_another_version(error: Exception) -> LedgerError:
    """Make the error of a whole record that cannot be carried out."""
    return LedgerError(f"{JOURNAL} was written by another version of cocktail: {error}")


def records_behind(file: BinaryIO, at: int) -> Iterator[tuple[Record, list[Change]]]:
    """Yield the whole records that begin at byte `at` or behind it, wherever they do."""
    end = file.seek(0, os.SEEK_END)
    while at < end:
        file.seek(at)
        window = file.read(WINDOW)
        begins = window.find(MAGIC)
        if begins < 0:
            at += max(1, len(window) - len(MAGIC) + 1)
        elif (found := changes_at(file, at + begins)) is None:
            at += begins + 1
        else:
            yield found
            at = found[0].end


def write_journal(path: Path, number: int, records: Iterable[Changes]) -> int:
    """Write a journal whose first record has this number, and wait until it is on the disk; return the number
    that follows."""
    with path.open("wb") as file:
        for changes in records:
            payload = msgspec.msgpack.encode(changes)
            file.write(pack_header(number, payload) + payload)
            number += 1
        file.flush()
        os.fsync(file.fileno())
    return number
