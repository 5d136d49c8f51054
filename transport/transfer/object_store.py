"""Objects that a hub serves by name, chunk by chunk. Files are never read as a whole.

The rows below are those of every run. What a run uses beside them adds its rows with `serve`. Without a row
nothing is served.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.ledger import Ledger
from transport.protocol import Cost, HubDelegate, ObjectKind, messages
from transport.wire import SharedPayload

KEPT = 256  # ranges, and leases, cached
PACKED = 64 << 20  # bytes of leases cached
CACHED_CHUNKS = 64  # of the newest packet, for the next peer

EVERYONE = ()
LEASE = ObjectKind("lease/<round>", ("peer",), "`Round.samples` x the longest sample", Cost.ROUND)
PACKET = ObjectKind("packet/<round>", ("peer",), "the codec's longest packet", Cost.ROUND)
RANGE = ObjectKind("packets/<a>-<b>", ("peer",), "(b - a) x (the codec's longest packet + 56)", Cost.READ)
EVAL = ObjectKind("eval", ("peer",), "the disk that its peer lends", Cost.READ)
BASE = ObjectKind("base/<file>", EVERYONE, "`File.size`", Cost.READ)
SNAPSHOT = ObjectKind("snapshot/<round>/model.safetensors", EVERYONE, "`SnapshotOffer.size`", Cost.READ)
HASHES = ObjectKind("hashes/<object>", EVERYONE, "32 bytes for each MiB of that file", Cost.READ)

NO_ROW = "there is no object of this name for this session"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectSource:
    """Bytes in memory, or a range of an open file."""

    data: bytes | BinaryIO
    offset: int
    size: int
    sha256: bytes  # of the whole; empty: not known

    def read(self, index: int, chunk: int) -> bytes:
        """Read chunk `index`. Raises KeyError if it is beyond the end."""
        start = index * chunk
        if start >= max(1, self.size):
            raise KeyError(f"chunk {index} is beyond its end")
        length = min(chunk, self.size - start)
        if isinstance(self.data, bytes):
            return self.data[start : start + length]
        self.data.seek(self.offset + start)
        return self.data.read(length)


Find = Callable[[str, str, tuple[str, ...]], ObjectSource]  # of session, name, and the places of its form
IdsOf = Callable[[str, int], list[int] | None]  # samples of a session and a round; None: it has none


class ObjectStore:
    """The objects of one run. Used by the reader thread, except `committed`, `at_hand` and `kind_of`.

    Args:
        leased: the samples of a session's lease.
    """

    def __init__(self, ledger: Ledger, work: HubDelegate, leased: IdsOf) -> None:
        self._folder, self._work = ledger.folder, work
        self._ledger: Ledger | None = None  # a reader of its own: it sees whole transactions only
        self._files: dict[Path, BinaryIO] = {}
        self._given: dict[str, ObjectSource] = {}  # base/..., eval, snapshot/..., hashes/...
        self._snapshots: set[str] = set()  # "snapshot/<round>/" of those that are offered
        self._ranges: OrderedDict[tuple[int, int, bool], ObjectSource] = OrderedDict()  # of the log
        self._packed: OrderedDict[tuple[str, str, int], ObjectSource] = OrderedDict()  # leases, audits
        self._packed_size = 0  # bytes
        self._newest = "", memory_source(b"")  # the name of the newest packet, and the packet
        self._chunks: OrderedDict[messages.Get, SharedPayload] = OrderedDict()
        self._rows: dict[str, list[tuple[ObjectKind, Find]]] = {}  # by the first part of the name
        self.serve(LEASE, lambda session, _, of: self.packed(session, "lease", int(of[0]), leased))
        self.serve(PACKET, lambda session, _, of: self.records(int(of[0]), int(of[0]) + 1, payload=True))
        self.serve(RANGE, lambda session, _, of: self.records(int(of[0]), int(of[1])))
        for kind in (BASE, SNAPSHOT, HASHES, EVAL):
            self.serve(kind, lambda session, name, _: self._ask(name))

    # ---- the table -----------------------------------------------------------------------------------------

    def serve(self, kind: ObjectKind, find: Find) -> None:
        """Add a row. `find` raises KeyError, whose text is for the peer, where there is no such object."""
        self._rows.setdefault(kind.prefix, []).append((kind, find))

    @property
    def kinds(self) -> list[ObjectKind]:
        """List the rows of this hub's table."""
        return [kind for rows in self._rows.values() for kind, _ in rows]

    def kind_of(self, name: str, role: str) -> ObjectKind | None:
        """Return the row that a name matches, if sessions of this role may fetch it; else None."""
        found = self._match(name)
        return found[0] if found is not None and role in (found[0].readers or (role,)) else None

    def _match(self, name: str) -> tuple[ObjectKind, Find, tuple[str, ...]] | None:
        for kind, find in self._rows.get(name.partition("/")[0], ()):
            if (parts := kind.parts(name)) is not None:
                return kind, find, parts
        return None

    def find(self, session: str, name: str) -> ObjectSource:
        """Find an object for a session that may fetch it. Raises KeyError, whose text is for the peer."""
        if (found := self._match(name)) is None:
            raise KeyError(NO_ROW)
        _, find, parts = found
        return find(session, name, parts)

    def answer(self, session: str, m: messages.Get) -> tuple[messages.Message, bytes | None]:
        """Answer a request for a chunk: the message, and the chunk if there is one."""
        try:
            source = self.find(session, m.name)
            return messages.Data(m.name, m.index, source.size, source.sha256), source.read(m.index, m.chunk)
        except KeyError as error:
            return messages.NoObject(m.name, str(error.args[0])), None
        except Exception as error:  # its text may name folders of the host
            log.debug("reading %s", m.name, exc_info=error)
            return messages.NoObject(m.name, f"the hub cannot read it: {type(error).__name__}"), None

    def committed(self, round: int, packet: bytes, sha256: bytes) -> None:
        """Cache the newest packet, which all members will fetch. Called by the commit thread."""
        self._newest = f"packet/{round}", ObjectSource(packet, 0, len(packet), sha256)

    def at_hand(self, m: messages.Get) -> tuple[messages.Data, bytes] | None:
        """Return a chunk of the newest packet, the same bytes object for all. Called by the I/O thread."""
        name, source = self._newest
        if m.name != name or m.index * m.chunk >= source.size:
            return None
        if m not in self._chunks:
            self._chunks[m] = SharedPayload(source.read(m.index, m.chunk))
            if len(self._chunks) > CACHED_CHUNKS:
                _, old = self._chunks.popitem(last=False)
                old.made = None  # it refers back to the chunk: a cycle that would not be freed for long
        return messages.Data(name, m.index, source.size, source.sha256), self._chunks[m]

    def keep_snapshots(self, offered: set[str]) -> None:
        """Serve these snapshots ("snapshot/<round>/") only; files of others are closed and may be deleted."""
        self._snapshots = offered
        for name in [n for n in self._given if (s := snapshot_of(n)) and s not in offered]:
            source = self._given.pop(name)
            if not isinstance(source.data, bytes):
                source.data.close()
                self._files = {path: file for path, file in self._files.items() if file is not source.data}

    def packed(self, session: str, what: str, round: int, ids_of: IdsOf) -> ObjectSource:
        """Pack the samples that `ids_of` gives, once. Raises KeyError."""
        source = self._packed.get((session, what, round))
        if source is None:
            ids = ids_of(session, round)
            if ids is None:
                raise KeyError(f"this session holds no {what} of round {round}")
            source = self._packed[session, what, round] = memory_source(self._work.samples(ids))
            self._packed_size += source.size
            while len(self._packed) > KEPT or (self._packed_size > PACKED and len(self._packed) > 1):
                self._packed_size -= self._packed.popitem(last=False)[1].size
        return source

    def records(self, start: int, stop: int, *, payload: bool = False) -> ObjectSource:
        """Locate the records of these rounds in the log, whose end the system caches. Raises KeyError.

        payload: the packet of the first round alone.
        """
        key = (start, stop, payload)
        if key not in self._ranges:
            ledger = self._reader()
            first, last = ledger.record(start), ledger.record(stop - 1)
            if start >= stop or first is None or last is None:
                raise KeyError(f"rounds {start}-{stop} are not committed")
            file = self._file(ledger.log_path)
            records = ObjectSource(file, first.offset, last.end - first.offset, b"")
            packet = ObjectSource(file, first.payload, first.length, first.sha256)
            self._ranges[key] = packet if payload else records
            if len(self._ranges) > KEPT:
                self._ranges.popitem(last=False)
        return self._ranges[key]

    def _reader(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._folder, write=False)
        return self._ledger

    def _ask(self, name: str) -> ObjectSource:
        if (snapshot := snapshot_of(name)) and snapshot not in self._snapshots:
            raise KeyError("this snapshot is not offered any more")
        if name not in self._given:
            given = self._work.object(name)
            if isinstance(given, bytes):
                self._given[name] = memory_source(given)
            else:
                self._given[name] = ObjectSource(self._file(given), 0, given.stat().st_size, b"")
        return self._given[name]

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            # Without a buffer, which would keep what was behind the last record before the next was sealed.
            self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._ledger is not None:
            self._ledger.close()


def snapshot_of(name: str) -> str:
    """Return "snapshot/<round>/" for the name of its file or of its hashes; "" for other names."""
    kind, _, rest = name.removeprefix("hashes/").partition("/")
    return f"snapshot/{rest.partition('/')[0]}/" if kind == "snapshot" else ""


def memory_source(data: bytes) -> ObjectSource:
    return ObjectSource(data, 0, len(data), hashlib.sha256(data).digest())
