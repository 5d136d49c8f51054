"""The update log: the packets that went into each committed round, so that error feedback survives a crash.

The error feedback e of Algorithm 2 follows from the updates that arrived and the aggregate that left.
Aggregates are in the packet log; updates are here, one record a round in the same format (packet_log.py),
written before the round is committed. Payload, little-endian:

    "CKU2" | updates u32 | inherited u32
    then each: name's bytes u16 | packet's bytes u64 | weight f64 | name, UTF-8 | packet
    sha256 of the aggregated packet, 32 bytes

The hash comes last, so that everything else is written while the packet is being made. `inherited` are the
residual handoffs merged before this round, in order; their weight is their share of the mean.

With many peers their packets are longer than the sum of them. Then the sum is logged, as the aggregator
encodes it: the record begins with "CKU3", has no updates, and the sum lies between the last of the inherited
packets and the hash.

A round that was logged and never committed is cut off at the next start, once it was copied. Once e itself
is on the disk the log is cleared. A crash between the two leaves rounds older than e; a reader starts at
e's round and skips them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transport.protocol import LedgerDamaged, LedgerError, WeightedPacket

from .book_opening import damaged
from .packet_log import PacketLog, read_headers, read_packets

PACKETS, SUM = b"CKU2", b"CKU3"  # what a record holds: packets, or their sum
UPDATES, ERROR_FEEDBACK = "updates.log", "error.safetensors"  # in the ledger's folder
HEAD = struct.Struct("<4sII")
ENTRY = struct.Struct("<HQd")
HASH = 32  # bytes


@dataclass(frozen=True)
class RoundUpdates:
    """The inputs of one committed round."""

    round: int
    sha256: bytes  # of the aggregated packet made from them
    updates: tuple[WeightedPacket, ...]
    inherited: tuple[WeightedPacket, ...] = ()
    total: bytes = b""  # their sum, encoded, where no updates are logged


class UpdateLog:
    """The log, opened to append by the one process that writes the ledger.

    Args:
        stop: the first round that is not committed; records from it on are cut off.
        start: the round of the saved error feedback: this one and later ones are needed.

    Raises LedgerDamaged, with nothing cut off, where something else lies in the place of a needed record.
    """

    def __init__(self, path: Path, stop: int, start: int = 0) -> None:
        self.path = path
        end, last = scan_rounds(path, stop)
        lacks = start < stop and last != stop - 1
        if lacks and path.exists() and path.stat().st_size > end:
            lost = start if last is None else last + 1
            raise damaged_updates(path, f"it lacks the updates of round {lost}, which belong at byte {end}")
        self._log = PacketLog(path, end)
        self._next = stop if last is None else last + 1
        self._newest = end  # where the record of the round before `_next` begins, if this process wrote it

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._log.end

    def begin(
        self,
        round: int,
        updates: Sequence[WeightedPacket],
        inherited: Sequence[WeightedPacket] = (),
        total: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Write the updates of a round, or their `total`; may run beside the thread that makes the packet.

        Nothing is logged before `seal`; another `begin` overwrites it. The newest round may be begun again if
        it was not committed after all: its record is cut off.
        """
        if round == self._next - 1 and self._newest < self._log.end:
            self._log.cut(self._newest)
            self._next = round
        if round != self._next:
            raise LedgerError(f"updates of round {round} cannot follow those of round {self._next - 1}")
        self._log.begin(pack_updates(updates, inherited, total))

    def flush(self) -> None:
        """Flush what was begun to the disk, so that `seal` waits for little."""
        self._log.flush()

    def seal(self, sha256: bytes) -> None:
        """Complete the record with the hash of the aggregated packet, and wait until it is on the disk."""
        begins = self._log.end
        self._log.seal(self._next, sha256)
        self._newest, self._next = begins, self._next + 1

    def clear(self, next: int, keep: bool = False) -> None:
        """Drop all records: the error feedback is on the disk as it is before round `next`. A round that was
        logged and is aggregated again, because all its aggregators were lost, is logged anew.

        `keep` puts them aside, in place of those that were put aside before: a copy may lack the newest.
        """
        if keep:
            self._log.close()
            os.replace(self.path, retired(self.path))
            self._log = PacketLog(self.path, 0)
        else:
            self._log.cut()
            retired(self.path).unlink(missing_ok=True)
        self._newest, self._next = 0, next

    def close(self) -> None:
        self._log.close()


