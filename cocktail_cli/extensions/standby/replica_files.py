"""The files of a run that its standby needs, served under their names in the standby's folder.

    recipe.json, recipe.yaml, tokenizer/, stream.jsonl    as in the run's folder
    base/                  the base model, wherever it lies here; not of a gated one
    data/<n>/              the local files of the recipe's n-th data set (held-out ones after the others)
    snapshots/<round>/     the newest snapshots
    ledger/error.safetensors    the aggregator's saved error feedback

What grows with each round (ledger, packets, updates) is fetched by the round instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import own_keys, read_run
from transport.ledger import ERROR_FEEDBACK
from transport.transfer import block_hashes

if TYPE_CHECKING:
    from cocktail_cli.host import RunDelegate
    from recipes.config import Dataset

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
        files = []
        for name, path in sorted(self.paths().items()):
            about = path.stat()
            files.append({"path": name, "size": about.st_size, "stamp": about.st_mtime_ns})
        record = read_run(self.folder)
        known = {k: v for k, v in asdict(record).items() if k not in NOT_COPIED} if record else {}
        own = own_keys().public
        return json.dumps(
            {"files": files, "saved": self.work.durable.saved, "own_key": own, "record": known}
        ).encode()


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
