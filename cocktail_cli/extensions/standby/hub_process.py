"""The process of a hub, as its standby needs it: its ledger, its threads, and the objects for that session
alone.

    ledger/<link>/<number>       rows of the ledger after this link of its chain (ledger_copy.py)
    updates/<a>-<b>              records of the update log, rounds a .. b-1
    replica/packets/<a>-<b>      as `packets/<a>-<b>` for peers
    replica/manifest/<number>    the files that a standby should have
    replica/<stamp>/<path>       one of them; another stamp is another file
    replica/hashes/<stamp>/<path>   SHA-256 of each MiB of it

`<number>` is that of a Grown: an object is read once, and its chunks belong together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from cocktail_cli.assembly import hub_routes
from transport import Ledger, RunKeys, ask_status
from transport.actions import Shell
from transport.protocol import Cost, ObjectKind, TransportError
from transport.transfer import ObjectSource, ObjectStore, memory_source

from .bodies import NAME, Standby
from .ledger_copy import changes_after, open_tables, updates_between, voters_of

KEPT = 8  # objects
ONE = (NAME,)
LEDGER = ObjectKind("ledger/<link>/<number>", ONE, "8 MiB of rows and the small tables", Cost.ROUND)
UPDATES = ObjectKind("updates/<a>-<b>", ONE, "the update log", Cost.ROUND)
PACKETS = ObjectKind(
    "replica/packets/<a>-<b>", ONE, "(b - a) x (the codec's longest packet + 56)", Cost.ROUND
)
MANIFEST = ObjectKind("replica/manifest/<number>", ONE, "the names of the run's files", Cost.ROUND)
HASHES = ObjectKind("replica/hashes/<stamp>/<path>", ONE, "32 bytes for each MiB of that file", Cost.ROUND)
FILE = ObjectKind("replica/<stamp>/<path>", ONE, "its size in the manifest", Cost.ROUND)


class HubProcess:
    """One host's process. `shell` is set once there is a hub; the reader thread alone finds objects.

    Args:
        files: finds "replica/..." by name.
    """

    def __init__(self, keys: RunKeys, ledger: Ledger, files: Callable[[str], bytes | Path]) -> None:
        self._keys, self._ledger, self._files = keys, ledger, files
        self.recorded = ledger.noted(NAME)
        self.shell: Shell | None = None
        self._kept: OrderedDict[str, ObjectSource] = OrderedDict()

    def voters(self) -> frozenset[str]:
        """Return the keys of the peers that may elect a standby; called in the commit thread."""
        with open_tables(self._ledger.folder) as db:
            return voters_of(db)

    def record(self, standby: Standby | None) -> None:
        """Write into the ledger who the standby is; None: nobody."""
        text = "" if standby is None else msgspec.json.encode(standby).decode()
        assert self.shell is not None
        self.shell.later(lambda: self._ledger.note(NAME, text))

    def ask(self, standby: Standby, visited: Callable[[int], object]) -> None:
        """Ask the machine of a standby for its term, in a thread, and pass that to the hub's."""
        url = replace(self._keys.url("", 0, self._ledger.run), dial=hub_routes)

        def ask() -> None:
            try:
                term = int(ask_status(url.at(standby.place, standby.key), 2.0).get("term", 0))
            except TransportError:
                return
            assert self.shell is not None
            self.shell.apply(lambda _: visited(term))

        threading.Thread(target=ask, name="cocktail-ask", daemon=True).start()

    # ---- objects -------------------------------------------------------------------------------------------

    def serve(self, store: ObjectStore, follows: Callable[[str], bool]) -> None:
        """Add rows to the hub's table. `follows` tells whether a session is the one that follows now."""
        folder, find = self._ledger.folder, dict[ObjectKind, Callable[..., ObjectSource]]()
        find[LEDGER] = lambda _, link, number: memory_source(changes_after(folder, int(link)))
        find[UPDATES] = lambda _, a, b: memory_source(updates_between(folder, int(a), int(b)))
        find[PACKETS] = lambda _, a, b: store.records(int(a), int(b))
        find |= dict.fromkeys((MANIFEST, HASHES, FILE), lambda name, *_: self._file(name))
        for kind, read in find.items():
            store.serve(kind, self._cached(read, follows))

    def _cached(
        self, read: Callable[..., ObjectSource], follows: Callable[[str], bool]
    ) -> Callable[[str, str, tuple[str, ...]], ObjectSource]:
        """Return how the store finds an object of this kind: read once, for the session that follows."""

        def find(session: str, name: str, of: tuple[str, ...]) -> ObjectSource:
            if not follows(session):
                raise KeyError(f"{name} is for the run's standby")
            if name not in self._kept:
                self._kept[name] = read(name, *of)
                if len(self._kept) > KEPT:
                    dropped, old = self._kept.popitem(last=False)
                    if not isinstance(old.data, bytes) and not dropped.startswith("replica/packets/"):
                        old.data.close()  # that of packets is the store's
            self._kept.move_to_end(name)
            return self._kept[name]

        return find

    def _file(self, name: str) -> ObjectSource:
        given = self._files(name)
        if isinstance(given, bytes):
            return memory_source(given)
        return ObjectSource(given.open("rb"), 0, given.stat().st_size, b"")
