"""The objects that a hub serves its standby alone, beside those that every peer can fetch.

    ledger/<link>/<number>       rows of the ledger after this link of its chain (ledger_copy.py)
    updates/<a>-<b>              records of the update log, rounds a .. b-1
    replica/manifest/<number>    the files that a standby should have, from HubDelegate.object
    replica/<stamp>/<path>       one of them; another stamp is another file
    replica/hashes/<stamp>/<path>   SHA-256 of each MiB of it

`<number>` is that of a Grown: an object is read once, and its chunks belong together.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

from transport.ledger import changes_after, updates_between
from transport.protocol import HubDelegate
from transport.transfer import ObjectSource, memory_source

KEPT = 8  # objects
LEDGER = re.compile(r"ledger/([0-9]{1,18})/[0-9]{1,18}")
UPDATES = re.compile(r"updates/([0-9]{1,18})-([0-9]{1,18})")


class ReplicaSource:
    """Finds these objects; used by the reader thread alone."""

    def __init__(self, folder: Path, work: HubDelegate) -> None:
        self._folder, self._work = folder, work
        self._kept: OrderedDict[str, ObjectSource] = OrderedDict()

    def find(self, name: str) -> ObjectSource:
        """Find an object. Raises KeyError, whose text is for the standby."""
        if name not in self._kept:
            self._kept[name] = self._read(name)
            if len(self._kept) > KEPT:
                _, old = self._kept.popitem(last=False)
                if not isinstance(old.data, bytes):
                    old.data.close()
        self._kept.move_to_end(name)
        return self._kept[name]

    def _read(self, name: str) -> ObjectSource:
        if match := LEDGER.fullmatch(name):
            return memory_source(changes_after(self._folder, int(match[1])))
        if match := UPDATES.fullmatch(name):
            return memory_source(updates_between(self._folder, int(match[1]), int(match[2])))
        given = self._work.object(name)
        if isinstance(given, bytes):
            return memory_source(given)
        return ObjectSource(given.open("rb"), 0, given.stat().st_size, b"")
