"""A run whose folder is copied at each write, as kill -9 at that instant would leave it.

    with recorded(folder) as crashes:
        ...  # a run that writes into `folder`
    crashes.states  # each distinct one: what the files held, and what had been announced by then

A process that is killed loses what it had not handed to the system, and nothing else. So a copy of the files
is what the next process finds. Writes to files are split in two, with a state in between; what SQLite appends
to its WAL is cut at several bytes.
"""

import hashlib
import io
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WAL = "ledger.db-wal"
NOT_KEPT = ("ledger.lock", "ledger.db-shm")  # a lock, which ends with its process; an index, which is remade


@dataclass(frozen=True)
class State:
    """The files that a crash leaves."""

    where: str  # the write it was at
    announced: int  # rounds of which somebody may have heard by then
    files: dict[str, bytes]

    def restore(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


@dataclass
class Crashes:
    """Collects the states of one folder. `announced` says how many rounds were told to anybody."""

    folder: Path
    announced: Callable[[], int] = lambda: 0
    states: list[State] = field(default_factory=list)
    points: int = 0  # instants looked at; many leave the same files
    _seen: set[bytes] = field(default_factory=set)
    _wal: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, where: str) -> None:
        """This is a point: take what is there."""
        with self._lock:
            announced = self.announced()  # before the copy: all of these must be in it
            found = {
                path.name: path.read_bytes()
                for path in sorted(self.folder.iterdir())
                if path.is_file() and path.name not in NOT_KEPT and not path.name.endswith("-journal")
            }
            wal = found.get(WAL, b"")
            for cut in self._cuts(wal):
                torn = found | {WAL: wal[:cut] + self._wal[cut:]}
                self._add(State(f"{where}, WAL torn at {cut}", announced, torn))
            self._wal = wal
            self._add(State(where, announced, found))

    def _cuts(self, wal: bytes) -> list[int]:
        """Yield the lengths at which an append to the WAL might have been cut."""
        if wal == self._wal:
            return []
        same = next(
            (i for i, (a, b) in enumerate(zip(self._wal, wal, strict=False)) if a != b), len(self._wal)
        )
        return sorted({same + 1, (same + len(wal)) // 2, max(same, len(wal) - 1)})

    def _add(self, state: State) -> None:
        self.points += 1
        digest = hashlib.sha256(repr(sorted(state.files.items())).encode()).digest()
        if digest not in self._seen:
            self._seen.add(digest)
            self.states.append(state)


@contextmanager
def recorded(folder: Path) -> Iterator[Crashes]:
    """Every write into `folder` by this process is kept, until the end of the block."""
    crashes = Crashes(folder)
    with watched(folder, crashes.at):
        yield crashes


@contextmanager
def watched(folder: Path, at: Callable[[str], None]) -> Iterator[None]:
    """`at` is called before, in the middle of and after each write of a run's ledger, with what it is."""
    folder.mkdir(parents=True, exist_ok=True)

    class Database(sqlite3.Connection):
        """Each statement is a point: it may be the one that writes."""

        def execute(self, *args: Any) -> sqlite3.Cursor:
            at(f"before {args[0][:20]}")
            cursor = super().execute(*args)
            at(f"after {args[0][:20]}")
            return cursor

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            at(f"before {args[0][:20]}")
            cursor = super().executemany(*args)
            at(f"after {args[0][:20]}")
            return cursor

    class HalfWritten(io.FileIO):
        """Each write happens in two halves."""

        def write(self, data: Any) -> int:
            given = bytes(data)
            for part in (given[: len(given) // 2], given[len(given) // 2 :]):
                at(f"writing {Path(str(self.name)).name}")
                super().write(part)
            at(f"wrote {Path(str(self.name)).name}")
            return len(given)

        def truncate(self, size: int | None = None) -> int:
            at("before truncate")
            done = super().truncate(size)
            at("after truncate")
            return done

    def opened(path: Path, mode: str, **_: Any) -> Any:
        if mode == "rb":
            return path.open(mode)
        return io.BufferedRandom(HalfWritten(path, "r+" if mode == "r+b" else "w+"))

    def connected(path: Path, **options: Any) -> sqlite3.Connection:
        factory = {"factory": Database} if Path(path).name == "ledger.db" else {}
        return connect(path, **options, **factory)

    def around(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call_watched(*args: Any) -> Any:
            at(f"before {what}")
            result = call(*args)
            at(f"after {what}")
            return result

        return call_watched

    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transport.ledger.packet_log.open", opened, raising=False)
        patch.setattr("transport.ledger.run_ledger.sqlite3.connect", connected)
        patch.setattr("recipes.weight_files.open", opened, raising=False)
        patch.setattr(os, "fsync", around(os.fsync, "fsync"))
        patch.setattr(os, "replace", around(os.replace, "replace"))
        yield
