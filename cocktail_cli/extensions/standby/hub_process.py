"""The process of a hub, as its standby needs it: its ledger, its threads, and the objects for that session
alone.

    ledger/<link>/<number>       rows of the ledger after this link of its chain (ledger_copy.py)
    updates/<a>-<b>              records of the update log, rounds a .. b-1
    replica/packets/<a>-<b>      as `packets/<a>-<b>` for peers
    replica/manifest/<number>    the files that a standby should have
    replica/<stamp>/<path>       one of them; another stamp is another file
    replica/hashes/<stamp>/<path>   SHA-256 of each MiB of it

`<number>` is that of a Grown: an object is read once, and its chunks belong together. Files are named as in
the standby's folder:

    recipe.json, recipe.yaml, tokenizer/, stream.jsonl    as in the run's folder
    base/                  the base model, wherever it lies here; not of a gated one
    data/<n>/              the local files of the recipe's n-th data set (held-out ones after the others)
    snapshots/<round>/     the newest snapshots
    ledger/error.safetensors    the aggregator's saved error feedback

What grows with each round (ledger, packets, updates) is fetched by the round instead.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cocktail_cli.assembly import hub_routes
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import own_keys, read_run
from transport import Ledger, RunKeys, ask_status
from transport.actions import Shell
from transport.ledger import ERROR_FEEDBACK
from transport.protocol import Cost, ObjectKind, TransportError
from transport.transfer import ObjectSource, ObjectStore, block_hashes, memory_source

from .bodies import NAME, Manifest, ReplicaFile, Standby
from .ledger_copy import changes_after, open_tables, updates_between, voters_of

if TYPE_CHECKING:
    from cocktail_cli.host import RunDelegate
    from recipes.config import Dataset

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
        self.shell: Shell
        self._kept: OrderedDict[str, ObjectSource] = OrderedDict()

    def voters(self) -> frozenset[str]:
        """Return the keys of the peers that may elect a standby; called in the commit thread."""
        with open_tables(self._ledger.folder) as db:
            return voters_of(db)

    def record(self, standby: Standby | None) -> None:
        """Write into the ledger who the standby is; None: nobody."""
        text = "" if standby is None else msgspec.json.encode(standby).decode()
        self.shell.later(lambda: self._ledger.note(NAME, text))

    def ask(self, standby: Standby, visited: Callable[[int], object]) -> None:
        """Ask the machine of a standby for its term, in a thread, and pass that to the hub's."""
        url = replace(self._keys.url("", 0, self._ledger.run), dial=hub_routes)

        def ask() -> None:
            try:
                term = int(ask_status(url.at(standby.place, standby.key), 2.0).get("term", 0))
            except TransportError:
                return
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


# Fields of run.json that a standby has of its own, and the secrets
NOT_COPIED = ("keys", "url", "pid", "port", "bind", "output_dir", "base", "arguments", "reach")


class ReplicaFiles:
    """The files of one run. `ledger`: the folder of its ledger."""

    def __init__(self, work: RunDelegate, ledger: Path) -> None:
        self.work, self.folder = work, ledger.parent

    def paths(self) -> dict[str, Path]:
        """Return name -> path here of every file that a standby should have now."""
        found = {
            name: self.folder / name for name in (in_folder.RESOLVED, in_folder.RECIPE, in_folder.STREAM)
        }
        found |= below(self.folder / in_folder.TOKENIZER, in_folder.TOKENIZER)
        found |= below(self.folder / in_folder.SNAPSHOTS, in_folder.SNAPSHOTS)
        if not self.work.base.licence.gated:
            found |= below(self.work.base.folder, in_folder.BASE)
        for number, dataset in enumerate(in_folder.datasets_of(self.work.recipe)):
            found |= {f"{in_folder.DATA}/{number}/{name}": path for name, path in local_files(dataset)}
        found[f"{in_folder.LEDGER}/{ERROR_FEEDBACK}"] = self.folder / in_folder.LEDGER / ERROR_FEEDBACK
        return {name: path for name, path in found.items() if path.is_file()}

    def object(self, name: str) -> bytes | Path:
        """Return "replica/manifest/...", "replica/<stamp>/<path>" or "replica/hashes/<stamp>/<path>".

        Raises KeyError where there is no such file any more.
        """
        self.work.durable.keeps_cleared = True
        kind, _, rest = name.removeprefix("replica/").partition("/")
        if kind == "manifest":
            return self.manifest()
        stamp, _, path = rest.partition("/") if kind == "hashes" else (kind, "", rest)
        here = self.paths().get(path)
        if here is None or str(here.stat().st_mtime_ns) != stamp:
            raise KeyError(f"there is no {name} any more")
        return block_hashes(here) if kind == "hashes" else here

    def manifest(self) -> bytes:
        here = {name: path.stat() for name, path in sorted(self.paths().items())}
        files = [ReplicaFile(name, one.st_size, one.st_mtime_ns) for name, one in here.items()]
        record = read_run(self.folder)
        known = {k: v for k, v in asdict(record).items() if k not in NOT_COPIED} if record else {}
        made = Manifest(files, self.work.durable.saved, own_keys().public, known)
        return json.dumps(msgspec.to_builtins(made)).encode()


def below(folder: Path, name: str) -> dict[str, Path]:
    """Return the files below a folder, without those that are being written."""
    paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for path in paths
        if not any(part.startswith(".") or ".part" in part for part in path.relative_to(folder).parts)
    }


def local_files(dataset: Dataset) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the local files of a data set; none of one that is fetched from elsewhere."""
    path = Path(dataset.path)
    if path.is_dir():
        for name, file in below(path, ".").items():
            yield name.removeprefix("./"), file
    elif path.is_file():
        yield path.name, path