def damaged_updates(path: Path, why: str) -> LedgerDamaged:
    """Make the error of a log that lacks the updates of committed rounds, or of the saved error feedback."""
    saved = path.with_name(ERROR_FEEDBACK)
    neither = "" if saved.exists() else f", and there is no {saved.name}"
    left = "the aggregator's error feedback cannot be restored. Every committed round is whole all the same"
    return damaged(path, f"{why}{neither}: {left}")


def retired(path: Path) -> Path:
    """Name the records that the log at `path` had before it was cleared."""
    return path.with_name(path.name + ".before")


def read_updates(path: Path, start: int) -> Iterator[RoundUpdates]:
    """Yield the records of `start` and later rounds, verified. Raises LedgerError if one is damaged."""
    end, _ = scan_rounds(path, start)
    with path.open("rb") as file:
        file.seek(end)
        try:
            for round, payload in read_packets(file):
                yield unpack_updates(round, payload)
        except LedgerError as error:
            raise damaged_updates(path, str(error)) from None


def read_rounds(path: Path, start: int, stop: int) -> Iterator[RoundUpdates]:
    """Yield the inputs of rounds start .. stop-1, one in memory at a time. Raises LedgerError if one is
    damaged or missing. A record behind them, which a hub may be writing, is not read."""
    want, records = start, read_updates(path, start) if path.exists() else iter(())
    for record in islice(records, max(0, stop - start)):
        if record.round != want:
            break
        yield record
        want += 1
    if want != stop:
        raise damaged_updates(path, f"it lacks the updates of round {want}, which is committed")


def scan_rounds(path: Path, stop: int) -> tuple[int, int | None]:
    """Return (end of the records of rounds before `stop`, the last such round). Reads headers only."""
    end, last = 0, None
    if path.exists():
        with path.open("rb") as file:
            for record in read_headers(file):
                if record.round >= stop:
                    break
                end, last = record.end, record.round
    return end, last


def pack_updates(
    updates: Sequence[WeightedPacket],
    inherited: Sequence[WeightedPacket],
    total: Sequence[bytes | memoryview] = (),
) -> Iterator[bytes | memoryview]:
    """Yield the payload of a record except the hash, without copying the packets."""
    yield HEAD.pack(SUM if total else PACKETS, len(updates), len(inherited))
    for peer, packet, weight in (*updates, *inherited):
        name = peer.encode()
        yield ENTRY.pack(len(name), len(packet), weight) + name
        yield packet
    yield from total


def unpack_updates(round: int, payload: bytes) -> RoundUpdates:
    """Invert `pack_updates` and the hash, of a record whose checksum was verified."""
    if not payload.startswith((PACKETS, SUM)):
        raise LedgerError(f"the updates of round {round} were logged by another version of cocktail")
    _, count, inherited = HEAD.unpack_from(payload)
    at, packets = HEAD.size, list[WeightedPacket]()
    for _ in range(count + inherited):
        name, size, weight = ENTRY.unpack_from(payload, at)
        at += ENTRY.size
        peer, packet = payload[at : at + name].decode(), payload[at + name : at + name + size]
        packets.append(WeightedPacket(peer, packet, weight))
        at += name + size
    end = len(payload) - HASH if payload.startswith(SUM) else at
    return RoundUpdates(round, payload[end:], tuple(packets[:count]), tuple(packets[count:]), payload[at:end])
