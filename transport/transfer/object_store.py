"""Objects that a hub serves by name, chunk by chunk. Files are never read as a whole.

lease/<round>       what Work.samples gives for the asking session's lease
audit/<round>       the same of the samples that the session audits in that round
packet/<round>      the aggregated packet of a committed round
packet/<round>/<shards>   the same, of these shards only: "0-3,40-42"
packets/<a>-<b>     the log's records of rounds a .. b-1 (packet_log.py): what a joiner lacks
accepted/<round>    names of the peers whose updates a round has, as JSON: for an inner hub that was killed
part/<round>/<peer>, estate/<number>   updates and handoffs for an aggregator (shard_aggregation.py)
shard/<round>/<peer>, shard/<round>   aggregate of the shards of a peer, or of the hub (the same)
base/<file>, eval   whatever Work.object gives
snapshot/<round>/model.safetensors     the same, while the hub offers that snapshot
ledger/..., updates/..., replica/...   what a standby lacks (transport.standby)
hashes/<name>       SHA-256 of each MiB of a base or snapshot file (chunks.py), from Work.object too
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.ledger import Ledger
from transport.protocol import HubDelegate, messages, round_and_shards
from transport.wire import SharedPayload

KEPT = 256  # leases and ranges cached
CACHED_CHUNKS = 64  # of the newest packet, for the next peer
KEPT_SELECTED = 64  # packets of a few shards cached, for machines of replicas
MOST_SHARDS = 1 << 10  # of a vector


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


class ObjectStore:
    """The objects of one run. Used by the reader thread, except `committed` and `at_hand`."""

    def __init__(
        self,
        ledger: Ledger,
        work: HubDelegate,
        samples: Callable[[str, str, int], list[int] | None],
        for_owners: Callable[[str, str], bytes],
    ) -> None:
        self.for_standby: Callable[[str, str], ObjectSource] | None = None
        self._folder, self._work, self._for_owners = ledger.folder, work, for_owners
        self._samples = samples  # of a session's "lease" or "audit" of a round
        self._ledger: Ledger | None = None  # a reader of its own: it sees whole transactions only
        self._files: dict[Path, BinaryIO] = {}
        self._given: dict[str, ObjectSource] = {}  # base/..., eval, snapshot/..., hashes/...
        self._snapshots: set[str] = set()  # "snapshot/<round>/" of those that are offered
        self._ranges: OrderedDict[tuple[int, int, bool], ObjectSource] = OrderedDict()  # of the log
        self._leases: OrderedDict[tuple[str, str, int], ObjectSource] = OrderedDict()  # and audits
        self._owned: OrderedDict[tuple[str, str], ObjectSource] = OrderedDict()  # parts, estates
        self._selected: OrderedDict[str, ObjectSource] = OrderedDict()  # shards of packets
        self._newest = "", memory_source(b"")  # the name of the newest packet, and the packet
        self._chunks: OrderedDict[messages.Get, SharedPayload] = OrderedDict()

    def find(self, session: str, name: str) -> ObjectSource:
        """Find an object for a session. Raises KeyError, whose text is for the peer, if there is none."""
        kind, _, rest = name.partition("/")
        if kind in ("lease", "audit") and re.fullmatch(r"[0-9]{1,18}", rest):
            return self._find_samples(session, kind, int(rest))
        if kind == "packet" and re.fullmatch(r"[0-9]{1,18}", rest):
            return self._range(int(rest), int(rest) + 1, payload=True)
        if kind == "packet" and (of := round_and_shards(name, MOST_SHARDS)) is not None:
            return self._select(name, *of)
        if kind == "packets" and (match := re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", rest)):
            return self._range(int(match[1]), int(match[2]))
        if kind == "accepted" and re.fullmatch(r"[0-9]{1,18}", rest):
            return self._accepted(int(rest))
        if kind in ("ledger", "updates", "replica") and self.for_standby is not None:
            return self.for_standby(session, name)
        if kind in ("part", "shard", "estate"):
            return self._find_for_owner(session, name)
        if (snapshot := snapshot_of(name)) and snapshot not in self._snapshots:
            raise KeyError("this snapshot is not offered any more")
        if name not in self._given:
            self._given[name] = self._ask(name)
        return self._given[name]

    def answer(self, session: str, m: messages.Get) -> tuple[messages.Message, bytes | None]:
        """Answer a request for a chunk: the message, and the chunk if there is one."""
        try:
            source = self.find(session, m.name)
            return messages.Data(m.name, m.index, source.size, source.sha256), source.read(m.index, m.chunk)
        except KeyError as error:
            return messages.NoObject(m.name, str(error.args[0])), None
        except Exception as error:
            return messages.NoObject(m.name, f"the hub cannot read it: {type(error).__name__}: {error}"), None

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

    def _find_samples(self, session: str, kind: str, round: int) -> ObjectSource:
        source = self._leases.get((session, kind, round))
        if source is None:
            ids = self._samples(session, kind, round)
            if ids is None:
                raise KeyError(f"this session holds no {kind} of round {round}")
            source = self._leases[session, kind, round] = memory_source(self._work.samples(ids))
            if len(self._leases) > KEPT:
                self._leases.popitem(last=False)
        return source

    def _find_for_owner(self, session: str, name: str) -> ObjectSource:
        if (session, name) not in self._owned:
            self._owned[session, name] = memory_source(self._for_owners(session, name))
            if len(self._owned) > KEPT:
                self._owned.popitem(last=False)
        return self._owned[session, name]

    def opened(self) -> None:
        """Forget the parts of the round before: the new ones may have the same names."""
        self._owned.clear()

    def _range(self, start: int, stop: int, *, payload: bool = False) -> ObjectSource:
        """Locate the packets of these rounds in the log, whose end the system caches."""
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

    def _select(self, name: str, round: int, shards: Collection[int]) -> ObjectSource:
        if name not in self._selected:
            packet = self._range(round, round + 1, payload=True)
            whole = packet.read(0, packet.size)
            self._selected[name] = memory_source(self._work.restricted("", whole, frozenset(shards))[0])
            if len(self._selected) > KEPT_SELECTED:
                self._selected.popitem(last=False)
        return self._selected[name]

    def _accepted(self, round: int) -> ObjectSource:
        names = self._reader().accepted(round)
        if names is None:
            raise KeyError(f"round {round} is not committed")
        return memory_source(json.dumps(names).encode())

    def _reader(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._folder, write=False)
        return self._ledger

    def _ask(self, name: str) -> ObjectSource:
        given = self._work.object(name)
        if isinstance(given, bytes):
            return memory_source(given)
        return ObjectSource(self._file(given), 0, given.stat().st_size, b"")

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
