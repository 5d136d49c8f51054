"""The update log: which packets of peers went into each committed round, so that the owner's error survives.

The error e of Algorithm 2 follows from what came in and what went out. What went out is in the packet log;
what came in is here, in the same kind of record (packet_log.py), one a round, written before the round is
committed. The payload, little-endian:

    "CKU2" | updates u32 | inherited u32
    then each: name's bytes u16 | packet's bytes u64 | weight f64 | name, UTF-8 | packet
    sha256 of the aggregated packet, 32 bytes

The hash comes last, so that all else is written while the packet is being made. `inherited` are legacies of
peers that left, which the owner took over before this round, in this order; their weight is their share of
the mean.

Of many peers the packets are longer than what they come to. Then that is logged, as the owner writes it:
"CKU3" stands in front, no update follows, and what they came to lies between the last of the inherited and
the hash.

A round that was logged and never committed is cut off at the next start. Once e itself is on the disk the log
is cleared; a crash between the two leaves rounds older than e, which who reads from e's round on leaves out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.protocol import LedgerError

from .packet_log import HEADER_SIZE, PacketLog, read_packets, unpack_header

PACKETS, SUM = b"CKU2", b"CKU3"  # what of a round is in its record
HEAD = struct.Struct("<4sII")
ENTRY = struct.Struct("<HQd")
HASH = 32  # bytes

WeightedPacket = tuple[str, bytes, float]  # peer, packet, weight: as `HubDelegate.aggregate` takes them


@dataclass(frozen=True)
class RoundUpdates:
    """What went into one committed round."""

    round: int
    sha256: bytes  # of the aggregated packet that came of them
    updates: tuple[WeightedPacket, ...]
    inherited: tuple[WeightedPacket, ...] = ()
    came_to: bytes = b""  # instead of updates


class UpdateLog:
    """The file, opened to append, by the process that writes the ledger.

    Args:
        stop: rounds from this one on are not committed: what the file has of them is cut off.
    """

    def __init__(self, path: Path, stop: int) -> None:
        self.path = path
        end, last = scan_rounds(path, stop)
        self._log = PacketLog(path, end)
        self._next = stop if last is None else last + 1
        self._newest = end  # where the record of the round before `_next` begins, if this process wrote it

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._log.end

    def append(
        self,
        round: int,
        sha256: bytes,
        updates: Sequence[WeightedPacket],
        inherited: Sequence[WeightedPacket] = (),
    ) -> None:
        """Write down a round that is about to be committed, and wait until the disk has it."""
        self.begin(round, updates, inherited)
        self.seal(sha256)

    def begin(
        self,
        round: int,
        updates: Sequence[WeightedPacket],
        inherited: Sequence[WeightedPacket] = (),
        came_to: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Write what went into a round, or what it came to, for a thread beside the one that makes its
        packet. Nothing is logged before `seal`; another `begin` writes over it. The newest round, where it
        was not committed after all, may be begun again: what was logged of it is cut off.
        """
        if round == self._next - 1 and self._newest < self._log.end:
            self._log.cut(self._newest)
            self._next = round
        if round != self._next:
            raise LedgerError(f"updates of round {round} cannot follow those of round {self._next - 1}")
        self._log.begin(pack_updates(updates, inherited, came_to))

    def flush(self) -> None:
        """Have what was begun on the disk, so that `seal` need not wait for much."""
        self._log.flush()

    def seal(self, sha256: bytes) -> None:
        """What was begun is logged, with the hash of the packet that came of it, once the disk has it."""
        begins = self._log.end
        self._log.seal(self._next, sha256)
        self._newest, self._next = begins, self._next + 1

    def rounds(self, start: int, stop: int) -> Iterator[RoundUpdates]:
        """What went into rounds start .. stop-1, checksums verified, one round in memory at a time.

        Raises LedgerError where one of them is damaged or missing.
        """
        want = start
        with self.path.open("rb") as file:
            for round, payload in read_packets(file):
                if round < start:
                    continue
                if round != want:
                    break
                yield unpack_updates(round, payload)
                want += 1
        if want != stop:
            raise LedgerError(f"{self.path} lacks the updates of round {want}, which is committed")

    def clear(self, next: int) -> None:
        """The owner's error is on the disk as it is before round `next`: nothing that led to it is needed any
        more. A round that was logged and comes again, as all its owners were lost, is logged anew."""
        self._log.cut()
        self._newest, self._next = 0, next

    def close(self) -> None:
        self._log.close()


def scan_rounds(path: Path, stop: int) -> tuple[int, int | None]:
    """(where the records of rounds before `stop` end, the last such round). Reads headers only."""
    end, last = 0, None
    size = path.stat().st_size if path.exists() else 0
    if size:
        with path.open("rb") as file:
            while (record := unpack_header(file.read(HEADER_SIZE), end)) is not None:
                if record.round >= stop or record.end > size:
                    break
                end, last = record.end, record.round
                file.seek(end)
    return end, last


def pack_updates(
    updates: Sequence[WeightedPacket],
    inherited: Sequence[WeightedPacket],
    came_to: Sequence[bytes | memoryview] = (),
) -> Iterator[bytes | memoryview]:
    """The payload of a record but for the hash, without a copy of what is in it."""
    yield HEAD.pack(SUM if came_to else PACKETS, len(updates), len(inherited))
    for peer, packet, weight in (*updates, *inherited):
        name = peer.encode()
        yield ENTRY.pack(len(name), len(packet), weight) + name
        yield packet
    yield from came_to


def unpack_updates(round: int, payload: bytes) -> RoundUpdates:
    """Inverse of `pieces` and the hash. The record's checksum was verified: it is what was written."""
    if not payload.startswith((PACKETS, SUM)):
        raise LedgerError(f"the updates of round {round} were logged by another version of cocktail")
    _, count, inherited = HEAD.unpack_from(payload)
    at, updates = HEAD.size, list[WeightedPacket]()
    for _ in range(count + inherited):
        name, size, weight = ENTRY.unpack_from(payload, at)
        at += ENTRY.size
        updates.append((payload[at : at + name].decode(), payload[at + name : at + name + size], weight))
        at += name + size
    end = len(payload) - HASH if payload.startswith(SUM) else at
    return RoundUpdates(round, payload[end:], tuple(updates[:count]), tuple(updates[count:]), payload[at:end])
