"""The objects that a hub serves its standby alone, beside those that peers can fetch.

    ledger/<link>/<number>       rows of the ledger after this link of its chain (ledger_copy.py)
    updates/<a>-<b>              records of the update log, rounds a .. b-1
    replica/manifest/<number>    the files that a standby should have
    replica/<stamp>/<path>       one of them; another stamp is another file
    replica/hashes/<stamp>/<path>   SHA-256 of each MiB of it

`<number>` is that of a Grown: an object is read once, and its chunks belong together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from transport.ledger import changes_after, updates_between
from transport.protocol import Cost, HubDelegate, ObjectKind, Role
from transport.transfer import ObjectSource, ObjectStore, memory_source

KEPT = 8  # objects
ONE: tuple[Role, ...] = ("standby",)
LEDGER = ObjectKind("ledger/<link>/<number>", ONE, "8 MiB of rows and the small tables", Cost.MADE)
UPDATES = ObjectKind("updates/<a>-<b>", ONE, "the update log", Cost.READ)
MANIFEST = ObjectKind("replica/manifest/<number>", ONE, "the names of the run's files", Cost.MADE)
HASHES = ObjectKind("replica/hashes/<stamp>/<path>", ONE, "32 bytes for each MiB of that file", Cost.MADE)
FILE = ObjectKind("replica/<stamp>/<path>", ONE, "its size in the manifest", Cost.READ)


class ReplicaSource:
    """Finds these objects; used by the reader thread alone.

    Args:
        follows: tells whether a session is the one that follows now.
    """

    def __init__(self, folder: Path, work: HubDelegate, follows: Callable[[str], bool]) -> None:
        self._folder, self._work, self._follows = folder, work, follows
        self._kept: OrderedDict[str, ObjectSource] = OrderedDict()

    def serve(self, store: ObjectStore) -> None:
        """Add these rows to the hub's table."""
        store.serve(
            LEDGER, self._cached(lambda name, of: memory_source(changes_after(self._folder, int(of[0]))))
        )
        store.serve(
            UPDATES, self._cached(lambda name, of: memory_source(self._updates(int(of[0]), int(of[1]))))
        )
        for kind in (MANIFEST, HASHES, FILE):
            store.serve(kind, self._cached(lambda name, of: self._file(name)))

    def _updates(self, start: int, stop: int) -> bytes:
        return updates_between(self._folder, start, stop)

    def _cached(
        self, read: Callable[[str, tuple[str, ...]], ObjectSource]
    ) -> Callable[[str, str, tuple[str, ...]], ObjectSource]:
        """Return how the store finds an object of this kind: read once, for the session that follows."""

        def find(session: str, name: str, of: tuple[str, ...]) -> ObjectSource:
            if not self._follows(session):
                raise KeyError(f"{name} is for the run's standby")
            if name not in self._kept:
                self._kept[name] = read(name, of)
                if len(self._kept) > KEPT:
                    _, old = self._kept.popitem(last=False)
                    if not isinstance(old.data, bytes):
                        old.data.close()
            self._kept.move_to_end(name)
            return self._kept[name]

        return find

    def _file(self, name: str) -> ObjectSource:
        given = self._work.replica(name)
        if isinstance(given, bytes):
            return memory_source(given)
        return ObjectSource(given.open("rb"), 0, given.stat().st_size, b"")
